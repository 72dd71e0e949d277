"""pagedkv.mlx_lm: mlx-lm's models give the same on our pages, and files go both ways.

PAGEDKV_TEST_PACKAGE=mtplx runs these tests with the cache class of an installed mtplx.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

mx: Any = pytest.importorskip("mlx.core")
stock: Any = pytest.importorskip("mlx_lm.models.cache")
PACKAGE = os.environ.get("PAGEDKV_TEST_PACKAGE", "pagedkv.mtplx")
if PACKAGE != "pagedkv.mtplx":
    for name in ("cache_state", "kv_quant"):
        sys.modules[f"pagedkv.mtplx.{name}"] = import_module(f"{PACKAGE}.{name}")
    sys.modules["pagedkv.mtplx"] = import_module(PACKAGE)

# Down here, since these import the package that was just chosen.
from pagedkv import mlx_lm as paged  # noqa: E402
from tiny_mlx_model import tiny_model, tiny_prompt  # noqa: E402

base: Any = import_module("mlx_lm.models.base")
llama: Any = import_module("mlx_lm.models.llama")
generate_step: Any = import_module("mlx_lm.generate").generate_step
tree_flatten: Any = import_module("mlx.utils").tree_flatten
Paged: Any = import_module("pagedkv.mtplx.cache_state").VllmMetalPagedKVCache
VERSION = 31 if hasattr(stock.KVCache, "meta_state") else 32
PROMPTS = (1, 17, 300)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable but those that the class of mtplx needs where there is no Metal."""
    for variable in list(os.environ):
        if variable.startswith(("MTPLX_", "PAGEDKV_")):
            monkeypatch.delenv(variable)
    if PACKAGE != "pagedkv.mtplx":
        monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_ATTN_IMPL", "sdpa_2pass_paged")
    monkeypatch.setenv("MTPLX_DYNAMIC_PAGED_KV", "1")


def generated(model: Any, prompt: Any, cache: list[Any], count: int = 12) -> tuple[list[int], Any]:
    """Greedy tokens and their log-probabilities [count, vocabulary]; prompts in steps of 64."""
    steps = generate_step(prompt, model, max_tokens=count, prompt_cache=cache, prefill_step_size=64)
    tokens, rows = zip(*steps)
    return list(tokens), mx.stack(rows).astype(mx.float32)


def paged_cache(model: Any, **settings: Any) -> list[Any]:
    cache: list[Any] = stock.make_prompt_cache(model)
    paged.install(cache, **settings)
    return cache


def filled(model: Any, length: int = 40, **settings: Any) -> list[Any]:
    """A paged cache that holds `length` tokens."""
    cache = paged_cache(model, **settings)
    model(tiny_prompt(length)[None], cache=cache)
    return cache


def largest_difference(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    return float(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max())


def same(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b))


def rows(entry: Any) -> tuple[Any, Any]:
    """Keys and values [1, heads, tokens, head_dim] of any entry."""
    n = entry.offset
    return entry.keys[..., :n, :], entry.values[..., :n, :]


# Installing


def test_install_swaps_each_full_attention_entry() -> None:
    cache = stock.make_prompt_cache(tiny_model())
    stats = paged.install(cache, block_size=8, num_blocks=5)
    assert [type(entry) for entry in cache] == [Paged] * 3
    assert [(entry.block_size, entry.num_blocks) for entry in cache] == [(8, 5)] * 3
    assert (stats["entries"], stats["skipped"]) == (3, 0)


def test_install_leaves_rotating_entries() -> None:
    model = tiny_model(sliding_window=16)
    cache = stock.make_prompt_cache(model)
    stats = paged.install(cache)
    assert [type(entry) for entry in cache] == [Paged] + [stock.RotatingKVCache] * 2
    assert (stats["entries"], stats["skipped"]) == (1, 2)
    prompt = tiny_prompt(50)
    want, _ = generated(model, prompt, stock.make_prompt_cache(model))
    assert generated(model, prompt, cache)[0] == want


