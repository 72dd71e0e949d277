"""Page arrays that were made elsewhere, into pages of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedkv import _arrays, _pagedkv
from pagedkv.cache import layer_pages

Array = np.ndarray[Any, Any]
NAMES = ("key_cache", "value_cache", "key_scale_cache", "value_scale_cache")


def shape_of(pages: Sequence[Array], bits: int) -> tuple[int, int, int]:
    """(kv heads, head_dim of K, of V) of pages [blocks, block_size, heads, width]; bits of a code, 0: not
    quantised."""
    widths = [int(array.shape[3]) * (8 if bits else 1) // (bits or 1) for array in pages[:2]]
    return int(pages[0].shape[2]), widths[0], widths[1]


def dtypes_of(pages: Sequence[Array], bits: int) -> tuple[str, str]:
    """Of keys and values as they are read; codes do not tell."""
    return ("float32", "float32") if bits else (pages[0].dtype.name, pages[1].dtype.name)


def fill(
    native: _pagedkv.PagedKVCache,
    pages: Sequence[Array],
    shape: tuple[int, int, int],
    dtypes: tuple[str, str],
    offset: int,
) -> None:
    """Makes a new cache, of as many blocks, hold the first `offset` tokens of keys, values and, where it is quantised,
    their scales, byte for byte. ValueError where the arrays are not such pages."""
    blocks, size = int(pages[0].shape[0]), int(pages[0].shape[1])
    if size != native.block_size or offset < 0 or offset > blocks * size:
        raise ValueError(
            f"pages of shape {list(pages[0].shape)} and offset {offset}: must be [blocks, "
            f"{native.block_size}, heads, width] and an offset that they hold"
        )
    keys, values = (
        np.zeros((1, shape[0], offset, dim), _arrays.numpy_dtype(dtype))
        for dim, dtype in zip(shape[1:], dtypes)
    )
    native.update(keys, values)
    native.grow_to_capacity(native.capacity)
    for name, view, array in zip(NAMES, layer_pages(native.pages()), pages):
        if view is None or view.shape != array.shape or view.dtype != array.dtype:
            wanted = "nothing" if view is None else f"{list(view.shape)}, {view.dtype}"
            raise ValueError(
                f"{name} of shape {list(array.shape)}, {array.dtype}: must be {wanted}"
            )
        view.numpy()[...] = array
