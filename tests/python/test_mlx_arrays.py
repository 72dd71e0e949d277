"""pagedkv.mtplx with mlx arrays: values that are not computed yet, and graphs that are being compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagedkv.mtplx import kv_quant
from pagedkv.mtplx.cache_state import VllmMetalPagedKVCache

mx = pytest.importorskip("mlx.core")


def rows(seed: int, *shape: int) -> Any:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def test_lazy_strided_and_bfloat16_rows_are_stored_as_they_evaluate() -> None:
    base = rows(1, 1, 9, 2, 32)
    keys = (base.transpose(0, 2, 1, 3) * 2).astype(mx.bfloat16)
    cache = VllmMetalPagedKVCache(block_size=4, num_blocks=4)
    fetched, _ = cache.update_and_fetch(keys, keys[..., ::-1])
    assert fetched.dtype == mx.bfloat16 and fetched.shape == (1, 2, 9, 32)
    assert mx.array_equal(fetched, keys).item()
    assert mx.array_equal(cache.values, keys[..., ::-1]).item()


def test_what_was_read_does_not_change_with_later_writes() -> None:
    cache = VllmMetalPagedKVCache(block_size=4, num_blocks=4)
    cache.update_without_fetch(rows(1, 1, 1, 4, 8), rows(2, 1, 1, 4, 8))
    keys, pages = cache.keys, cache.key_cache
    before = np.array(keys), np.array(pages)
    cache.trim(4)
    cache.update_without_fetch(rows(3, 1, 1, 4, 8), rows(4, 1, 1, 4, 8))
    assert np.array_equal(np.array(keys), before[0]) and np.array_equal(np.array(pages), before[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_inside_a_compiled_graph_gives_the_same_bits(bits: int) -> None:
    x = rows(1, 3, 7, 64) * 3
    want_codes, want_scales = kv_quant.quantize_symmetric(x, bits=bits)

    def round_trip(array: Any) -> tuple[Any, Any, Any]:
        codes, scales = kv_quant.quantize_symmetric(array, bits=bits)
        back = kv_quant.dequantize_symmetric(codes, scales, bits=bits, head_dim=64)
        return codes, scales, back

    codes, scales, back = mx.compile(round_trip)(x)
    assert codes.dtype == want_codes.dtype and mx.array_equal(codes, want_codes).item()
    assert mx.array_equal(scales, want_scales).item()
    want = kv_quant.dequantize_symmetric(want_codes, want_scales, bits=bits, head_dim=64)
    assert mx.array_equal(back, want).item()


def test_a_mask_for_each_head_says_what_each_head_sees() -> None:
    cache = VllmMetalPagedKVCache(block_size=4, num_blocks=4)
    keys, queries = rows(1, 1, 2, 6, 16), rows(2, 1, 4, 3, 16)
    cache.update_without_fetch(keys, keys)
    mask = np.random.default_rng(3).random((1, 4, 3, 6)) < 0.6
    mask[..., 0] = True
    together = np.array(cache.paged_attention(queries, scale=0.25, mask=mx.array(mask)))
    for head in range(4):
        alone = cache.paged_attention(queries, scale=0.25, mask=mx.array(mask[:, head : head + 1]))
        assert np.array_equal(together[:, head], np.array(alone)[:, head])
    added = np.where(mask, 0, -np.inf).astype(np.float32)
    assert np.array_equal(
        together, np.array(cache.paged_attention(queries, scale=0.25, mask=mx.array(added)))
    )


def test_a_mask_may_be_cut_to_the_window() -> None:
    cache = VllmMetalPagedKVCache(block_size=4, num_blocks=4)
    keys, queries = rows(1, 1, 1, 10, 16), rows(2, 1, 2, 3, 16)
    cache.update_without_fetch(keys, keys)
    whole = mx.array(np.arange(10) <= np.array([[7], [8], [9]]))
    for mask in (whole, whole[:, -4:]):
        out = cache.paged_attention(queries, scale=0.25, sliding_window=4, mask=mask)
        want = cache.paged_attention(queries, scale=0.25, sliding_window=4)
        assert mx.array_equal(out, want).item()
    for bad, error in (
        (mx.zeros((3, 9)), ValueError),
        (mx.zeros((3, 10), mx.int32), TypeError),
        ("all", ValueError),
    ):
        with pytest.raises(error):
            cache.paged_attention(queries, scale=0.25, mask=bad)
