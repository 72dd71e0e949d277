"""Attention masks as mlx takes them, as the native module takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv import _arrays


@dataclass(frozen=True)
class Visibility:
    """Which of the `offset` tokens each of the newest `num_queries` sees, as arguments of the native attend()."""

    causal: bool
    sliding_window: int = 0
    mask: np.ndarray[Any, Any] | None = None  # bool [num_queries, offset]
    # One for each query head where they differ: (mask, bias) [num_queries, offset]
    per_head: tuple[tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None], ...] = ()
    bias: np.ndarray[Any, Any] | None = None  # float32 [num_queries, offset]


def visibility(
    mask: Any, *, window: int, num_heads: int, num_queries: int, offset: int
) -> Visibility:
    """mask: None or "causal" (a query sees the tokens up to its own), or an array, bool (False hides) or float (added
    to the scores), that broadcasts to [1, num_heads, num_queries, offset]; its last axis may be cut to the window.
    window > 0: only the last `window` tokens of the whole context, for every query."""
    if mask is None or isinstance(mask, str):
        if mask not in (None, "causal"):
            raise ValueError(f'mask "{mask}": must be None, "causal" or an array')
        if window <= 0 or window >= offset:
            return Visibility(causal=True)
        if num_queries == 1:
            return Visibility(causal=True, sliding_window=window)
        return Visibility(
            causal=True, mask=np.broadcast_to(_in_window(window, offset), (num_queries, offset))
        )
    array = _over_the_context(_arrays.to_numpy(mask), window, offset)
    is_bool = array.dtype == np.bool_
    hides = None if window <= 0 or window >= offset else _in_window(window, offset)
    try:
        heads = np.broadcast_to(array, (1, num_heads, num_queries, offset))[0]
    except ValueError:
        raise ValueError(
            f"mask of shape {list(np.shape(mask))}: must broadcast to {[1, num_heads, num_queries, offset]}"
        ) from None

    def one(
        head: np.ndarray[Any, Any],
    ) -> tuple[np.ndarray[Any, Any] | None, np.ndarray[Any, Any] | None]:
        if is_bool:
            return (head if hides is None else head & hides), None
        window_mask = None if hides is None else np.broadcast_to(hides, head.shape)
        return window_mask, head.astype(np.float32)

    same_for_all = array.ndim < 3 or array.shape[-3] == 1
    if same_for_all:
        shared_mask, bias = one(heads[0])
        return Visibility(causal=False, mask=shared_mask, bias=bias)
    return Visibility(causal=False, per_head=tuple(one(head) for head in heads))


def _in_window(window: int, offset: int) -> np.ndarray[Any, Any]:
    return np.arange(offset) >= offset - window


def _over_the_context(
    array: np.ndarray[Any, Any], window: int, offset: int
) -> np.ndarray[Any, Any]:
    """A mask cut to the window, filled up with tokens that are hidden."""
    if array.dtype != np.bool_ and array.dtype.kind not in "fV" and array.dtype != _arrays.bfloat16:
        raise TypeError(f"mask: dtype {array.dtype}: must be bool or a float")
    if array.ndim == 0 or window <= 0 or array.shape[-1] != min(window, offset):
        return array
    hidden = False if array.dtype == np.bool_ else -np.inf
    fill = np.full((*array.shape[:-1], offset - array.shape[-1]), hidden, dtype=array.dtype)
    return np.concatenate([fill, array], axis=-1)
