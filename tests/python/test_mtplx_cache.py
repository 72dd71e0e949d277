"""pagedkv.mtplx's class beyond what the seed's recordings show: page arrays that are assigned, copies, words."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from pagedkv import _arrays
from pagedkv.mtplx.cache_state import (
    VllmMetalPagedKVCache,
    install_vllm_metal_paged_attention_kv_cache,
)


def rows(seed: int, tokens: int) -> Any:
    return _arrays.from_numpy(
        np.random.default_rng(seed).standard_normal((1, 2, tokens, 16), dtype=np.float32)
    )


def filled(mode: str | None = None) -> VllmMetalPagedKVCache:
    cache = VllmMetalPagedKVCache(block_size=4, num_blocks=4, kv_quant_config=mode)
    cache.update_without_fetch(rows(1, 10), rows(2, 10))
    return cache


@pytest.mark.parametrize("mode", [None, "q8", "q6", "q4"])
def test_pages_of_one_cache_become_those_of_another_byte_for_byte(mode: str | None) -> None:
    cache, other = (
        filled(mode),
        VllmMetalPagedKVCache(block_size=4, num_blocks=1, kv_quant_config=mode),
    )
    for name in ("key_cache", "value_cache", "key_scale_cache", "value_scale_cache"):
        if getattr(cache, name) is not None:
            setattr(other, name, getattr(cache, name))
    other.offset = 10
    query = rows(3, 1)
    assert np.array_equal(
        np.array(other.paged_attention(query, scale=0.25)),
        np.array(cache.paged_attention(query, scale=0.25)),
    )
    assert (other.capacity, other.offset) == (16, 10)
    other.update_without_fetch(rows(4, 1), rows(5, 1))
    assert (other.offset, cache.offset) == (11, 10)


@pytest.mark.parametrize("mode", [None, "q8"])
@pytest.mark.parametrize("bad", [(3, 3), (4, 5, 2, 16), (4, 4, 2)])
def test_arrays_that_are_no_pages_are_refused_and_change_nothing(
    mode: str | None, bad: Any
) -> None:
    cache = filled(mode)
    before = np.array(cache.keys)
    for name in ("key_cache", "value_cache"):
        with pytest.raises(ValueError, match="must be"):
            setattr(cache, name, _arrays.from_numpy(np.zeros(bad, np.float32)))
            _ = cache.offset
    for thing in (5, "x"):
        with pytest.raises(ValueError):
            cache.key_cache = thing
    cache.key_cache = _arrays.from_numpy(np.zeros((4, 4, 3, 16), np.float32))
    with pytest.raises(ValueError):
        _ = cache.offset
    assert np.array_equal(np.array(cache.keys), before) and cache.offset == 10


def test_a_copy_is_a_cache_of_its_own() -> None:
    cache = filled("q4")
    for other in (copy.copy(cache), copy.deepcopy([cache])[0]):
        assert other.paged_stats()["mode"] == "vllm_metal_paged_kv_q4"
        assert np.array_equal(np.array(other.keys), np.array(cache.keys))
        other.update_without_fetch(rows(4, 1), rows(5, 1))
        assert (other.offset, cache.offset) == (11, 10)
        assert other.update_calls == cache.update_calls + 1
    with pytest.raises(TypeError, match="state"):
        pickle.dumps(cache)


def test_quantisation_may_be_named_by_a_word() -> None:
    cache: list[Any] = [filled("off"), filled("k=q8,v=q4")]
    assert [c.kv_quant for c in cache] == [False, True]
    counts = install_vllm_metal_paged_attention_kv_cache(cache, kv_quant_config="q8")  # type: ignore[arg-type]
    assert counts["kv_quant_mode"] == "q8" and cache[0].key_cache.dtype == cache[1].key_cache.dtype
    for wrong, error in (("q5", ValueError), (4, TypeError)):
        with pytest.raises(error):
            VllmMetalPagedKVCache(kv_quant_config=wrong)  # type: ignore[arg-type]