def test_install_keeps_the_tokens_that_entries_hold() -> None:
    model = tiny_model()
    cache = stock.make_prompt_cache(model)
    model(tiny_prompt(20)[None], cache=cache)
    before = [rows(entry) for entry in cache]
    paged.install(cache)
    assert [entry.offset for entry in cache] == [20] * 3
    for entry, (keys, values) in zip(cache, before):
        got = entry.state
        assert same(got[0], keys) and same(got[1], values)


def test_install_takes_a_word_or_a_config() -> None:
    model = tiny_model()
    config = import_module("pagedkv.mtplx.kv_quant").PagedKVQuantConfig
    modes = [
        filled(model, kv_quant_config=given)[0].paged_stats()["kv_quant_mode"]
        for given in ("q8", config(mode="q4"), "INT8")
    ]
    assert modes == ["q8", "q4", "q8"]
    plain = filled(model, kv_quant_config="off")[0]
    assert plain.paged_stats()["kv_quant"] == 0
    assert plain.state[0].dtype == mx.float32


def test_a_refused_install_changes_nothing() -> None:
    cache = [stock.KVCache(), stock.KVCache()]
    cache[0].update_and_fetch(mx.ones((1, 2, 3, 8)), mx.ones((1, 2, 3, 8)))
    cache[1].update_and_fetch(mx.ones((2, 2, 3, 8)), mx.ones((2, 2, 3, 8)))  # batch of 2
    before = list(cache)
    with pytest.raises(ValueError, match="batch"):
        paged.install(cache)
    assert all(a is b for a, b in zip(cache, before))
    with pytest.raises(TypeError):
        paged.install(cache, page_size=3)  # type: ignore[call-arg]


# Generating


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_the_same_tokens_come_from_our_pages(length: int, dtype: Any) -> None:
    model = tiny_model(dtype=dtype)
    prompt = tiny_prompt(length)
    want, want_rows = generated(model, prompt, stock.make_prompt_cache(model))
    for settings in ({}, {"block_size": 3, "num_blocks": 2}):
        cache = paged_cache(model, **settings)
        got, got_rows = generated(model, prompt, cache)
        assert got == want
        assert same(got_rows, want_rows)
        # Steps run one ahead of what is yielded.
        assert {entry.offset for entry in cache} <= {length + 11, length + 12}
    assert len(set(want)) > 1


@pytest.mark.parametrize("length", PROMPTS)
def test_paged_attention_gives_the_stock_logits(length: int) -> None:
    model = tiny_model()
    prompt = tiny_prompt(length)
    want, want_rows = generated(model, prompt, stock.make_prompt_cache(model))
    for fetch in (True, False):
        cache = paged_cache(model)
        with paged.paged_attention(fetch=fetch):
            got, got_rows = generated(model, prompt, cache)
        assert largest_difference(got_rows, want_rows) < 1e-3
        assert got == want
        assert all(entry.paged_stats()["paged_attention_calls"] >= 12 for entry in cache)


@pytest.mark.parametrize(("mode", "limit"), [("q8", 0.1), ("q4", 2.0)])
@pytest.mark.parametrize("fetch", [True, False])
def test_quantised_pages_are_attended_as_they_read(mode: str, limit: float, fetch: bool) -> None:
    model = tiny_model(layers=1)  # a second one would quantise what differs in rounding
    prompt = tiny_prompt(100)[None]
    want = model(prompt, cache=stock.make_prompt_cache(model))
    reads = model(prompt, cache=paged_cache(model, kv_quant_config=mode))
    with paged.paged_attention(fetch=fetch):
        cache = paged_cache(model, kv_quant_config=mode)
        got = model(prompt, cache=cache)
    assert largest_difference(got, reads) < 1e-3
    assert 1e-4 < largest_difference(got, want) < limit * float(mx.abs(want).max())
    assert all(entry.paged_stats()["kv_quant_attention_calls"] == 1 for entry in cache)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_paged_attention_keeps_the_type_of_the_queries(dtype: Any) -> None:
    model = tiny_model(dtype=dtype)
    prompt = tiny_prompt(70)[None]
    want = model(prompt, cache=stock.make_prompt_cache(model))
    with paged.paged_attention():
        got = model(prompt, cache=paged_cache(model))
    assert got.dtype == dtype
    eps = 2**-10 if dtype == mx.float16 else 2**-7
    assert largest_difference(got, want) < 8 * eps * float(mx.abs(want).max())


