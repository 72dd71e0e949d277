"""Quantisation of keys and values: one float32 scale for each row, symmetric integer codes.

scale = max(amax / largest code, 1e-6), code = round half to even (x / scale); q8 has codes -127..127 (int8), q4 -7..7
(uint8, two a byte, + 8, the even element in the low nibble), q6 -31..31 (ours: four in three bytes). The C++ library does
it, with the bits that MTPLX's formulas give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv import _arrays, _pagedkv
from pagedkv._pagedkv import compression_ratio as _compression_ratio
from pagedkv._pagedkv import packed_dim as _packed_dim
from pagedkv.mtplx._environment import env_truthy

_BITS = {"q8": 8, "q6": 6, "q4": 4}


@dataclass(frozen=True)
class PagedKVQuantConfig:
    """How a cache quantises: a word for q8, q6, q4 or off, or "k=q8,v=q4". ValueError for others."""

    mode: str = "q8"

    def __post_init__(self) -> None:
        _pagedkv.parse_quant_mode(self.mode)

    @property
    def normalized_mode(self) -> str:
        return _pagedkv.parse_quant_mode(self.mode)

    @property
    def bits(self) -> int:
        """Of a code. ValueError where keys and values differ, or nothing is quantised."""
        mode = self.normalized_mode
        if mode not in _BITS:
            raise ValueError(f"paged KV quantization {mode}: has no one number of bits")
        return _BITS[mode]


def env_enabled(name: str, *, default: bool = False) -> bool:
    """Whether the variable is one of 1, true, yes, on; the default where it is unset."""
    return env_truthy(name, default=default)


def paged_kv_quant_mode_from_env() -> str:
    """The mode that MTPLX_VLLM_METAL_PAGED_KV_QUANT, else MTPLX_PAGED_KV_QUANT asks for, else "off"."""
    return _pagedkv.quant_mode_from_env()


def config_from_env() -> PagedKVQuantConfig | None:
    """The configuration for new caches; None where quantisation is off."""
    mode = paged_kv_quant_mode_from_env()
    return None if mode == "off" else PagedKVQuantConfig(mode)


def packed_dim(head_dim: int, bits: int) -> int:
    """Bytes of a row's codes. ValueError for other bits than 8, 6, 4 and a head_dim that does not fit them."""
    return _packed_dim(int(head_dim), int(bits))


def compression_ratio(*, head_dim: int, bits: int) -> float:
    """Bytes of K and V in float16 over those of their codes and scales."""
    return _compression_ratio(int(head_dim), int(bits))


def quantize_symmetric(x: Any, *, bits: int) -> tuple[Any, Any]:
    """Rows [..., D] of any real dtype -> codes [..., packed_dim(D, bits)], scales [..., 1] float32.

    ValueError for other bits than 8, 6, 4, a D that does not fit them, and a row with an infinity or a NaN. Inside
    mx.compile, where there are no values yet, q8 and q4 become part of the graph: the same bits, and nothing is refused.
    """
    if _is_traced(x):
        return _traced_quantize(x, int(bits))
    array = _arrays.to_numpy(x)
    if array.dtype not in (np.float32, np.float16, _arrays.bfloat16):
        array = array.astype(np.float32)
    codes, scales = _pagedkv.quantize_symmetric(array, int(bits))
    return _arrays.from_numpy(codes), _arrays.from_numpy(scales)


def dequantize_symmetric(q: Any, scale: Any, *, bits: int, head_dim: int) -> Any:
    """code * scale: [..., head_dim] float32. Inside mx.compile as quantize_symmetric()."""
    if _is_traced(q) or _is_traced(scale):
        return _traced_dequantize(q, scale, int(bits), int(head_dim))
    codes = np.ascontiguousarray(_arrays.to_numpy(q))
    scales = np.ascontiguousarray(_arrays.to_numpy(scale), dtype=np.float32)
    return _arrays.from_numpy(
        _pagedkv.dequantize_symmetric(codes, scales, int(bits), int(head_dim))
    )


def _is_traced(array: Any) -> bool:
    """Whether this is an mlx array without values: an input or intermediate of a graph being compiled."""
    if not _arrays.is_mlx(array):
        return False
    try:
        _arrays.to_native(array)
    except ValueError:
        return True
    return False


def _check_traced_bits(bits: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits {bits}: inside mx.compile must be 8 or 4")


def _traced_quantize(x: Any, bits: int) -> tuple[Any, Any]:
    _check_traced_bits(bits)
    packed_dim(int(x.shape[-1]), bits)  # refuses what does not fit
    mx = _arrays.mlx()
    assert mx is not None
    largest = 127.0 if bits == 8 else 7.0
    values = x.astype(mx.float32)
    amax = mx.abs(values).max(axis=-1, keepdims=True)
    scales = mx.maximum(amax / largest, 1.0e-6)
    codes = mx.clip(mx.round(values / scales), -largest, largest)
    if bits == 8:
        return codes.astype(mx.int8), scales
    nibbles = (codes + 8).astype(mx.uint8)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), scales


def _traced_dequantize(codes: Any, scales: Any, bits: int, head_dim: int) -> Any:
    _check_traced_bits(bits)
    mx = _arrays.mlx()
    assert mx is not None
    if bits == 4:
        pairs = mx.stack([codes & 15, codes >> 4], axis=-1)
        codes = pairs.reshape(*codes.shape[:-1], head_dim).astype(mx.float32) - 8
    return codes.astype(mx.float32) * scales.astype(mx.float32)
