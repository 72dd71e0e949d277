"""VllmMetalPagedKVCache: MTPLX's class over our pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pagedkv import _arrays, _pagedkv
from pagedkv._arguments import whole
from pagedkv.cache import LayerPages, layer_pages
from pagedkv.mtplx import _page_import, _sizing
from pagedkv.mtplx._counters import Counters
from pagedkv.mtplx._environment import env_int, env_strict_int, env_truthy
from pagedkv.mtplx._masks import Visibility, visibility
from pagedkv.mtplx.attention_context import current_attention_phase
from pagedkv.mtplx.kv_quant import PagedKVQuantConfig, config_from_env


class _FromEnvironment:
    def __repr__(self) -> str:
        return "from the environment"


FROM_ENVIRONMENT: Final = _FromEnvironment()

_PAGE_ARRAYS = _page_import.NAMES  # in the order of pagedkv.LayerPages


def _unless_off(config: PagedKVQuantConfig | str | None) -> PagedKVQuantConfig | None:
    if isinstance(config, str):
        config = PagedKVQuantConfig(config)
    if config is not None and not hasattr(config, "normalized_mode"):
        raise TypeError(f"kv_quant_config {config!r}: must be a PagedKVQuantConfig, a word or None")
    return None if config is None or config.normalized_mode == "off" else config


def _whole(name: str, value: Any, least: int, most: int = 2**62) -> int:
    """int(value), as MTPLX takes sizes."""
    return whole(name, int(value), least, most)


class VllmMetalPagedKVCache(Counters):
    """Keys and values of one attention layer of one sequence, in pages.

    Pages are ``[num_blocks, block_size, num_kv_heads, head_dim]``, the layout of vLLM's Metal kernels; positions are
    contiguous from 0, and block i of the sequence is page i. Arrays are ``[1, num_kv_heads, num_tokens, head_dim]``,
    float32, float16 or bfloat16: mlx's where mlx is installed, in and out, else numpy's. Shapes and dtypes are those of
    the first write, which allocates: all num_blocks where growth is off, what is needed where it is on
    (MTPLX_DYNAMIC_PAGED_KV). Growth copies nothing.

    block_size: tokens of a page, 1 to 256. keys, values, offset: what to begin with. kv_quant_config: a
    PagedKVQuantConfig, None for off; left out, as MTPLX_VLLM_METAL_PAGED_KV_QUANT and MTPLX_PAGED_KV_QUANT say now.
    turboquant_config: taken and left unused, as MTPLX does without its Metal kernels.

    A call that raises has changed nothing: ValueError for arguments that do not fit, pagedkv.CapacityError (a
    ValueError) where capacity is exceeded and growth is off, pagedkv.PageMemoryError (a MemoryError) where the machine
    refuses.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_blocks: int = 1024,
        keys: Any | None = None,
        values: Any | None = None,
        offset: int = 0,
        turboquant_config: Any | None = None,
        kv_quant_config: PagedKVQuantConfig | _FromEnvironment | None = FROM_ENVIRONMENT,
    ) -> None:
        if isinstance(kv_quant_config, _FromEnvironment):
            kv_quant_config = config_from_env()
        self._native: _pagedkv.PagedKVCache | None = None  # None: nothing allocated
        self._shape_: tuple[int, int, int] | None = None  # kv heads, head_dim of K, of V
        self._dtypes_: tuple[str, str] | None = None
        self._incoming: dict[str, Any] = {}  # page arrays and offset that were assigned
        self.block_size = _whole("block_size", block_size, 1, 256)
        self.num_blocks = _whole("num_blocks", num_blocks, 1, 2**31 - 1)
        self.turboquant_config = None
        self.turboquant = False
        self._kv_quant_config = _unless_off(kv_quant_config)
        super().__init__()
        if turboquant_config is not None:
            from pagedkv.mtplx.cache_state import _warn_vllm_metal_ops_unavailable

            _warn_vllm_metal_ops_unavailable(
                RuntimeError("TurboQuant needs the Metal kernels"), context="TurboQuant cache"
            )
        if keys is not None and values is not None:
            self._load_contiguous_state(keys, values, int(offset))

    @classmethod
    def from_cache(
        cls,
        entry: Any,
        *,
        block_size: int = 16,
        num_blocks: int = 1024,
        turboquant_config: Any | None = None,
        kv_quant_config: PagedKVQuantConfig | _FromEnvironment | None = FROM_ENVIRONMENT,
    ) -> VllmMetalPagedKVCache:
        """A cache that holds a copy of the first `offset` tokens of an entry: any object with keys, values, offset."""
        return cls(
            block_size=block_size,
            num_blocks=num_blocks,
            keys=getattr(entry, "keys", None),
            values=getattr(entry, "values", None),
            offset=int(getattr(entry, "offset", 0)),
            turboquant_config=turboquant_config,
            kv_quant_config=kv_quant_config,
        )

    def __copy__(self) -> VllmMetalPagedKVCache:
        copy = type(self).__new__(type(self))
        native = self._live()
        for name, value in vars(self).items():
            setattr(copy, name, dict(value) if isinstance(value, dict) else value)
        if native is not None:
            copy._native = _pagedkv.PagedKVCache.from_cache(native)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> VllmMetalPagedKVCache:
        return self.__copy__()

    def __reduce__(self) -> str:
        raise TypeError("a paged cache cannot be pickled: keep state and meta_state instead")

    def __repr__(self) -> str:
        return (
            f"<VllmMetalPagedKVCache of {self.offset} tokens, room for {self.capacity}, "
            f"{self.paged_stats()['mode']}>"
        )

    # ---- what is allocated

    def _live(self) -> _pagedkv.PagedKVCache | None:
        if self._incoming:
            try:
                self._adopt()
            except BaseException:
                self._incoming = {}  # what was there before stays
                raise
        return self._native

    def _new_native(self, num_blocks: int) -> _pagedkv.PagedKVCache:
        quant = self._kv_quant_config
        return _pagedkv.PagedKVCache(
            block_size=_whole("block_size", self.block_size, 1, 256),
            num_blocks=num_blocks,
            quant="off" if quant is None else quant.normalized_mode,
            dynamic=True,  # whether it may grow is asked at each growth
        )

    def _drop(self) -> None:
        self._native = None
        self._incoming = {}

    @property
    def kv_quant_config(self) -> PagedKVQuantConfig | None:
        """How pages are quantised. Setting it on a cache that holds tokens stores them anew in the new format."""
        return self._kv_quant_config

    @kv_quant_config.setter
    def kv_quant_config(self, config: PagedKVQuantConfig | None) -> None:
        config = _unless_off(config)
        mode = "off" if config is None else config.normalized_mode
        native = self._live()
        if native is not None and native.quant != mode:
            copy = _pagedkv.PagedKVCache.from_cache(
                native,
                block_size=native.block_size,
                num_blocks=native.capacity // native.block_size,
                quant=mode,
                dynamic=True,
            )
            self._native = copy if copy.offset() > 0 else None
        self._kv_quant_config = config

    @property
    def kv_quant(self) -> bool:
        """Whether pages are quantised: kv_quant_config says how."""
        return self._kv_quant_config is not None

    @kv_quant.setter
    def kv_quant(self, on: bool) -> None:
        if bool(on) != self.kv_quant:
            raise ValueError(f"kv_quant {bool(on)}: set kv_quant_config")

    @property
    def allocated_blocks(self) -> int | None:
        """Pages that the cache has (None before the first write)."""
        native = self._live()
        return None if native is None else native.capacity // native.block_size

    @property
    def capacity(self) -> int:
        """Tokens that fit without growth: of the pages there are, else of num_blocks."""
        native = self._live()
        return int(self.block_size) * int(self.num_blocks) if native is None else native.capacity

    @property
    def offset(self) -> int:
        """Tokens held. Lowering it forgets the newest ones; it cannot be raised."""
        native = self._live()
        return 0 if native is None else native.offset()

    @offset.setter
    def offset(self, value: Any) -> None:
        number = int(value)
        if self._incoming:
            self._incoming["offset"] = number
            return
        self._rewind(number)

    def _rewind(self, offset: int) -> None:
        held = self.offset
        if offset < 0 or offset > held:
            raise ValueError(f"paged KV offset {offset}: must be in 0..{held}, the tokens held")
        if self._native is not None:
            self._native.trim(held - offset)

    def _grow_to_capacity(self, required_tokens: int) -> bool:
        """Makes room for required_tokens, by the growth rule; False where growth is off. Copies nothing."""
        required, size = int(required_tokens), int(self.block_size)
        native = self._live()
        blocks = self.capacity // size
        grown = _sizing._dynamic_paged_growth_blocks(
            block_size=size, current_blocks=blocks, required_tokens=required
        )
        if grown is None:
            return False
        if grown > blocks:
            if native is not None:
                # At least one block more, as the rule has it also where the tokens fit already.
                native.grow_to_capacity(max(required, (blocks + 1) * size), _sizing.window_tokens())
            self.grow_events += 1
        self.num_blocks = blocks if native is None else native.capacity // size
        if native is None and grown > blocks:
            self.num_blocks = grown
        return True

    # ---- writing

    def update_without_fetch(self, keys: Any, values: Any) -> None:
        """Stores keys and values [1, num_kv_heads, num_tokens, head_dim] behind those held."""
        self._write_tail(keys, values)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """The same, then everything held: state."""
        self._write_tail(keys, values)
        return self._active_arrays()

    def _write_tail(self, keys: Any, values: Any) -> None:
        started = time.perf_counter()
        shape, dtypes = self._check_rows(keys, values)
        native = self._live()
        if native is not None and (self._shape_, self._dtypes_) != (shape, dtypes):
            raise ValueError(
                "paged KV cache shape/dtype changed: "
                f"had {self._shape_}/{self._dtypes_}, got {shape}/{dtypes}"
            )
        steps = int(keys.shape[2])
        required = self.offset + steps
        if native is None:
            native = self._write_first(keys, values, required)
        else:
            if required > native.capacity and not self._grow_to_capacity(required):
                self._refuse(required)
            native.update(_arrays.to_native(keys), _arrays.to_native(values))
        self._native, self._shape_, self._dtypes_ = native, shape, dtypes
        self.update_calls += 1
        if self.kv_quant:
            phase = current_attention_phase()
            if phase == "prefill" or (phase == "unknown" and steps > 1):
                self._reset_kv_quant_route()
        self.cache_write_time_s += time.perf_counter() - started

    def _write_first(self, keys: Any, values: Any, required: int) -> _pagedkv.PagedKVCache:
        size, blocks, events = int(self.block_size), self.num_blocks, self.grow_events
        if required > size * int(blocks) and not self._grow_to_capacity(required):
            self._refuse(required)
        try:
            native = self._new_native(int(self.num_blocks))
            keys, values = _arrays.to_native(keys), _arrays.to_native(values)
            if not env_truthy(_sizing.DYNAMIC):  # everything at once, before anything is stored
                native.update(keys[:, :, :0], values[:, :, :0])
                native.grow_to_capacity(native.capacity)
            native.update(keys, values)
        except BaseException:
            self.num_blocks, self.grow_events = blocks, events
            raise
        self._reset_kv_quant_route()
        return native

    def _refuse(self, required: int) -> None:
        raise _pagedkv.CapacityError(
            f"paged KV cache capacity exceeded: {required} > {self.capacity}"
        )

    @staticmethod
    def _check_rows(keys: Any, values: Any) -> tuple[tuple[int, int, int], tuple[str, str]]:
        for name, array in (("keys", keys), ("values", values)):
            shape = getattr(array, "shape", None)
            if shape is None:
                raise TypeError(f"{name}: {type(array)} is no array")
            if len(shape) == 0 or int(shape[0]) != 1:
                raise ValueError(
                    f"{name} of shape {list(shape)}: paged KV caches support batch size 1"
                )
            if len(shape) != 4:
                raise ValueError(
                    f"{name} of shape {list(shape)}: must be [1, heads, tokens, head_dim]"
                )
        if tuple(keys.shape[1:3]) != tuple(values.shape[1:3]):
            raise ValueError(
                f"values of shape {list(values.shape)} do not match keys of shape {list(keys.shape)}"
            )
        return (
            (int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3])),
            (_arrays.dtype_name(keys.dtype), _arrays.dtype_name(values.dtype)),
        )

    def _load_contiguous_state(self, keys: Any, values: Any, offset: int) -> None:
        """Replaces everything by the first `offset` tokens. Nothing has changed where that is refused."""
        total = min(int(offset), int(keys.shape[2]))
        held = self._native, self._incoming, self._shape_, self._dtypes_
        self._drop()
        if total <= 0:
            return
        try:
            self._write_tail(keys[..., :total, :], values[..., :total, :])
        except BaseException:
            self._native, self._incoming, self._shape_, self._dtypes_ = held
            raise

    # ---- reading and replacing

    def long_context_dense_fallback_forbidden(self) -> bool:
        """Whether reading keys and values is an error now: MTPLX_ASSERT_NO_PAGED_ACTIVE_ARRAYS is set, offset has
        reached MTPLX_VLLM_METAL_PAGED_PARTITION_THRESHOLD (2048), and no MTPLX_ALLOW_… variable allows it."""
        if env_truthy("MTPLX_ALLOW_LONG_CONTEXT_DENSE_FALLBACK") or env_truthy(
            "MTPLX_ALLOW_PAGED_ACTIVE_ARRAY_SNAPSHOT"
        ):
            return False
        return (
            env_truthy("MTPLX_ASSERT_NO_PAGED_ACTIVE_ARRAYS")
            and self.offset >= self._partition_threshold()
        )

    @staticmethod
    def _partition_threshold() -> int:
        return env_int("MTPLX_VLLM_METAL_PAGED_PARTITION_THRESHOLD", 2048)

    def _active_arrays(self) -> tuple[Any | None, Any | None]:
        started = time.perf_counter()
        self.active_array_calls += 1
        try:
            if self.long_context_dense_fallback_forbidden():
                raise RuntimeError(
                    "MTPLX_ASSERT_NO_PAGED_ACTIVE_ARRAYS forbids to materialize active K/V arrays: "
                    f"phase={current_attention_phase()} offset={self.offset} "
                    f"threshold={self._partition_threshold()}"
                )
            native = self._live()
            if native is None or native.offset() <= 0:
                return None, None
            keys, values = native.state()
            assert keys is not None and values is not None
            if self.kv_quant:
                self.kv_quant_dequant_calls += 1
                self.kv_quant_dequant_tokens += native.offset()
                self.kv_quant_dequant_time_s += time.perf_counter() - started
            return _arrays.from_numpy(keys[None]), _arrays.from_numpy(values[None])
        finally:
            self.active_array_time_s += time.perf_counter() - started

    @property
    def state(self) -> tuple[Any | None, Any | None]:
        """Copies of keys and values [1, num_kv_heads, offset, head_dim] in the dtypes they came in; (None, None) where
        nothing is held. Setting it replaces everything."""
        return self._active_arrays()

    @state.setter
    def state(self, value: tuple[Any | None, Any | None]) -> None:
        keys, values = value
        if keys is None or values is None:
            self._drop()
        else:
            self._load_contiguous_state(keys, values, int(keys.shape[2]))

    def keys_and_values(self) -> tuple[Any | None, Any | None]:
        """state, by the name that some models of mlx-lm 0.32 ask for."""
        return self._active_arrays()

    @property
    def keys(self) -> Any | None:
        """As state. Setting it keeps the values, cut to as many tokens; None empties the cache."""
        return self._active_arrays()[0]

    @keys.setter
    def keys(self, value: Any | None) -> None:
        self._replace_half(value, 0)

    @property
    def values(self) -> Any | None:
        """As state. Setting it keeps the keys, cut to as many tokens; None empties the cache."""
        return self._active_arrays()[1]

    @values.setter
    def values(self, value: Any | None) -> None:
        self._replace_half(value, 1)

    def _replace_half(self, value: Any | None, half: int) -> None:
        if value is None:
            self._drop()
            return
        kept = None if self.empty() else self._active_arrays()[1 - half]
        tokens = int(value.shape[2])
        if kept is None or int(kept.shape[2]) < tokens:
            held = 0 if kept is None else int(kept.shape[2])
            raise ValueError(
                f"{('keys', 'values')[half]} of {tokens} tokens: the cache holds {held} of the others"
            )
        pair = (value, kept) if half == 0 else (kept, value)
        self._load_contiguous_state(*pair, tokens)

    @property
    def meta_state(self) -> tuple[str, ...]:
        """(block_size, num_blocks, offset) as decimals. Setting it: the geometry where nothing is allocated, else the
        offset, which must not exceed the tokens held."""
        return (str(self.block_size), str(self.num_blocks), str(self.offset))

    @meta_state.setter
    def meta_state(self, value: Sequence[str] | None) -> None:
        if not value:
            return
        size, blocks, offset = int(value[0]), int(value[1]), int(value[2])
        native = self._live()
        if native is None:
            if offset != 0:
                raise ValueError(
                    f"restored paged KV offset {offset}: the cache holds no tokens, set state first"
                )
            self.block_size = _whole("block_size", size, 1, 256)
            self.num_blocks = _whole("num_blocks", blocks, 1, 2**31 - 1)
            return
        if offset > native.capacity:
            raise ValueError(
                f"restored paged KV offset exceeds page capacity: {offset} > {native.capacity}"
            )
        self._rewind(offset)
        self.num_blocks = native.capacity // native.block_size

    def trim(self, n: int) -> int:
        """Forgets the newest n tokens, at most all; returns how many. ValueError for a negative n."""
        count = _whole("n", n, 0)
        native = self._live()
        return 0 if native is None else native.trim(count)

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset <= 0

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> Any | None:
        """What the next N tokens may see: None (one token), "causal", or a bool array [N, offset + N]."""
        mask = self._mask_cache().make_mask(N, return_array, window_size)
        return mask if mask is None or isinstance(mask, str) else _arrays.from_numpy(mask)

    def _mask_cache(self) -> _pagedkv.PagedKVCache:
        native = self._live()
        return _pagedkv.PagedKVCache() if native is None else native

    # ---- pages

    def pages(self) -> LayerPages | None:
        """The pages without a copy (numpy, torch); None before the first write. See pagedkv.PageView."""
        native = self._live()
        if native is None:
            return None
        native.grow_to_capacity(
            native.capacity
        )  # the memory of all blocks, so that all can be seen
        return layer_pages(native.pages())

    def _page_array(self, name: str) -> Any | None:
        pages = self.pages()
        if pages is None:
            return self._incoming.get(name)
        view = pages[_PAGE_ARRAYS.index(name)]
        return None if view is None else _arrays.from_numpy(view.numpy())

    def _set_page_array(self, name: str, value: Any | None) -> None:
        if value is None:
            if name in ("key_cache", "value_cache"):
                self._drop()
            return
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) != 4 or int(shape[1]) != int(self.block_size):
            raise ValueError(
                f"{name} of shape {list(shape)}: must be [blocks, {self.block_size}, heads, width]"
            )
        if not self._incoming:
            self._incoming["offset"] = self.offset
        self._incoming[name] = value

    @property
    def key_cache(self) -> Any | None:
        """Pages of keys [num_blocks, block_size, num_kv_heads, head_dim], codes where they are quantised; None before
        the first write. numpy's array is the memory itself, mlx's a copy. Assigning pages replaces them."""
        return self._page_array("key_cache")

    @key_cache.setter
    def key_cache(self, value: Any | None) -> None:
        self._set_page_array("key_cache", value)

    @property
    def value_cache(self) -> Any | None:
        """As key_cache."""
        return self._page_array("value_cache")

    @value_cache.setter
    def value_cache(self, value: Any | None) -> None:
        self._set_page_array("value_cache", value)

    @property
    def key_scale_cache(self) -> Any | None:
        """Scales [num_blocks, block_size, num_kv_heads, 1] float32; None where nothing is quantised."""
        return self._page_array("key_scale_cache")

    @key_scale_cache.setter
    def key_scale_cache(self, value: Any | None) -> None:
        self._set_page_array("key_scale_cache", value)

    @property
    def value_scale_cache(self) -> Any | None:
        """As key_scale_cache."""
        return self._page_array("value_scale_cache")

    @value_scale_cache.setter
    def value_scale_cache(self, value: Any | None) -> None:
        self._set_page_array("value_scale_cache", value)

    @property
    def key_zero_cache(self) -> None:
        """TurboQuant's zero points: never there."""
        return None

    @property
    def _shape(self) -> tuple[int, int, int] | None:
        return self._shape_

    @_shape.setter
    def _shape(self, value: tuple[int, int, int] | None) -> None:
        if value is not None:
            self._incoming.setdefault("offset", self.offset)
            self._incoming["shape"] = tuple(int(n) for n in value)

    @property
    def _dtypes(self) -> tuple[Any, Any] | None:
        names = self._dtypes_
        return None if names is None else (_arrays.dtype_of(names[0]), _arrays.dtype_of(names[1]))

    @_dtypes.setter
    def _dtypes(self, value: tuple[Any, Any] | None) -> None:
        if value is not None:
            self._incoming.setdefault("offset", self.offset)
            self._incoming["dtypes"] = tuple(_arrays.dtype_name(d) for d in value)

    def _adopt(self) -> None:
        """Takes the page arrays that were assigned as this cache's pages, as soon as none is missing."""
        incoming = self._incoming
        names = _PAGE_ARRAYS if self.kv_quant else _PAGE_ARRAYS[:2]
        if not any(name in incoming for name in _PAGE_ARRAYS):
            self._incoming = {}
            return
        own = None
        if self._native is not None:
            self._native.grow_to_capacity(self._native.capacity)
            own = layer_pages(self._native.pages())
        given: list[np.ndarray[Any, Any]] = []
        for index, name in enumerate(names):
            if name in incoming:
                given.append(_arrays.to_numpy(incoming[name]))
                continue
            view = None if own is None else own[index]
            if view is None:
                return  # the others are still to come
            given.append(view.numpy())
        blocks = int(given[0].shape[0])
        bits = self._kv_quant_config.bits if self._kv_quant_config is not None else 0
        shape = incoming.get("shape") or _page_import.shape_of(given, bits)
        dtypes = incoming.get("dtypes") or (self._dtypes_ if bits else None)
        dtypes = dtypes or _page_import.dtypes_of(given, bits)
        native = self._new_native(blocks)
        _page_import.fill(native, given, shape, dtypes, int(incoming["offset"]))
        self._native, self._shape_, self._dtypes_ = native, shape, dtypes
        self.num_blocks, self._incoming = blocks, {}

    @property
    def nbytes(self) -> int:
        """Memory behind the pages, scales included."""
        native = self._live()
        return 0 if native is None else native.size_bytes

    # ---- attention

    def _reset_kv_quant_route(self) -> None:
        self._kv_quant_route = None
        self._kv_quant_route_offset = -1

    def kv_quant_working_rows(self) -> int:
        """Rows of a working copy beside quantised pages: none."""
        return 0

    def _effective_sliding_window(self, requested: int) -> int:
        return env_strict_int("MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW", int(requested))

    def _decline(self, reason: str, q_len: int, sliding_window: int) -> None:
        phase = current_attention_phase()
        key = f"{phase}:{reason}"
        counts = self.paged_attention_bailouts_by_phase_reason
        counts[key] = counts.get(key, 0) + 1
        self.paged_attention_last_bailout = {
            "phase": phase,
            "reason": reason,
            "impl": "",
            "offset": self.offset,
            "q_len": q_len,
            "max_q_len": 2**31 - 1,
            "block_size": int(self.block_size),
            "sliding_window": sliding_window,
            "partitioned_enabled": 0,
            "partition_threshold": self._partition_threshold(),
        }

    def paged_attention(
        self,
        queries: Any,
        *,
        scale: float,
        sliding_window: int = -1,
        mask: Any | None = None,
        impl_override: str | None = None,
    ) -> Any | None:
        """Attention of queries [1, num_q_heads, num_queries, head_dim], the newest tokens (write first), over the
        pages as they are -> [1, num_q_heads, num_queries, value_head_dim] in the queries' dtype.

        mask: None or "causal": a query sees the tokens up to its own; or an array, bool or added to the scores, that
        broadcasts to [1, num_q_heads, num_queries, offset] and says everything. sliding_window > 0: only the last so
        many tokens of the context. impl_override: there is one implementation, every word means it. A query that sees
        nothing gives zeros. None, and a count in paged_attention_bailouts_by_phase_reason, where the cache is empty,
        the batch is not 1, or there is no query; ValueError for shapes that do not fit.
        """
        started = time.perf_counter()
        shape = tuple(int(n) for n in queries.shape)
        num_queries = shape[2] if len(shape) >= 3 else 0
        window = self._effective_sliding_window(sliding_window)
        native = self._live()
        reason = ""
        if native is None or native.offset() <= 0:
            reason = "empty_cache"
        elif shape[0] != 1:
            reason = "batch_not_1"
        elif num_queries <= 0:
            reason = "q_len_invalid"
        if native is None or reason:
            self._decline(reason, num_queries, window)
            return None
        rows = _arrays.to_native(queries)
        seen = visibility(
            mask,
            window=window,
            num_heads=shape[1],
            num_queries=num_queries,
            offset=native.offset(),
        )
        out = self._attend(native, rows, float(scale), seen)
        self.paged_attention_calls += 1
        if self.kv_quant:
            self.kv_quant_attention_calls += 1
            self.kv_quant_kernel_calls += 1
            if self._kv_quant_route is None:
                self._kv_quant_route = "kernel"
                self._kv_quant_route_offset = native.offset()
        self.attention_time_s += time.perf_counter() - started
        return _arrays.from_numpy(out)

    @staticmethod
    def _attend(
        native: _pagedkv.PagedKVCache, queries: Any, scale: float, seen: Visibility
    ) -> np.ndarray[Any, Any]:
        def call(mask: Any, bias: Any) -> np.ndarray[Any, Any]:
            out: np.ndarray[Any, Any] = native.attend(
                queries,
                scale=scale,
                causal=seen.causal,
                sliding_window=seen.sliding_window,
                mask=None if mask is None else np.ascontiguousarray(mask),
                bias=None if bias is None else np.ascontiguousarray(bias),
            )
            return out

        if not seen.per_head:
            return call(seen.mask, seen.bias)
        heads = [call(*pair)[:, h : h + 1] for h, pair in enumerate(seen.per_head)]
        return np.concatenate(heads, axis=1)

    # ---- statistics

    def paged_stats(self) -> dict[str, Any]:
        """Counters, sizes and times in seconds, by MTPLX's keys. Those of routes and working copies
        that we have not are 0 or empty."""
        config = self._kv_quant_config
        quant = "" if config is None else config.normalized_mode
        return {
            "mode": f"vllm_metal_paged_kv_{quant}" if quant else "vllm_metal_paged",
            "block_size": int(self.block_size),
            "num_blocks": int(self.num_blocks),
            "capacity": self.capacity,
            "offset": self.offset,
            "kv_quant": int(self.kv_quant),
            "kv_quant_mode": quant,
            "sliding_window": self._effective_sliding_window(-1),
            "bytes": self.nbytes,
            **self.counts(),
        }