def test_the_stock_function_is_back_on_exit() -> None:
    original = base.scaled_dot_product_attention
    write = Paged.update_and_fetch
    with paged.paged_attention(fetch=False):
        assert llama.scaled_dot_product_attention is not original
        assert base.scaled_dot_product_attention is not original
        with paged.paged_attention(fetch=False):
            pass
        assert llama.scaled_dot_product_attention is not original
        with pytest.raises(RuntimeError, match="already in use"):
            with paged.paged_attention(fetch=True):
                pytest.fail("was let in")
    with pytest.raises(KeyError, match="mine"):
        with paged.paged_attention():
            raise KeyError("mine")
    assert llama.scaled_dot_product_attention is original
    assert base.scaled_dot_product_attention is original
    assert Paged.update_and_fetch is write


def test_a_module_that_comes_meanwhile_has_the_stock_function_afterwards() -> None:
    original = base.scaled_dot_product_attention
    name = "mlx_lm.models.qwen2"
    before = sys.modules.pop(name, None)
    try:
        with paged.paged_attention():
            module: Any = import_module(name)
            assert module.scaled_dot_product_attention is not original
        assert module.scaled_dot_product_attention is original
    finally:
        if before is not None:
            sys.modules[name] = before


def test_other_entries_are_attended_to_as_ever() -> None:
    model = tiny_model(sliding_window=16)
    prompt = tiny_prompt(60)[None]
    caches = [stock.make_prompt_cache(model) for _ in range(2)]
    want = model(prompt, cache=caches[0])
    for fetch in (True, False):
        with paged.paged_attention(fetch=fetch):
            assert same(model(prompt, cache=stock.make_prompt_cache(model)), want)
            assert same(model(prompt), model(prompt, cache=None))
            mixed = paged_cache(model)
            assert largest_difference(model(prompt, cache=mixed), want) < 1e-3
        assert mixed[0].paged_stats()["paged_attention_calls"] == 1


def normal(seed: int, *shape: int) -> Any:
    mx.random.seed(seed)
    return mx.random.normal(shape)


def attend(entry: Any, queries: Any, mask: Any, **more: Any) -> Any:
    """Writes as many new tokens as there are queries, then attends as a model does."""
    new = (1, 2, queries.shape[2], 32)
    keys, values = entry.update_and_fetch(normal(3, *new), normal(4, *new))
    return base.scaled_dot_product_attention(
        queries, keys, values, cache=entry, scale=0.2, mask=mask, **more
    )


def stock_attention(entry: Any, queries: Any, mask: Any, **more: Any) -> Any:
    """Over what the entry gives to read."""
    keys, values = entry.state
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask, **more)


def entry_of(mode: str, tokens: int = 40) -> Any:
    """An entry with plain ("") or quantised pages and random rows."""
    entry = stock.KVCache()
    entry.update_and_fetch(normal(1, 1, 2, tokens, 32), normal(2, 1, 2, tokens, 32))
    cache = [entry]
    paged.install(cache, kv_quant_config=mode or None)
    return cache[0]


@pytest.mark.parametrize("mode", ["", "q8", "q4"])
@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bias"])
def test_each_mask_means_what_it_means_to_mlx_lm(mask: str, fetch: bool, mode: str) -> None:
    queries = normal(5, 1, 4, 6, 32)
    allowed = normal(6, 6, 46) < 0.5
    bias = mx.where(allowed, 0.0, -1e9)
    given = {"none": None, "causal": "causal", "bool": allowed, "bias": bias}[mask]
    entry = entry_of(mode)
    with paged.paged_attention(fetch=fetch):
        got = attend(entry, queries, given)
    assert largest_difference(got, stock_attention(entry, queries, given)) < 1e-5


