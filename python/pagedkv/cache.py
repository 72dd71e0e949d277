"""The cache of one sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagedkv import _pagedkv
from pagedkv._arguments import optional_text, optional_whole, whole
from pagedkv.pages import PageView


class LayerPages(NamedTuple):
    """The pages of one layer: keys, values and, where they are quantised, the scales of both."""

    keys: PageView
    values: PageView
    key_scales: PageView | None
    value_scales: PageView | None


def layer_pages(native: tuple[Any, Any]) -> LayerPages:
    (keys, key_scales), (values, value_scales) = native
    return LayerPages(
        PageView(keys),
        PageView(values),
        None if key_scales is None else PageView(key_scales),
        None if value_scales is None else PageView(value_scales),
    )


class PagedKVCache:
    """Keys and values of one sequence, in pages, for one layer or many.

    Arrays are ``[num_kv_heads, num_tokens, head_dim]``, or with a batch of 1 before it: numpy, torch, mlx or any with
    DLPack, in CPU memory, float32, float16 or bfloat16. Shapes and dtypes are those of the first write. Results are
    numpy arrays (bfloat16 as ml_dtypes').

    block_size: tokens of a page, 1 to 256. num_blocks: pages before any growth. dtype: "float32", "float16" or
    "bfloat16" to store in place of what comes in. quant: "off", "q8", "q6", "q4", or "k=q8,v=q4". dynamic: grow beyond
    num_blocks. context_window: tokens at which growth stops unless more are needed, 0 for none. sliding_window: replaces
    what attend() is asked for. max_bytes: of pages, 0 for what the machine allows. What is None takes the
    ``PAGEDKV_…`` and ``MTPLX_…`` variables (docs/mtplx.md), then 16, 1024, the first write's, off, on, none.

    A call that raises has changed nothing: ValueError for wrong arguments, CapacityError (a ValueError) where growth is
    off, PageMemoryError (a MemoryError) where the machine or max_bytes refuses. Threads may call at once.
    """

    def __init__(
        self,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        dtype: str | None = None,
        quant: str | None = None,
        dynamic: bool | None = None,
        context_window: int | None = None,
        sliding_window: int | None = None,
        max_bytes: int | None = None,
        num_layers: int = 1,
    ) -> None:
        self._native = _pagedkv.PagedKVCache(
            block_size=optional_whole("block_size", block_size, 1, 256),
            num_blocks=optional_whole("num_blocks", num_blocks, 1, 2**31 - 1),
            dtype=optional_text("dtype", dtype),
            quant=optional_text("quant", quant),
            dynamic=dynamic if dynamic is None else bool(dynamic),
            context_window=optional_whole("context_window", context_window, 0, 2**62),
            sliding_window=optional_whole("sliding_window", sliding_window, 0, 2**31 - 1),
            max_bytes=optional_whole("max_bytes", max_bytes, 0, 2**62),
            num_layers=whole("num_layers", num_layers, 1, 65536),
            environment=True,
        )

    def update(self, keys: Any, values: Any, layer: int = 0) -> None:
        """Stores new tokens behind those that the layer has."""
        self._native.update(keys, values, layer)

    def attend(
        self,
        queries: Any,
        *,
        layer: int = 0,
        scale: float | None = None,
        causal: bool = True,
        sliding_window: int = 0,
        logit_softcap: float = 0.0,
        sinks: Any = None,
        mask: Any = None,
        bias: Any = None,
        log_sum_exp: bool = False,
    ) -> Any:
        """Attention of the newest tokens (update() first).

        queries ``[num_q_heads, num_queries, head_dim]`` -> ``[num_q_heads, num_queries, value_head_dim]`` in their
        dtype; with log_sum_exp a pair, its second ``[num_queries, num_q_heads]`` float32. scale: 1 / sqrt(head_dim)
        where None. sliding_window > 0: a query sees the last that many tokens up to its own. mask: bool
        ``[num_queries, offset]``, False hides; bias: float, the same shape, added to scaled scores. Both apply beside
        the other rules. sinks: ``[num_q_heads]``.
        """
        return self._native.attend(
            queries,
            layer=layer,
            scale=scale,
            causal=causal,
            sliding_window=sliding_window,
            logit_softcap=logit_softcap,
            sinks=sinks,
            mask=mask,
            bias=bias,
            log_sum_exp=log_sum_exp,
        )

    def state(self, layer: int = 0) -> tuple[Any, Any]:
        """Copies of keys and values ``[num_kv_heads, offset, head_dim]`` in the dtypes they came in; (None, None) where
        nothing is held."""
        return self._native.state(layer)

    def set_state(self, layers: Sequence[tuple[Any, Any]]) -> None:
        """Replaces everything by one (keys, values) for each layer, of equally many tokens."""
        self._native.set_state(list(layers))

    @property
    def meta_state(self) -> tuple[str, str, str]:
        """(block_size, num_blocks, offset) as decimals; set_state() first when setting it."""
        return self._native.meta_state()

    @meta_state.setter
    def meta_state(self, meta: Sequence[str]) -> None:
        self._native.set_meta_state(list(meta))

    def copy(
        self,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        quant: str | None = None,
        dynamic: bool | None = None,
    ) -> PagedKVCache:
        """An independent cache that holds the same tokens and has the same settings, but for those given. The bytes
        are copied where the format stays, else read and stored anew. copy.copy and copy.deepcopy do the same."""
        cache = PagedKVCache.__new__(PagedKVCache)
        cache._native = _pagedkv.PagedKVCache.from_cache(
            self._native, block_size=block_size, num_blocks=num_blocks, quant=quant, dynamic=dynamic
        )
        return cache

    def __copy__(self) -> PagedKVCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        return self.copy()

    def __reduce__(self) -> str:
        raise TypeError("a PagedKVCache cannot be pickled: keep state() and meta_state instead")

    def __repr__(self) -> str:
        return (
            f"<PagedKVCache of {self.offset} tokens, room for {self.capacity}, "
            f"{self.num_layers} layers, quant {self.quant}>"
        )

    def trim(self, num_tokens: int) -> int:
        """Forgets the last num_tokens tokens of every layer; returns how many it forgot. What one layer has beyond
        the others goes too: trim(0) undoes a step that not every layer finished."""
        return self._native.trim(num_tokens)

    def reset(self) -> None:
        """Forgets everything and gives the memory back, as soon as no view of its pages lives."""
        self._native.reset()

    def grow_to_capacity(self, num_tokens: int) -> None:
        """Raises capacity to at least num_tokens. No byte is moved."""
        self._native.grow_to_capacity(num_tokens)

    def shrink_to_capacity(self, num_tokens: int) -> int:
        """Gives back pages beyond those in use and beyond num_tokens of capacity; returns the capacity. BufferError
        while views of pages live."""
        return self._native.shrink_to_capacity(num_tokens)

    def make_mask(
        self, num_queries: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """What the next num_queries tokens may see: None, "causal" or a bool array [num_queries, offset + num_queries]."""
        return self._native.make_mask(num_queries, return_array, window_size)

    def pages(self, layer: int = 0) -> LayerPages:
        """The layer's pages as they lie in memory. ValueError before the first write, which makes them."""
        native = self._native.pages(layer)
        if native[0] is None:
            raise ValueError("nothing has been written yet: there are no pages")
        return layer_pages(native)

    def block_table(self) -> Any:
        """The pages of the sequence, int32: entry i holds tokens [i * block_size, (i + 1) * block_size)."""
        return self._native.block_table()

    def stats(self) -> dict[str, Any]:
        """Counters and sizes; the keys are those of ``pagedkv run --stats --json``."""
        stats: dict[str, Any] = json.loads(self._native.stats_json())
        return stats

    @property
    def offset(self) -> int:
        """Tokens that every layer holds."""
        return min(self._native.offset(layer) for layer in range(self._native.num_layers))

    def __len__(self) -> int:
        return self.offset

    @property
    def capacity(self) -> int:
        """Tokens that fit without growth."""
        return self._native.capacity

    @property
    def block_size(self) -> int:
        return self._native.block_size

    @property
    def num_layers(self) -> int:
        return self._native.num_layers

    @property
    def quant(self) -> str:
        return self._native.quant

    @property
    def nbytes(self) -> int:
        """Memory behind the pages, scales included."""
        return self._native.size_bytes
