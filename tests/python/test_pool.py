"""pagedkv.PagePool, BlockTable, Batch: many sequences, tables in the field's forms."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

import pagedkv
from pagedkv import Batch, BlockTable, LayerSpec, PagePool


def rows(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def sequences(pool: PagePool, *lengths: int) -> list[BlockTable]:
    tables = [BlockTable(pool) for _ in lengths]
    for table, length in zip(tables, lengths):
        table.append(length)
    return tables


def test_csr_is_flashinfers_table() -> None:
    pool = PagePool([LayerSpec(2, 32)], page_size=4, num_pages=8)
    tables = sequences(pool, 9, 8, 1)
    indptr, indices, last = Batch(tables, [1, 1, 1]).csr()
    assert [a.dtype for a in (indptr, indices, last)] == [np.int32] * 3
    assert indptr.tolist() == [0, 3, 5, 6] and last.tolist() == [1, 4, 1]
    assert sorted(indices.tolist()) == list(range(6))
    lengths = 4 * (np.diff(indptr) - 1) + last
    assert lengths.tolist() == [9, 8, 1]
    one = tables[1].csr()
    assert one[0].tolist() == [0, 2] and one[1].tolist() == indices[3:5].tolist()


def test_dense_is_vllms_table() -> None:
    pool = PagePool([LayerSpec(2, 32)], page_size=4, num_pages=8)
    tables = sequences(pool, 9, 8, 1)
    table, lens = Batch(tables, [1, 1, 1]).dense(padding=-1)
    assert table.dtype == np.int32 and lens.dtype == np.int32 and lens.tolist() == [9, 8, 1]
    assert table.shape == (3, 3) and table[1, 2] == -1 and (table[2, 1:] == -1).all()
    assert table[0].tolist() == tables[0].csr()[1].tolist()
    assert tables[2].dense()[0].tolist() == [[table[2, 0]]]


def test_slot_mapping_is_page_times_size_plus_offset() -> None:
    pool = PagePool([LayerSpec(2, 32)], page_size=4, num_pages=8)
    a, b = sequences(pool, 3, 6)
    a.append(4)  # a's second page lies behind b's
    slots = a.slot_mapping()
    assert slots.dtype == np.int64
    pages = a.csr()[1]
    assert slots.tolist() == [int(pages[t // 4]) * 4 + t % 4 for t in range(7)]
    assert a.slot_mapping(5).tolist() == slots[5:].tolist()
    assert a.slot_mapping(1, 2).tolist() == slots[1:3].tolist()
    batch = Batch([a, b], [2, 1])
    assert batch.slot_mapping().tolist() == [*slots[5:].tolist(), b.slot_mapping()[-1]]
    assert batch.query_start.tolist() == [0, 2, 3] and batch.query_start.dtype == np.int32
    with pytest.raises(ValueError, match="the sequence has 7"):
        a.slot_mapping(5, 3)


def test_kernels_of_others_find_each_token_by_its_slot() -> None:
    pool = PagePool([LayerSpec(2, 32, "f32")], page_size=4, num_pages=8)
    tables = sequences(pool, 9, 5)
    k, v = rows(1, 14, 2, 32), rows(2, 14, 2, 32)
    batch = Batch(tables, [9, 5])
    batch.store(k, v)
    pages = np.asarray(pool.pages().keys)
    assert np.array_equal(pages.reshape(-1, 2, 32)[batch.slot_mapping()], k)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16", "q8", "q6", "q4"])
def test_a_batch_has_the_bits_of_each_sequence_alone(format: str) -> None:
    lengths, news = [5, 700, 64], [5, 1, 3]
    pool = PagePool([LayerSpec(2, 64, format)], page_size=16, num_pages=16)
    tables = sequences(pool, *lengths)
    k = [rows(i, n, 2, 64) for i, n in enumerate(lengths)]
    Batch(tables, lengths).store(np.concatenate(k), np.concatenate(k))
    q = [rows(10 + i, n, 8, 64) for i, n in enumerate(news)]
    together, lse = Batch(tables, news).attend(np.concatenate(q), log_sum_exp=True)
    assert lse.shape == (9, 8)
    bounds = np.cumsum([0, *news])
    for i in range(3):
        alone = Batch([tables[i]], [news[i]]).attend(q[i])
        assert np.array_equal(together[bounds[i] : bounds[i + 1]], alone)
        if format in ("f32", "q8", "q6", "q4"):
            quant = "off" if format == "f32" else format
            cache = pagedkv.PagedKVCache(block_size=7, quant=quant)
            cache.update(k[i].transpose(1, 0, 2), k[i].transpose(1, 0, 2))
            assert np.array_equal(cache.attend(q[i].transpose(1, 0, 2)).transpose(1, 0, 2), alone)


def test_layer_groups_have_tables_and_windows_of_their_own() -> None:
    pool = PagePool(groups=[(0, [LayerSpec(1, 32)] * 2), (8, [LayerSpec(1, 32)])], page_size=4)
    assert (pool.num_groups, pool.num_layers, pool.group_of_layer(2)) == (2, 3, 1)
    assert (pool.sliding_window(0), pool.sliding_window(1)) == (0, 8)
    (table,) = sequences(pool, 30)
    batch = Batch([table], [30])
    k = rows(1, 30, 1, 32)
    for layer in range(3):
        batch.store(k, k, layer)
    q = rows(2, 1, 4, 32)
    step = Batch([table], [1])
    assert np.array_equal(step.attend(q, layer=2), step.attend(q, layer=0, sliding_window=8))
    assert not np.array_equal(step.attend(q, layer=2), step.attend(q, layer=0))


def test_a_window_gives_back_the_pages_that_it_has_passed() -> None:
    def outputs(gives_back: bool) -> list[np.ndarray]:
        pool = PagePool(groups=[(0, [LayerSpec(1, 32)]), (8, [LayerSpec(1, 32)])], page_size=4)
        table = BlockTable(pool)
        out = []
        for step, count in enumerate([5, 6, 6, *[1] * 20]):
            table.append(count)
            batch = Batch([table], [count])
            k = rows(step, count, 1, 32)
            for layer in range(2):
                batch.store(k, k, layer)
            out.append(batch.attend(rows(100 + step, count, 4, 32), layer=1))
            if gives_back and table.release_passed() > 0:
                with pytest.raises(ValueError, match="changed"):
                    batch.dense()
        if gives_back:  # the next token sees 30..37
            block_table, seq_lens = table.dense(group=1)
            assert (
                (block_table[0, :7] == -1).all()
                and (block_table[0, 7:] >= 0).all()
                and seq_lens[0] == 37
            )
            indptr, indices, last_page_len = table.csr(group=1)
            assert (
                indptr[1] == 3
                and np.array_equal(indices, block_table[0, 7:])
                and last_page_len[0] == 1
            )
            assert (table.dense()[0] >= 0).all() and pool.stats()["pages_held"] == 10 + 3
            assert table.can_trim_to(36) and not table.can_trim_to(34) and table.can_trim_to(0)
            with pytest.raises(ValueError, match="length 34: .* given back"):
                table.trim_to(34)
            with pytest.raises(ValueError, match="given back"):
                table.slot_mapping(0, group=1)
            with pytest.raises(ValueError, match="before 28 were given back"):
                Batch([table], [1]).attend(rows(1, 1, 4, 32), layer=1, sliding_window=0)
            assert table.fork().dense(group=1)[0][0, 0] == -1
        return out

    assert all(np.array_equal(a, b) for a, b in zip(outputs(True), outputs(False), strict=True))


def test_pages_are_shared_and_copied_when_written() -> None:
    pool = PagePool([LayerSpec(1, 32, "f32")], page_size=4, num_pages=8)
    (parent,) = sequences(pool, 8)
    k = rows(1, 8, 1, 32)
    Batch([parent], [8]).store(k, k)
    child = parent.share_prefix(2)
    assert pool.stats()["pages_held"] == 2 and child.length == 8
    child.trim_to(6)
    child.append(1)  # its last page was the parent's
    assert pool.stats()["pages_held"] == 3
    Batch([child], [1]).store(rows(2, 1, 1, 32), rows(2, 1, 1, 32))
    keys = np.asarray(pool.pages().keys).reshape(-1, 1, 32)
    assert np.array_equal(keys[parent.slot_mapping()], k)
    assert np.array_equal(keys[child.slot_mapping()][:6], k[:6])
    del parent
    gc.collect()
    assert pool.stats()["pages_held"] == 2
    pool.verify()


def test_a_fork_holds_every_page_until_one_of_them_writes() -> None:
    pool = PagePool([LayerSpec(1, 32, "f32")], page_size=4, num_pages=8)
    (parent,) = sequences(pool, 6)
    k = rows(1, 6, 1, 32)
    Batch([parent], [6]).store(k, k)
    child = parent.fork()
    assert pool.stats()["pages_held"] == 2 and child.length == 6
    child.append(1)
    assert pool.stats()["pages_held"] == 3
    Batch([child], [1]).store(rows(2, 1, 1, 32), rows(2, 1, 1, 32))
    keys = np.asarray(pool.pages().keys).reshape(-1, 1, 32)
    for table in (parent, child):
        assert np.array_equal(keys[table.slot_mapping()][:6], k)
    pool.verify()


def test_a_batch_of_sequences_that_changed_is_refused() -> None:
    pool = PagePool([LayerSpec(1, 32)])
    tables = sequences(pool, 8, 8)
    batch = Batch(tables, [1, 1])
    tables[1].append(1)
    for call in (
        lambda: batch.attend(rows(1, 2, 1, 32)),
        lambda: batch.store(rows(1, 2, 1, 32), rows(1, 2, 1, 32)),
        lambda: batch.csr(),
        lambda: batch.dense(),
        lambda: batch.slot_mapping(),
    ):
        with pytest.raises(ValueError, match="sequence 1 has changed"):
            call()


def test_a_batch_keeps_its_sequences_and_a_sequence_its_pool() -> None:
    pool = PagePool([LayerSpec(1, 32, "f32")])
    tables = sequences(pool, 8)
    k = rows(1, 8, 1, 32)
    batch = Batch(tables, [8])
    batch.store(k, k)
    want = batch.attend(k)
    del tables, pool
    gc.collect()
    assert np.array_equal(batch.attend(k), want)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda b: b.store(rows(1, 3, 2, 32), rows(1, 3, 2, 32)),
            r"\[3, 2, 32\]: must be \[2, 2, 32\]",
        ),
        (lambda b: b.store(rows(1, 2, 2, 32), rows(1, 2, 2, 16)), "values"),
        (lambda b: b.attend(rows(1, 2, 3, 32)), "multiple of 2"),
        (lambda b: b.attend(rows(1, 2, 4, 16)), r"must be \[2, 4, 32\]"),
        (lambda b: b.attend(rows(1, 4, 4, 32)[0]), r"\[4, 32\]"),
        (lambda b: b.attend(rows(1, 2, 4, 32), layer=1), "layer 1"),
        (
            lambda b: b.attend(rows(1, 2, 4, 32), sinks=rows(1, 3)),
            r"sinks of shape \[3\]: must be \[4\]",
        ),
        (lambda b: b.csr(1), "layer group 1"),
    ],
)
def test_arrays_that_do_not_fit_a_batch_are_refused(call: Any, text: str) -> None:
    pool = PagePool([LayerSpec(2, 32)])
    batch = Batch(sequences(pool, 4, 4), [1, 1])
    with pytest.raises(ValueError, match=text):
        call(batch)


def test_batches_that_make_no_sense_are_refused() -> None:
    pool, other = PagePool([LayerSpec(1, 32)]), PagePool([LayerSpec(1, 32)])
    (a,), (b,) = sequences(pool, 4), sequences(other, 4)
    for tables, lens, text in (
        ([], [], "at least one"),
        ([a], [1, 1], "2 query lengths"),
        ([a, b], [1, 1], "one pool"),
        ([a], [5], r"0\.\.4"),
        ([a], [-1], "-1"),
    ):
        with pytest.raises(ValueError, match=text):
            Batch(tables, lens)
    with pytest.raises(TypeError):
        Batch([None], [1])  # type: ignore[list-item]


def test_growth_and_refusal_name_their_limits() -> None:
    pool = PagePool([LayerSpec(1, 32)], page_size=4, num_pages=2, dynamic=False)
    (table,) = sequences(pool, 8)
    with pytest.raises(pagedkv.CapacityError, match="growth is off|at most 8"):
        table.append(1)
    assert not table.try_append(1) and table.length == 8
    growing = PagePool([LayerSpec(1, 32)], page_size=4, num_pages=2, max_bytes=1 << 16)
    (sequence,) = sequences(growing, 8)
    before = np.asarray(growing.pages().keys)
    sequence.append(40)
    assert np.asarray(growing.pages().keys).ctypes.data == before.ctypes.data
    with pytest.raises(pagedkv.PageMemoryError, match="65536"):
        growing.grow(1 << 20)
    with pytest.raises(BufferError):
        growing.shrink_to(1)
    for bad in (dict(page_size=0), dict(num_pages=0), dict(max_bytes=-1)):
        with pytest.raises(ValueError):
            PagePool([LayerSpec(1, 32)], **bad)
    with pytest.raises(ValueError, match="layers"):
        PagePool([])


def test_threads_on_one_pool_keep_its_books_true() -> None:
    pool = PagePool([LayerSpec(1, 32, "f32")], page_size=4, num_pages=16)
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for round in range(20):
                table = BlockTable(pool)
                table.append(5 + value)
                k = np.full((5 + value, 1, 32), value, np.float32)
                batch = Batch([table], [5 + value])
                batch.store(k, k)
                out = batch.attend(k)
                assert np.allclose(out, value, rtol=1e-6)
                table.trim_to(round % 5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.verify()
    gc.collect()
    assert pool.stats()["pages_held"] == 0


def test_tokens_in_pages_that_another_holds_are_not_written() -> None:
    pool = PagePool([LayerSpec(1, 32, "f32")], page_size=4, num_pages=8)
    (parent,) = sequences(pool, 8)
    k = rows(1, 8, 1, 32)
    Batch([parent], [8]).store(k, k)
    child = parent.share_prefix(2)
    with pytest.raises(ValueError, match="another holds the page of its tokens from 4 on"):
        Batch([child], [4]).store(k[:4], k[:4])
    child.append(2)
    Batch([child], [2]).store(k[:2], k[:2])
    assert np.array_equal(
        np.asarray(pool.pages().keys).reshape(-1, 1, 32)[parent.slot_mapping()], k
    )


def test_a_sequence_is_in_a_batch_once() -> None:
    pool = PagePool([LayerSpec(1, 32)])
    (table,) = sequences(pool, 8)
    with pytest.raises(ValueError, match="twice"):
        Batch([table, table], [1, 1])


def test_layers_say_what_they_are_and_refuse_what_cannot_be_stored() -> None:
    assert LayerSpec(2, 64) == LayerSpec(2, 64, "f16") != LayerSpec(2, 64, "q8")
    assert (
        repr(LayerSpec(2, 64, "q8", value_format="q4"))
        == 'LayerSpec(2, 64, "q8", value_format="q4")'
    )
    for bad in ((0, 64), (-1, 64), (2, 0), (2, 513), (2, 63, "q4"), (2, 64, "q5")):
        with pytest.raises(ValueError):
            LayerSpec(*bad)


def test_numbers_of_any_size_and_type_get_an_answer_that_names_them() -> None:
    for options, error in (
        ({"num_pages": 2**31}, ValueError),
        ({"max_pages": 2**60}, ValueError),
        ({"page_size": 1.5}, TypeError),
        ({"page_size": "16"}, TypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            PagePool([LayerSpec(1, 32)], **options)