@pytest.mark.parametrize("fetch", [True, False])
def test_attention_sinks_go_the_stock_way(fetch: bool) -> None:
    queries, sinks = normal(5, 1, 4, 6, 32), normal(6, 4)
    entry = entry_of("q8")
    with paged.paged_attention(fetch=fetch):
        got = attend(entry, queries, "causal", sinks=sinks)
    assert largest_difference(got, stock_attention(entry, queries, "causal", sinks=sinks)) < 1e-5
    assert entry.paged_stats()["paged_attention_calls"] == 0


def test_keys_that_a_model_changes_are_attended_as_changed() -> None:
    queries, new = normal(5, 1, 4, 1, 32), normal(6, 1, 2, 1, 32)
    entry = entry_of("")
    sdpa = {"scale": 0.2, "mask": None}
    with paged.paged_attention():
        keys, values = entry.update_and_fetch(new, new)
        cut = keys[..., 5:, :], values[..., 5:, :]
        for k, v in ((keys * 2, values), (keys, values * 2), cut):
            got = base.scaled_dot_product_attention(queries, k, v, cache=entry, **sdpa)
            assert same(got, mx.fast.scaled_dot_product_attention(queries, k, v, **sdpa))
        assert entry.paged_stats()["paged_attention_calls"] == 0
        for _ in range(2):  # as where layers share an entry
            got = base.scaled_dot_product_attention(queries, keys, values, cache=entry, **sdpa)
            assert largest_difference(got, stock_attention(entry, queries, None)) < 1e-5
    assert entry.paged_stats()["paged_attention_calls"] == 2


def test_without_fetch_other_uses_of_keys_are_errors() -> None:
    queries, new = normal(5, 1, 4, 1, 32), normal(6, 1, 2, 1, 32)
    sdpa, write = base.scaled_dot_product_attention, Paged.update_and_fetch
    one, two = entry_of(""), entry_of("")

    def refused(keys: Any, values: Any, cache: Any) -> None:
        with pytest.raises(RuntimeError, match="fetch=True"):
            base.scaled_dot_product_attention(queries, keys, values, cache, 1.0, None)

    with pytest.raises(RuntimeError, match="fetch=True"):  # on exit
        with paged.paged_attention(fetch=False):
            one.update_and_fetch(new, new)
    with paged.paged_attention(fetch=False):
        one.update_and_fetch(new, new)
        with pytest.raises(RuntimeError, match="fetch=True"):
            two.update_and_fetch(new, new)
        keys, values = one.update_and_fetch(new, new)
        refused(keys, values, two)
        refused(keys, values, stock.KVCache())
        refused(keys, values, None)
        refused(keys + 1, values, one)
        refused(keys, values + 1, one)
        got = base.scaled_dot_product_attention(queries, keys, values, one, 0.2, None)
        assert largest_difference(got, stock_attention(one, queries, None)) < 1e-5
    assert (one.offset, two.offset) == (43, 40)
    assert base.scaled_dot_product_attention is sdpa
    assert Paged.update_and_fetch is write


def test_each_thread_attends_to_its_own_write() -> None:
    queries, new = normal(5, 1, 4, 1, 32), normal(6, 1, 2, 1, 32)
    mine, others = entry_of(""), entry_of("")
    mx.eval(new, others.state)  # what this thread has not computed the other one cannot

    def write_elsewhere() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            others.update_and_fetch(new, new)

    with paged.paged_attention(fetch=False):
        keys, values = mine.update_and_fetch(new, new)
        thread = threading.Thread(target=write_elsewhere)
        thread.start()
        thread.join()
        got = base.scaled_dot_product_attention(queries, keys, values, mine, 0.2, None)
    assert others.offset == 41
    assert largest_difference(got, stock_attention(mine, queries, None)) < 1e-5


