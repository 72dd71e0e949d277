"""pagedkv.PagedKVCache: arrays in and out, views, refusals, threads."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pagedkv

FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


def rows(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def attention(q: Any, k: Any, v: Any, scale: float, visible: Any) -> np.ndarray[Any, Any]:
    """In double precision; q [Hq, L, D], k and v [Hkv, S, D], visible [L, S]."""
    q, k, v = (np.asarray(a, dtype=np.float64) for a in (q, k, v))
    group = q.shape[0] // k.shape[0]
    scores = np.einsum("hld,hsd->hls", q, np.repeat(k, group, axis=0)) * scale
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hls,hsd->hld", weights, np.repeat(v, group, axis=0))


def causal(queries: int, tokens: int) -> np.ndarray[Any, Any]:
    return np.arange(tokens) <= np.arange(tokens - queries, tokens)[:, None]


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_was_written_comes_back_in_its_dtype(dtype: Any) -> None:
    k, v = rows(1, 2, 50, 64, dtype=dtype), rows(2, 2, 50, 96, dtype=dtype)
    cache = pagedkv.PagedKVCache(block_size=16, num_blocks=2)
    for first in range(0, 50, 7):
        cache.update(k[:, first : first + 7], v[:, first : first + 7])
    keys, values = cache.state()
    assert keys.dtype == k.dtype and values.dtype == v.dtype
    assert np.array_equal(keys, k) and np.array_equal(values, v)
    assert (cache.offset, len(cache)) == (50, 50)


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_is_that_of_the_rows(dtype: Any) -> None:
    k, v, q = (
        rows(1, 2, 70, 64, dtype=dtype),
        rows(2, 2, 70, 32, dtype=dtype),
        rows(3, 8, 5, 64, dtype=dtype),
    )
    cache = pagedkv.PagedKVCache()
    cache.update(k, v)
    out, lse = cache.attend(q, log_sum_exp=True)
    assert out.shape == (8, 5, 32) and out.dtype == q.dtype and lse.shape == (5, 8)
    want = attention(q, k, v, 64**-0.5, causal(5, 70))
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[np.dtype(dtype).name]
    assert np.abs(out.astype(np.float64) - want).max() < tolerance


def test_masks_biases_and_windows_hide_tokens() -> None:
    k, v, q = rows(1, 1, 40, 32), rows(2, 1, 40, 32), rows(3, 4, 6, 32)
    cache = pagedkv.PagedKVCache()
    cache.update(k, v)
    mask = np.random.default_rng(4).random((6, 40)) < 0.5
    mask[:, 0] = True
    out = cache.attend(q, causal=False, mask=mask)
    assert np.abs(out - attention(q, k, v, 32**-0.5, mask)).max() < 1e-5
    assert np.array_equal(
        out, cache.attend(q, causal=False, bias=np.where(mask, 0, -np.inf).astype(np.float32))
    )
    window = causal(6, 40) & ~causal(6, 40 - 0)[:, ::1] if False else causal(6, 40)
    window &= np.arange(40) > np.arange(34, 40)[:, None] - 10
    assert (
        np.abs(cache.attend(q, sliding_window=10) - attention(q, k, v, 32**-0.5, window)).max()
        < 1e-5
    )


def test_layouts_that_are_not_contiguous_are_read_as_they_are() -> None:
    k = rows(1, 2, 30, 64)
    want = pagedkv.PagedKVCache()
    want.update(k, k)
    for same in (
        np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2),
        rows(1, 2, 30, 64)[None],
        np.repeat(k, 2, axis=-1)[..., ::2],
        np.ascontiguousarray(k[:, ::-1])[:, ::-1],
        np.asfortranarray(k),
        np.broadcast_to(k, (1, 2, 30, 64)),
    ):
        cache = pagedkv.PagedKVCache()
        cache.update(same, same)
        assert np.array_equal(cache.state()[0], want.state()[0])


def test_rows_that_lie_on_one_another_are_read_as_they_are() -> None:
    row = rows(1, 1, 1, 64)
    for same in (np.broadcast_to(row, (2, 5, 64)), np.broadcast_to(row[..., :1], (2, 5, 64))):
        cache = pagedkv.PagedKVCache()
        cache.update(same, same)
        assert np.array_equal(cache.state()[0], same)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mask": np.ones((4, 2), bool)}, r"mask of shape \[4, 2\]: must be \[2, 4\]"),
        ({"mask": np.ones(8, bool)}, "mask of shape"),
        ({"bias": np.zeros((4, 2), np.float32)}, r"bias of shape \[4, 2\]"),
        ({"bias": np.zeros(0, np.float32)}, "bias of shape"),
        ({"sinks": np.zeros((1, 2), np.float32)}, r"sinks of shape \[1, 2\]: must be \[2\]"),
        ({"sliding_window": -1}, "sliding_window -1"),
    ],
)
def test_what_goes_with_queries_must_have_their_shape(arguments: dict[str, Any], text: str) -> None:
    cache = pagedkv.PagedKVCache()
    cache.update(rows(1, 1, 4, 8), rows(2, 1, 4, 8))
    with pytest.raises(ValueError, match=text):
        cache.attend(rows(3, 2, 2, 8), causal=False, **arguments)
    mask = np.array([[1, 0, 1, 0], [0, 0, 1, 1]], bool)
    two = cache.attend(rows(3, 2, 2, 8), causal=False, mask=mask)
    assert np.array_equal(two, cache.attend(rows(3, 2, 2, 8), causal=False, mask=mask[None, None]))


@pytest.mark.parametrize(
    ("keys", "values", "error", "text"),
    [
        (np.zeros((2, 3, 8)), np.zeros((2, 3, 8)), TypeError, "float64"),
        (np.zeros((2, 3, 8), np.int32), np.zeros((2, 3, 8), np.int32), TypeError, "int32"),
        ([[1.0]], [[1.0]], TypeError, "no array"),
        (None, None, TypeError, "no array"),
        (rows(1, 2, 8), rows(1, 2, 8), ValueError, r"\[2, 8\]"),
        (rows(1, 2, 2, 3, 8), rows(1, 2, 2, 3, 8), ValueError, "batch of 1"),
        (rows(1, 2, 3, 8), rows(1, 2, 4, 8), ValueError, "4 tokens"),
        (rows(1, 2, 3, 8), rows(1, 1, 3, 8), ValueError, "1 heads"),
        (rows(1, 2, 3, 513), rows(1, 2, 3, 513), ValueError, "513"),
        (rows(1, 0, 3, 8), rows(1, 0, 3, 8), ValueError, "0 heads"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_change_nothing(
    keys: Any, values: Any, error: type[Exception], text: str
) -> None:
    cache = pagedkv.PagedKVCache()
    with pytest.raises(error, match=text):
        cache.update(keys, values)
    assert cache.offset == 0
    with pytest.raises(ValueError, match="no pages"):
        cache.pages()
    cache.update(rows(1, 2, 3, 8), rows(2, 2, 3, 8))
    assert cache.offset == 3


def test_another_shape_or_dtype_than_the_first_is_refused() -> None:
    cache = pagedkv.PagedKVCache()
    cache.update(rows(1, 2, 3, 8), rows(2, 2, 3, 8))
    for other in (rows(1, 2, 3, 16), rows(1, 1, 3, 8), rows(1, 2, 3, 8, dtype=np.float16)):
        with pytest.raises(ValueError, match="shape/dtype changed"):
            cache.update(other, other)
    assert cache.offset == 3


def test_rows_that_cannot_be_quantised_are_refused_whole() -> None:
    cache = pagedkv.PagedKVCache(quant="q8")
    bad = rows(1, 1, 300, 32)
    bad[0, 299, 3] = np.nan
    with pytest.raises(ValueError, match="infinity or a NaN"):
        cache.update(bad, rows(2, 1, 300, 32))
    assert cache.offset == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": 257}, "257"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"quant": "q5"}, "q5"),
        ({"dtype": "float64"}, "float64"),
        ({"num_layers": 0}, "num_layers 0"),
        ({"context_window": -1}, "-1"),
    ],
)
def test_options_outside_their_limits_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        pagedkv.PagedKVCache(**options)


def test_errors_tell_capacity_from_memory() -> None:
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=2, dynamic=False)
    cache.update(rows(1, 1, 8, 8), rows(2, 1, 8, 8))
    with pytest.raises(pagedkv.CapacityError, match="9 > 8"):
        cache.update(rows(1, 1, 1, 8), rows(2, 1, 1, 8))
    small = pagedkv.PagedKVCache(block_size=4, num_blocks=2, max_bytes=4096)
    with pytest.raises(pagedkv.PageMemoryError, match="4096"):
        small.update(rows(1, 1, 4096, 64), rows(2, 1, 4096, 64))
    assert issubclass(pagedkv.CapacityError, ValueError)
    assert issubclass(pagedkv.PageMemoryError, MemoryError)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_views_are_the_pages_themselves(name: str) -> None:
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    k, v = rows(1, 2, 21, 32, dtype=dtype), rows(2, 2, 21, 48, dtype=dtype)
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=6, dynamic=False)
    cache.update(k, v)
    pages = cache.pages()
    assert pages.key_scales is None
    assert pages.keys.shape == (6, 4, 2, 32) and pages.values.shape == (6, 4, 2, 48)
    keys = np.asarray(pages.keys)
    assert keys.dtype == dtype and not keys.flags.owndata
    assert np.array_equal(keys.reshape(-1, 2, 32)[:21], k.transpose(1, 0, 2))
    keys[5, 0, 1, 3] = 7  # token 20
    assert cache.state()[0][1, 20, 3] == 7


@pytest.mark.parametrize(
    ("quant", "width", "dtype"), [("q8", 32, "int8"), ("q6", 24, "uint8"), ("q4", 16, "uint8")]
)
def test_views_of_quantised_pages_are_codes_and_scales(quant: str, width: int, dtype: str) -> None:
    k = rows(1, 2, 21, 32)
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=6, quant=quant)
    cache.update(k, k)
    pages = cache.pages()
    assert pages.key_scales is not None
    assert pages.keys.shape[-1] == width and pages.keys.dtype == dtype
    codes, scales = pagedkv.quantize_symmetric(
        np.ascontiguousarray(k.transpose(1, 0, 2)), int(quant[1])
    )
    assert np.array_equal(np.asarray(pages.keys).reshape(-1, 2, width)[:21], codes)
    assert np.array_equal(np.asarray(pages.key_scales).reshape(-1, 2, 1)[:21], scales)


def test_dlpack_gives_versioned_capsules_of_the_same_memory() -> None:
    cache = pagedkv.PagedKVCache()
    cache.update(rows(1, 2, 8, 32), rows(2, 2, 8, 32))
    view = cache.pages().keys
    assert "dltensor_versioned" in repr(view.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(view.__dlpack__())
    assert view.__dlpack_device__() == (1, 0)
    assert np.from_dlpack(view).ctypes.data == np.asarray(view).ctypes.data


def test_torch_reads_and_gives_rows_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    k = torch.randn(2, 9, 32, dtype=torch.bfloat16)
    cache = pagedkv.PagedKVCache()
    cache.update(k, k)
    pages = torch.from_dlpack(cache.pages().keys)
    assert pages.dtype == torch.bfloat16
    assert torch.equal(pages.reshape(-1, 2, 32)[:9].transpose(0, 1), k)
    assert pages.data_ptr() == np.asarray(cache.pages().keys).ctypes.data


def test_a_view_stays_valid_across_growth_reset_and_the_end_of_its_cache() -> None:
    k = rows(1, 2, 8, 32)
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=2)
    cache.update(k, k)
    view = np.asarray(cache.pages().keys)
    address = view.ctypes.data
    for _ in range(6):
        cache.update(rows(2, 2, 100, 32), rows(3, 2, 100, 32))
    assert np.asarray(cache.pages().keys).ctypes.data == address
    cache.reset()
    del cache
    gc.collect()
    assert np.array_equal(view.reshape(-1, 2, 32)[:8], k.transpose(1, 0, 2))


def test_memory_under_a_living_view_is_not_given_back() -> None:
    cache = pagedkv.PagedKVCache(block_size=4)
    cache.update(rows(1, 1, 400, 8), rows(2, 1, 400, 8))
    view = np.asarray(cache.pages().keys)
    cache.trim(396)
    with pytest.raises(BufferError, match="alive"):
        cache.shrink_to_capacity(0)
    assert view.sum() != 0
    del view
    gc.collect()
    assert cache.shrink_to_capacity(0) == 4


def test_threads_that_call_at_once_get_what_they_would_get_alone() -> None:
    k, q = rows(1, 2, 600, 64), rows(3, 8, 1, 64)
    shared = pagedkv.PagedKVCache()
    shared.update(k, k)
    want = shared.attend(q)
    alone: list[Any] = []
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            own = pagedkv.PagedKVCache(block_size=3)
            for first in range(0, 600, 50):
                own.update(k[:, first : first + 50], k[:, first : first + 50])
                assert np.array_equal(shared.attend(q), want)
            alone.append(own.attend(q))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(np.array_equal(out, want) for out in alone) and len(alone) == 8


def test_threads_that_write_one_cache_lose_no_row() -> None:
    cache = pagedkv.PagedKVCache(block_size=4)

    def work(value: int) -> None:
        for _ in range(50):
            cache.update(
                np.full((1, 3, 8), value, np.float32), np.full((1, 3, 8), value, np.float32)
            )

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys, values = cache.state()
    assert cache.offset == 600 and np.array_equal(keys, values)
    assert [int((keys[0, :, 0] == i + 1).sum()) for i in range(4)] == [150] * 4


def _attend_in_child(queue: Any, cache: Any, q: Any) -> None:
    queue.put(cache.attend(q))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_attends_with_the_same_bits() -> None:
    k, q = rows(1, 2, 600, 64), rows(3, 8, 1, 64)
    cache = pagedkv.PagedKVCache()
    cache.update(k, k)
    want = cache.attend(q)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_attend_in_child, args=(queue, cache, q))
    child.start()
    got = queue.get(timeout=60)
    child.join(timeout=60)
    assert child.exitcode == 0 and np.array_equal(got, want)


def test_layers_are_apart_and_trim_together() -> None:
    cache = pagedkv.PagedKVCache(num_layers=3)
    k = [rows(i, 2, 10, 16) for i in range(3)]
    for layer in range(3):
        cache.update(k[layer], k[layer], layer)
    assert cache.trim(4) == 4 and cache.offset == 6
    for layer in range(3):
        assert np.array_equal(cache.state(layer)[0], k[layer][:, :6])
    with pytest.raises(ValueError, match="layer 3"):
        cache.state(3)


def test_copying_and_deepcopying_give_a_cache_of_its_own_with_the_same_settings() -> None:
    cache = pagedkv.PagedKVCache(
        block_size=32, num_blocks=3, quant="k=q8,v=q4", dynamic=False, sliding_window=7
    )
    cache.update(rows(1, 2, 20, 16), rows(2, 2, 20, 16))
    q = rows(3, 2, 4, 16)
    for other in (copy.copy(cache), copy.deepcopy(cache), cache.copy()):
        assert (other.quant, other.block_size, other.capacity) == ("k=q8,v=q4", 32, 96)
        assert np.array_equal(other.attend(q), cache.attend(q))
        other.update(rows(4, 2, 1, 16), rows(5, 2, 1, 16))
        assert (other.offset, cache.offset) == (21, 20)
        with pytest.raises(pagedkv.CapacityError):
            other.update(rows(4, 2, 76, 16), rows(5, 2, 76, 16))
    with pytest.raises(TypeError, match="state"):
        pickle.dumps(cache)


def test_a_copy_holds_the_same_tokens_and_shares_nothing() -> None:
    cache = pagedkv.PagedKVCache(quant="q4")
    cache.update(rows(1, 2, 10, 16), rows(2, 2, 10, 16))
    other = cache.copy(block_size=3)
    before = cache.state()[0]
    other.update(rows(3, 2, 1, 16), rows(4, 2, 1, 16))
    assert np.array_equal(other.state()[0][:, :10], before) and cache.offset == 10
    assert other.block_size == 3 and other.quant == "q4"


def test_state_and_meta_state_move_a_cache_to_another() -> None:
    cache = pagedkv.PagedKVCache(num_layers=2)
    for layer in range(2):
        cache.update(rows(layer, 2, 10, 16), rows(layer + 2, 2, 10, 16), layer)
    other = pagedkv.PagedKVCache(num_layers=2)
    other.set_state([cache.state(layer) for layer in range(2)])
    other.meta_state = cache.meta_state
    for layer in range(2):
        assert np.array_equal(other.state(layer)[1], cache.state(layer)[1])
    with pytest.raises(ValueError, match="exceeds"):
        other.meta_state = ("16", "1024", "11")


def test_statistics_count_what_happened() -> None:
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=2, quant="q8")
    cache.update(rows(1, 1, 20, 8), rows(2, 1, 20, 8))
    cache.attend(rows(3, 2, 1, 8))
    cache.state()
    stats = cache.stats()
    assert (stats["offset"], stats["updates"], stats["key_format"]) == (20, 1, "q8")
    assert stats["grow_events"] == 1 and stats["bytes_moved"] == 0
    assert stats["dequant_tokens"] == 20
    assert stats["attention_calls"] == {pagedkv.kernel_set(): {"prefill": 0, "decode": 1}}


def test_the_environment_fills_in_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_BLOCK_SIZE", "8")
    monkeypatch.setenv("MTPLX_PAGED_KV_QUANT", "q4")
    cache = pagedkv.PagedKVCache()
    assert (cache.block_size, cache.quant) == (8, "q4")
    assert pagedkv.PagedKVCache(block_size=4, quant="off").quant == "off"
    monkeypatch.setenv("PAGEDKV_BLOCK_SIZE", "many")
    with pytest.raises(ValueError, match="PAGEDKV_BLOCK_SIZE=many"):
        pagedkv.PagedKVCache()


@pytest.mark.parametrize("dtype", [*FLOATS, np.int32])
def test_quantising_any_row_keeps_it_within_half_a_step(dtype: Any) -> None:
    from pagedkv.mtplx import kv_quant

    x = (rows(1, 3, 5, 32) * 100).astype(dtype)
    for bits in (8, 6, 4):
        codes, scales = kv_quant.quantize_symmetric(x, bits=bits)
        back = kv_quant.dequantize_symmetric(codes, scales, bits=bits, head_dim=32)
        error = np.abs(np.asarray(back) - x.astype(np.float32))
        assert (error <= np.asarray(scales) * 0.501).all()


def test_threads_can_be_set_within_limits() -> None:
    before = pagedkv.num_threads()
    try:
        pagedkv.set_num_threads(3)
        assert pagedkv.num_threads() == 3
        for bad in (0, 1025):
            with pytest.raises(ValueError, match=str(bad)):
                pagedkv.set_num_threads(bad)
    finally:
        pagedkv.set_num_threads(before)


def test_a_daemon_thread_in_a_kernel_does_not_keep_the_interpreter_from_ending() -> None:
    code = """
