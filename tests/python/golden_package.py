"""The package that is compared with the seed: its modules, its arrays, its environment."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from golden_data import STORED, GoldenArray

SEED = "mtplx"


class Package:
    """A package that keeps the seed's names, and the arrays that it takes and gives."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.is_seed = root == SEED
        try:
            self.mx: ModuleType | None = importlib.import_module("mlx.core")
        except ImportError:
            self.mx = None
        self.cache_state = self.module("cache_state")
        self.kv_quant = self.module("kv_quant")
        self.attention_context = self.module("attention_context")
        self.cls = self.cache_state.VllmMetalPagedKVCache

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.root}.{name}")

    def config(self, quant: str) -> Any:
        return None if quant == "off" else self.kv_quant.PagedKVQuantConfig(mode=quant)

    def array(self, golden: GoldenArray) -> Any:
        """The array in the package's kind: mlx where it is installed, else numpy."""
        stored = np.ascontiguousarray(golden.stored)
        if self.mx is not None:
            made = self.mx.array(stored)
            return made.view(self.mx.bfloat16) if golden.dtype == "bfloat16" else made
        if golden.dtype == "bfloat16":
            import ml_dtypes

            return stored.view(ml_dtypes.bfloat16)
        return stored.copy()

    def golden(self, array: Any) -> GoldenArray:
        """An array of the package's kind as its stored bits."""
        name = str(array.dtype).removeprefix("mlx.core.").replace("bool_", "bool")
        if self.mx is not None and isinstance(array, self.mx.array):
            bits = array.view(self.mx.uint16) if name == "bfloat16" and array.size else array
            if name == "bfloat16" and not array.size:
                return GoldenArray(name, np.zeros(array.shape, STORED[name]))
            return GoldenArray(name, np.array(bits))
        plain = np.ascontiguousarray(array)
        return GoldenArray(name, plain.view(np.uint16) if name == "bfloat16" else plain)

    def word(self, value: Any) -> Any:
        """What a result is compared as: arrays as their hash."""
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return self.golden(value).hash()
        return list(value) if isinstance(value, tuple) else value


def is_array(value: Any) -> bool:
    return isinstance(value, GoldenArray)


def ones_mask(package: Package, tokens: int, offset: int, window: int) -> Any:
    """Every query sees every key: [1, 1, tokens, keys], where a window leaves the last ones."""
    keys = min(window, offset) if window > 0 else offset
    return package.array(GoldenArray("bool", np.ones((1, 1, tokens, keys), bool)))


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Without variables of the seed or ours; gives the environment back."""
    before = dict(os.environ)
    try:
        for name in before:
            ours = name.startswith("PAGEDKV_") and not name.startswith(
                ("PAGEDKV_TEST", "PAGEDKV_KERNELS")
            )
            if name.startswith("MTPLX_") or ours:
                del os.environ[name]
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def error_type(error: Exception, expected: str) -> str:
    """The expected type's name where the error is one, as a subclass is, else its own."""
    kind = getattr(builtins, expected, None)
    if isinstance(kind, type) and isinstance(error, kind):
        return expected
    return type(error).__name__


def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dictionaries, named "name.key"."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}")
    else:
        yield name, value