def test_threads_may_attend_at_once() -> None:
    model = tiny_model()
    prompts = [tiny_prompt(n)[None] for n in (30, 40, 50, 60)]
    want = [model(prompt) for prompt in prompts]
    mx.eval(want)
    entered = threading.Barrier(len(prompts))
    got: list[Any] = [None] * len(prompts)

    def work(i: int) -> None:
        # An array belongs to the thread's own stream.
        with mx.stream(mx.new_stream(mx.cpu)), paged.paged_attention(fetch=False):
            entered.wait(60)
            got[i] = model(prompts[i], cache=paged_cache(model))
            mx.eval(got[i])

    original = base.scaled_dot_product_attention
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want):
        assert largest_difference(a, b) < 1e-3
    assert base.scaled_dot_product_attention is original


# Files


def test_mlx_lm_loads_what_we_save(tmp_path: Path) -> None:
    model = tiny_model(dtype=mx.float16)
    cache = filled(model)
    paged.save_prompt_cache(tmp_path / "cache.safetensors", cache, {"model": "tiny", "x": ""})
    loaded, metadata = stock.load_prompt_cache(
        str(tmp_path / "cache.safetensors"), return_metadata=True
    )
    assert metadata == {"model": "tiny", "x": ""}
    assert [type(entry) for entry in loaded] == [stock.KVCache] * 3
    for entry, ours in zip(loaded, cache):
        keys, values = rows(entry)
        got = ours.state
        assert entry.offset == 40
        assert same(keys, got[0]) and same(values, got[1])
    more = tiny_prompt(5)
    assert generated(model, more, loaded)[0] == generated(model, more, cache)[0]


def test_we_load_what_mlx_lm_saves(tmp_path: Path) -> None:
    model = tiny_model(dtype=mx.bfloat16)
    cache = stock.make_prompt_cache(model)
    model(tiny_prompt(40)[None], cache=cache)
    path = tmp_path / "cache.safetensors"
    stock.save_prompt_cache(str(path), cache, {"model": "tiny"})
    loaded, metadata = paged.load_prompt_cache(path, True, block_size=8, num_blocks=6)
    assert metadata == {"model": "tiny"}
    assert [type(entry) for entry in loaded] == [Paged] * 3
    for entry, theirs in zip(loaded, cache):
        assert (entry.block_size, entry.offset) == (8, 40)
        got, want = entry.state, rows(theirs)
        assert same(got[0], want[0]) and same(got[1], want[1])
    more = tiny_prompt(5)
    assert generated(model, more, loaded)[0] == generated(model, more, cache)[0]


@pytest.mark.parametrize("mode", ["q8", "q4"])
def test_quantised_pages_are_saved_as_they_read(mode: str, tmp_path: Path) -> None:
    cache = filled(tiny_model(dtype=mx.float16), kv_quant_config=mode)
    path = tmp_path / "cache.safetensors"
    paged.save_prompt_cache(path, cache)
    plain = paged.load_prompt_cache(path)
    again = paged.load_prompt_cache(path, kv_quant_config=mode)
    for ours, copy, requantised in zip(cache, plain, again):
        assert copy.state[0].dtype == mx.float16
        assert copy.paged_stats()["kv_quant"] == 0
        assert same(copy.state[0], ours.state[0]) and same(copy.state[1], ours.state[1])
        assert same(requantised.state[0], ours.state[0])
        for pages in ("key_cache", "value_cache", "key_scale_cache", "value_scale_cache"):
            a, b = (getattr(entry, pages) for entry in (ours, requantised))
            n = 40 // ours.block_size  # the pages that are full
            assert same(a[:n], b[:n]), pages


