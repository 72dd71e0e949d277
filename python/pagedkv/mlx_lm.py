"""Paged caches for mlx-lm's models, and its prompt-cache files for ours.

    cache = mlx_lm.models.cache.make_prompt_cache(model)
    install(cache, kv_quant_config="q8")
    with paged_attention():
        for token, logprobs in generate_step(prompt, model, prompt_cache=cache): ...
    save_prompt_cache("chat.safetensors", cache)

Works with mlx-lm 0.31 and 0.32, whose files differ: either's are read, the installed one's written.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, overload

from pagedkv.mtplx import cache_state

# Neither package has types, so that all that comes from them is Any.
mx: Any = import_module("mlx.core")
base: Any = import_module("mlx_lm.models.base")
stock: Any = import_module("mlx_lm.models.cache")
tree_unflatten: Any = import_module("mlx.utils").tree_unflatten

__all__ = ["install", "load_prompt_cache", "paged_attention", "save_prompt_cache"]


def install(
    cache: list[Any],
    *,
    block_size: int = 16,
    num_blocks: int = 1024,
    kv_quant_config: Any | str | None = None,
) -> dict[str, int | str]:
    """Swaps the full-attention entries of `cache`, one for each layer, for paged ones, with the
    tokens that they hold (batch size 1). Rotating, recurrent and quantised entries of mlx-lm stay.

    `block_size` is in tokens, `num_blocks` in pages; `kv_quant_config` a PagedKVQuantConfig, its
    mode as a word ("q8"), or None for pages in the model's own type. Returns the installer's
    counts: "entries" swapped, "skipped", and what was asked for. Raises ValueError for a word, a
    size or an entry that cannot be had; `cache` then has the entries that it had."""
    trial = list(cache)
    stats: dict[str, int | str] = cache_state.install_vllm_metal_paged_attention_kv_cache(
        trial,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_quant_config=_quantisation(kv_quant_config),
    )
    cache[:] = trial
    return stats


@overload
def load_prompt_cache(
    file: str | os.PathLike[str], return_metadata: Literal[False] = ..., **settings: Any
) -> list[Any]: ...
@overload
def load_prompt_cache(
    file: str | os.PathLike[str], return_metadata: Literal[True], **settings: Any
) -> tuple[list[Any], dict[str, str]]: ...
def load_prompt_cache(
    file: str | os.PathLike[str], return_metadata: bool = False, **settings: Any
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """The entries of a prompt cache that mlx-lm or save_prompt_cache wrote, paged where they can
    be; with `return_metadata` also the file's metadata. `settings` are install's.

    Raises FileNotFoundError, and ValueError for a file that is no prompt cache or has entries that
    the installed mlx-lm cannot make: of another version's file those of full attention alone are
    understood."""
    path = os.fspath(file)
    if not Path(path).is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    try:
        arrays, flat = mx.load(path, return_metadata=True)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors: {error}") from error
    version, classes, metadata = _head(path, flat)
    if version == _installed_version():
        for name in classes:
            if not isinstance(getattr(stock, name, None), type):
                raise ValueError(f"{path}: the installed mlx-lm has no cache entry {name}")
        load = partial(stock.load_prompt_cache, path)
    else:
        load = partial(_all_of_other_version, path, classes, arrays)
    try:
        cache: list[Any] = load()
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no prompt cache that can be read: {error!r}") from error
    install(cache, **settings)
    return (cache, metadata) if return_metadata else cache


def save_prompt_cache(
    file: str | os.PathLike[str], cache: list[Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a file that plain mlx-lm of the installed version loads. A paged entry is written as
    a KVCache of the keys and values that it gives to read, in the model's own type: what is
    quantised is written as what it stands for. An earlier file is replaced at once, or, when this
    fails, not at all; `.safetensors` is added to a name that does not end so.

    Raises ValueError for a paged entry without tokens under mlx-lm 0.31, whose files have none."""
    path = os.fspath(file)
    if not path.endswith(".safetensors"):
        path += ".safetensors"
    entries = [_as_stock(i, entry) for i, entry in enumerate(cache)]
    name = f".{os.path.basename(path)}.{os.getpid()}.{threading.get_ident()}.safetensors"
    part = os.path.join(os.path.dirname(path), name)
    try:
        stock.save_prompt_cache(part, entries, dict(metadata or {}))
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