import threading, time
import numpy as np, pagedkv
x = np.ones((4, 2000, 64), np.float32)
cache = pagedkv.PagedKVCache()
cache.update(x, x)
table = pagedkv.BlockTable(pagedkv.PagePool([pagedkv.LayerSpec(1, 32)]))
for call in (lambda: cache.attend(x[:, :50]), lambda: table.length):
    threading.Thread(target=lambda c=call: [c() for _ in iter(int, 1)], daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")


def test_objects_that_cannot_be_described_are_refused_all_the_same() -> None:
    class Broken(type):
        def __str__(cls) -> str:
            raise KeyError

    class Nothing(metaclass=Broken):
        pass

    class Surrogate(type):
        def __str__(cls) -> str:
            return "\ud800"

    class Strange(metaclass=Surrogate):
        pass

    for thing in (Nothing(), Strange()):
        with pytest.raises(TypeError, match="no array"):
            pagedkv.PagedKVCache().update(thing, thing)


def test_numbers_of_any_size_and_type_get_an_answer_that_names_them() -> None:
    for options, error in (
        ({"block_size": 2**40}, ValueError),
        ({"num_blocks": 2**62}, ValueError),
        ({"num_blocks": 2.5}, TypeError),
        ({"quant": 4}, TypeError),
        ({"dtype": np.float16}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            pagedkv.PagedKVCache(**options)


def test_codes_have_the_dtype_of_their_bits() -> None:
    codes, scales = pagedkv.quantize_symmetric(rows(1, 3, 8), 8)
    with pytest.raises(TypeError, match="int8"):
        pagedkv.dequantize_symmetric(codes.view(np.uint8), scales, 8, 8)
