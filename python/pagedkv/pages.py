"""Views of pages, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np


class PageView:
    """The K or V pages of one layer, or their scales, as they lie in memory.

    Pages are ``[num_pages, page_size, num_kv_heads, head_dim]``: float32, float16, bfloat16, int8 codes (q8), or
    uint8 with packed codes in the last axis (q6: 3/4 of head_dim, q4: half of it). Scales are ``[..., 1]`` float32.
    The view covers the pages that had their memory when it was made. It keeps them alive, and stays valid when the
    pool grows; while it lives, memory cannot be given back (``shrink`` raises BufferError).

    numpy (``np.asarray(view)``) and torch (``torch.from_dlpack(view)``) read and write the pages themselves; mlx copies
    what it imports.
    """

    __slots__ = ("_array", "_dlpack")

    def __init__(self, native: tuple[Any, np.ndarray[Any, Any]]) -> None:
        self._dlpack, self._array = native

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._array.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self._array.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def ndim(self) -> int:
        return 4

    def view(self, dtype: Any) -> np.ndarray[Any, Any]:
        """As numpy's: the same bytes as another dtype of that size."""
        return self._array.view(dtype)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The pages as a numpy array, bfloat16 as ml_dtypes'."""
        return self._array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if dtype is not None and np.dtype(dtype) != self._array.dtype:
            if copy is False:
                raise ValueError(f"pages are {self._array.dtype}: {np.dtype(dtype)} needs a copy")
            return self._array.astype(dtype)
        return self._array.copy() if copy else self._array

    def __dlpack__(self, **options: Any) -> Any:
        return self._dlpack.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._dlpack.__dlpack_device__()
        return device

    def __repr__(self) -> str:
        return f"PageView(shape={self.shape}, dtype={self.dtype})"