@contextmanager
def paged_attention(*, fetch: bool = True) -> Iterator[None]:
    """While it lasts, mlx-lm's models attend to paged entries through their paged_attention, which
    reads pages where they lie, quantised ones too. As ever are computed: other entries, attention
    sinks, several queries without a mask (each of which sees all tokens), keys and values that a
    model changes after it got them from the entry (latent attention), and models that do not call
    mlx-lm's attention function (Gemma 2). It holds for the whole process; it may be nested, and
    used by several threads at once.

    A model still gets all keys and values from a write, which reads them. With `fetch=False` it
    gets back the new ones alone, for models that use what they get for attention and nothing else
    (Llama, Mistral, Qwen, Phi, Gemma 3). Where another one is caught, RuntimeError is raised: what
    it wrote is right, what it computed is not."""
    _enter(fetch)
    try:
        yield
    except BaseException:
        _leave()
        raise
    if _leave():
        raise RuntimeError(_NEEDS_FETCH)


def _quantisation(asked: Any | str | None) -> Any | None:
    config: Any = asked
    if isinstance(asked, str):
        config = import_module("pagedkv.mtplx.kv_quant").PagedKVQuantConfig(mode=asked)
    return None if config is None or config.normalized_mode == "off" else config


def _is_paged(entry: Any) -> bool:
    return isinstance(entry, cache_state.VllmMetalPagedKVCache)


# Files. mlx-lm flattens its lists into the safetensors metadata:
#   0.31: [meta_state of each entry, user metadata, class names], arrays: [keys, values] an entry
#   0.32: [user metadata, class names, ["", (array, kind)…]], arrays: the whole state, numbers as
#         arrays of their own: keys and values with room to spare, and the offset


def _installed_version() -> Literal[31, 32]:
    return 31 if hasattr(stock.KVCache, "meta_state") else 32


def _head(path: str, flat: dict[str, str]) -> tuple[Literal[31, 32], list[str], dict[str, str]]:
    """Version, class names and user metadata of a file with this safetensors metadata."""
    version: Literal[31, 32] = 32 if flat.get("2.0") == "" else 31
    names, user = ("1.", "0.") if version == 32 else ("2.", "1.")
    classes: list[str] = []
    while names + str(len(classes)) in flat:
        classes.append(flat[names + str(len(classes))])
    if not classes:
        raise ValueError(f"{path}: is no prompt cache: it names no entries")
    return version, classes, {k[len(user) :]: v for k, v in flat.items() if k.startswith(user)}


def _other_version(path: str, i: int, name: str, arrays: dict[str, Any]) -> Any:
    """Entry i of a file that the other version wrote."""
    if name != "KVCache":
        raise ValueError(
            f"{path}: entry {i} is a {name} of another mlx-lm; only its KVCache can be read"
        )
    try:
        keys, values = arrays[f"{i}.0"], arrays[f"{i}.1"]
    except KeyError as error:
        raise ValueError(f"{path}: entry {i} has no keys or no values") from error
    if f"{i}.2" not in arrays:
        return _stock_entry(keys, values)
    offset = int(arrays[f"{i}.2"].item())
    if offset == 0:
        return stock.KVCache()
    if keys.ndim != 4 or not 0 <= offset <= keys.shape[2]:
        raise ValueError(f"{path}: entry {i} has no {offset} tokens")
    return _stock_entry(keys[..., :offset, :], values[..., :offset, :])


def _all_of_other_version(path: str, classes: list[str], arrays: dict[str, Any]) -> list[Any]:
    return [_other_version(path, i, name, arrays) for i, name in enumerate(classes)]


def _stock_entry(keys: Any, values: Any) -> Any:
    entry = stock.KVCache()
    entry.keys, entry.values, entry.offset = keys, values, keys.shape[2]
    return entry


def _as_stock(i: int, entry: Any) -> Any:
    if not _is_paged(entry):
        return entry
    keys, values = entry.state
    if keys is not None:
        return _stock_entry(keys, values)
    if _installed_version() == 31:
        raise ValueError(f"entry {i} holds no tokens, which mlx-lm 0.31 cannot write")
    return stock.KVCache()