def test_entries_that_are_not_ours_are_saved_too(tmp_path: Path) -> None:
    model = tiny_model(sliding_window=16)
    cache = filled(model)
    paged.save_prompt_cache(tmp_path / "mixed", cache)
    loaded = paged.load_prompt_cache(tmp_path / "mixed.safetensors")
    assert [type(entry) for entry in loaded] == [type(entry) for entry in cache]
    more = tiny_prompt(5)
    assert generated(model, more, loaded)[0] == generated(model, more, cache)[0]


def test_an_entry_without_tokens_is_saved_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = [filled(tiny_model())[0], Paged(block_size=16, num_blocks=8)]
    if VERSION == 31:
        with pytest.raises(ValueError, match="entry 1"):
            paged.save_prompt_cache(path, cache)
        return
    paged.save_prompt_cache(path, cache)
    assert [entry.offset for entry in paged.load_prompt_cache(path)] == [40, 0]


def test_a_failed_save_keeps_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.safetensors"
    cache = filled(tiny_model())
    paged.save_prompt_cache(path, cache)
    before = path.read_bytes()

    def break_off(file: str, *_: Any) -> None:
        Path(file).write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr(stock, "save_prompt_cache", break_off)
    with pytest.raises(OSError, match="disk full"):
        paged.save_prompt_cache(path, cache)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["cache.safetensors"]


def write_file(path: Path, layout: int, entries: list[tuple[str, list[Any]]]) -> None:
    """A prompt cache as mlx-lm 0.31 or 0.32 lays it out: class and state of each entry."""
    user, classes = {"model": "tiny"}, [name for name, _ in entries]
    if layout == 31:
        head: list[Any] = [["" for _ in entries], user, classes]
        arrays = tree_flatten([state[:2] for _, state in entries])
    else:
        scalars = [[f"{i}.2", "scalar"] for i in range(len(entries))]
        head = [user, classes, ["", *scalars]]
        arrays = tree_flatten([state for _, state in entries])
    mx.save_safetensors(str(path), dict(arrays), dict(tree_flatten(head)))


@pytest.mark.parametrize("layout", [31, 32])
def test_files_of_both_versions_are_read(layout: int, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    mx.random.seed(5)
    keys, values = (mx.random.normal((1, 2, 48, 32)).astype(mx.float16) for _ in range(2))
    held = 48 if layout == 31 else 40  # 0.32 writes the whole buffer and says what of it counts
    write_file(path, layout, [("KVCache", [keys, values, mx.array(held)])] * 2)
    loaded, metadata = paged.load_prompt_cache(path, True)
    assert metadata == {"model": "tiny"}
    for entry in loaded:
        got = entry.state
        assert isinstance(entry, Paged)
        assert same(got[0], keys[..., :held, :]) and same(got[1], values[..., :held, :])


def test_what_is_no_prompt_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    with pytest.raises(FileNotFoundError, match="cache.safetensors"):
        paged.load_prompt_cache(path)
    path.write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be read"):
        paged.load_prompt_cache(path)
    mx.save_safetensors(str(path), {"weight": mx.ones(3)})
    with pytest.raises(ValueError, match="no prompt cache"):
        paged.load_prompt_cache(path)
    state = [mx.ones((1, 2, 4, 8)), mx.ones((1, 2, 4, 8)), mx.array(4)]
    write_file(path, VERSION, [("NoSuchCache", state)])
    with pytest.raises(ValueError, match="NoSuchCache"):
        paged.load_prompt_cache(path)
    other = 63 - VERSION
    write_file(path, other, [("RotatingKVCache", state)])
    with pytest.raises(ValueError, match="RotatingKVCache of another mlx-lm"):
        paged.load_prompt_cache(path)
    if other == 32:
        write_file(path, other, [("KVCache", [*state[:2], mx.array(5)])])
        with pytest.raises(ValueError, match="no 5 tokens"):
            paged.load_prompt_cache(path)
    write_file(path, VERSION, [("KVCache", state)])
    with pytest.raises(TypeError):
        paged.load_prompt_cache(path, page_size=3)
