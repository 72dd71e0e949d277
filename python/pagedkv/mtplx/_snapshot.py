"""Snapshots of a model's cache list: what is held, never what is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv import _arrays
from pagedkv.mtplx._cache import VllmMetalPagedKVCache


@dataclass(frozen=True)
class CacheSnapshot:
    """The state and meta_state of each entry."""

    states: tuple[Any, ...]
    meta_states: tuple[Any, ...]


def _clone(value: Any) -> Any:
    """A copy that shares no array with `value`."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if _arrays.is_mlx(value):
        mx = _arrays.mlx()
        assert mx is not None
        return value + mx.zeros((), dtype=value.dtype)  # mx.array(value) may share its buffer
    if isinstance(value, (tuple, list)):
        return type(value)(_clone(v) for v in value)
    if isinstance(value, dict):
        return {key: _clone(v) for key, v in value.items()}
    return value


def _state_of(entry: Any) -> Any:
    state = getattr(entry, "state", None)
    return state if isinstance(entry, VllmMetalPagedKVCache) else _clone(state)  # ours is a copy


def snapshot_cache(cache: Sequence[Any]) -> CacheSnapshot:
    """Copies of what each entry holds. Bytes follow the tokens held, dequantised where pages are quantised."""
    return CacheSnapshot(
        tuple(_state_of(entry) for entry in cache),
        tuple(_clone(getattr(entry, "meta_state", None)) for entry in cache),
    )


def restore_cache(
    cache: Sequence[Any],
    snapshot: CacheSnapshot,
    *,
    restore_meta_state: bool = True,
    clone_states: bool = True,
) -> None:
    """Puts the snapshot's tokens into the entries, which share nothing with it afterwards.

    restore_meta_state: the offset too. clone_states=False: entries other than ours get the snapshot's own arrays.
    """
    for entry, state, meta_state in zip(cache, snapshot.states, snapshot.meta_states):
        if state is not None:
            _restore(entry, state, clone_states)
        if restore_meta_state and meta_state is not None:
            entry.meta_state = _clone(meta_state)


def _restore(entry: Any, state: Any, clone: bool) -> None:
    if isinstance(entry, VllmMetalPagedKVCache):
        entry.state = state  # is stored into pages: a copy
        return
    state = _clone(state) if clone else state
    if hasattr(entry, "replace_state"):
        entry.replace_state(state)
        return
    current = getattr(entry, "state", None)
    if isinstance(current, list) and isinstance(state, list) and len(current) == len(state):
        current[:] = state
    else:
        entry.state = state