# Attention

_NEEDS_FETCH = (
    "keys and values of a paged entry were used for something other than attention to them: "
    "this model needs paged_attention(fetch=True)"
)


class _Slot(threading.local):
    """This thread's last write to a paged entry: what the model got, and whether it attended."""

    entry: Any = None
    keys: Any = None
    values: Any = None
    attended = True
    state: tuple[int, int] = (0, 0)  # of the entry then: its writes and tokens

    def put(self, entry: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        self.entry, self.keys, self.values, self.attended = entry, keys, values, False
        self.state = entry.update_calls, entry.offset
        return keys, values

    def is_current(self) -> bool:
        """Whether the entry still holds what that write left."""
        return self.state == (self.entry.update_calls, self.entry.offset)

    def clear(self) -> bool:
        """Whether there was a write that no attention followed."""
        unused = not self.attended
        self.entry, self.keys, self.values, self.attended = None, None, None, True
        return unused


class _Route:
    """What stands in for mlx-lm's attention function, and for the write of paged entries."""

    def __init__(self, fetch: bool) -> None:
        self.fetch = fetch
        self.depth = 0
        self.slot = _Slot()
        self.stock_attention = base.scaled_dot_product_attention
        self.stock_write = cache_state.VllmMetalPagedKVCache.update_and_fetch
        self.attention_here = self.attention  # one object, to compare with

        def write(entry: Any, keys: Any, values: Any) -> tuple[Any, Any]:
            return self.write(entry, keys, values)

        self.write_here = write  # a function, so that it becomes a method of the entries

    def write(self, entry: Any, keys: Any, values: Any) -> tuple[Any, Any]:
        """Keys and values [1, num_kv_heads, new tokens, head_dim]."""
        if self.fetch:
            keys, values = self.stock_write(entry, keys, values)
        else:
            if self.slot.clear():
                raise RuntimeError(_NEEDS_FETCH)
            entry.update_without_fetch(keys, values)
        return self.slot.put(entry, keys, values)

    def attention(
        self,
        queries: Any,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: Any = None,
    ) -> Any:
        """Queries [1, num_q_heads, query_len, head_dim], the newest tokens of the cache; keys and
        values [1, num_kv_heads, seq_len, head_dim]. A mask of None means all tokens."""
        slot = self.slot
        ours = slot.entry is not None and keys is slot.keys and values is slot.values
        ours = ours and cache is slot.entry and slot.is_current()
        if not self.fetch and not ours:
            if _is_paged(cache) or (slot.entry is not None and keys is slot.keys):
                raise RuntimeError(_NEEDS_FETCH)
        if ours:
            slot.attended = True
            sees_as_paged = mask is not None or queries.shape[2] == 1
            if sees_as_paged and sinks is None and queries.ndim == 4:
                out = cache.paged_attention(queries, scale=scale, mask=mask)
                if out is not None:
                    return out
            if not self.fetch:
                keys, values = cache.state
        return self.stock_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )

    def begin(self) -> None:
        _replace_everywhere(self.stock_attention, self.attention_here)
        setattr(cache_state.VllmMetalPagedKVCache, "update_and_fetch", self.write_here)

    def end(self) -> None:
        _replace_everywhere(self.attention_here, self.stock_attention)
        setattr(cache_state.VllmMetalPagedKVCache, "update_and_fetch", self.stock_write)


def _replace_everywhere(old: Any, new: Any) -> None:
    """Models import the function by name, so that each module has its own reference."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and names.get("scaled_dot_product_attention") is old:
            names["scaled_dot_product_attention"] = new


_lock = threading.Lock()
_route: _Route | None = None


def _enter(fetch: bool) -> None:
    global _route
    with _lock:
        if _route is None:
            _route = _Route(fetch)
            _route.begin()
        elif _route.fetch != fetch:
            raise RuntimeError(f"paged_attention(fetch={_route.fetch}) is already in use")
        _route.depth += 1


def _leave() -> bool:
    """Whether, without fetch, this thread's last write was not attended to."""
    global _route
    with _lock:
        assert _route is not None
        unused = _route.slot.clear() and not _route.fetch
        _route.depth -= 1
        if _route.depth == 0:
            _route.end()
            _route = None
        return unused
