"""Arrays in and out: mlx's where mlx is installed, else numpy's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)


@functools.cache
def mlx() -> Any | None:
    """``mlx.core``, or None where it is not installed or cannot be loaded."""
    try:
        return importlib.import_module("mlx.core")
    except ImportError:
        return None


def is_mlx(array: Any) -> bool:
    mx = mlx()
    return mx is not None and isinstance(array, mx.array)


def to_native(array: Any) -> Any:
    """What the native module takes: an array in memory that the CPU reads. mlx computes lazily, so this is where an
    mlx array gets its values."""
    if is_mlx(array):
        mlx_core = mlx()
        assert mlx_core is not None
        mlx_core.eval(array)
    return array


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """The array as numpy's, bfloat16 as ml_dtypes'; without a copy where its library allows that."""
    mx = mlx()
    if mx is not None and isinstance(array, mx.array):
        if array.dtype == mx.bfloat16:
            return np.array(array.view(mx.uint16)).view(bfloat16)
        return np.array(array)
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        return np.from_dlpack(array)
    return np.asarray(array)


def from_numpy(array: np.ndarray[Any, Any]) -> Any:
    """What callers get: an mlx array (mlx copies what it imports) or the numpy array itself."""
    mx = mlx()
    if mx is None:
        return array
    if array.dtype == bfloat16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def dtype_of(name: str) -> Any:
    """The dtype object of this name, as from_numpy()'s arrays have it."""
    mx = mlx()
    if mx is not None:
        return getattr(mx, name)
    return numpy_dtype(name)


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """ "float16" for numpy's, mlx's and torch's dtype objects alike."""
    name = getattr(dtype, "name", None)
    return str(name if isinstance(name, str) else dtype).rpartition(".")[2]
