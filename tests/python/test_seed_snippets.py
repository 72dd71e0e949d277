"""What the seed's text promises of its paged KV cache: its examples run, under our import paths and
under its own, and each sentence that can be checked is. The package: PAGEDKV_TEST_PACKAGE."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from golden_data import GoldenArray, stored_from_float32
from golden_package import Package

ROOT = os.environ.get("PAGEDKV_TEST_PACKAGE", "pagedkv.mtplx")
MODULES = ("cache_state", "kv_quant", "attention_context")

INITIALIZE = """
from mtplx.cache_state import VllmMetalPagedKVCache

# Initialize with 1024 blocks of size 16

kv_cache = VllmMetalPagedKVCache(block_size=16, num_blocks=1024)
"""

LOAD = """
from mtplx.kv_quant import PagedKVQuantConfig

# Load existing cache entry with 4-bit quantization

kv_cache = VllmMetalPagedKVCache.from_cache(
    entry,  # Object with .keys, .values, and .offset attributes

    block_size=16,
    num_blocks=1024,
    kv_quant_config=PagedKVQuantConfig(mode="q4")
)
"""

MONITOR = """
# Query current utilization

print("Capacity (tokens):", kv_cache.capacity)
print("Tokens currently stored:", kv_cache.offset)

# Manually trigger growth (requires MTPLX_DYNAMIC_PAGED_KV=1)

required_tokens = 20000
if kv_cache.offset < required_tokens:
    kv_cache._grow_to_capacity(required_tokens)
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MTPLX_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(ROOT)


@pytest.fixture(params=["our import paths", "the seed's import paths"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs an example in a namespace: with our paths in its text, or as it stands, where `mtplx` is
    an alias."""
    own = request.param == "the seed's import paths"
    if own:
        monkeypatch.setitem(sys.modules, "mtplx", importlib.import_module(ROOT))
        for name in MODULES:
            monkeypatch.setitem(
                sys.modules, f"mtplx.{name}", importlib.import_module(f"{ROOT}.{name}")
            )

    def run_text(text: str, names: dict[str, Any]) -> dict[str, Any]:
        exec(text if own else text.replace("mtplx.", f"{ROOT}."), names)
        return names

    return run_text


def rows(
    package: Package,
    tokens: int,
    heads: int = 2,
    dim: int = 8,
    dtype: str = "float32",
    seed: int = 0,
) -> Any:
    """[1, heads, tokens, dim] of normal values."""
    values = np.random.default_rng(seed).standard_normal((1, heads, tokens, dim), np.float32)
    return package.array(GoldenArray(dtype, stored_from_float32(values, dtype)))


def plain(package: Package, array: Any) -> np.ndarray:
    return package.golden(array).float32()


def filled(package: Package, tokens: int = 5, **how: Any) -> Any:
    cache = package.cls(**how)
    cache.update_without_fetch(rows(package, tokens), rows(package, tokens, seed=1))
    return cache


# ---- the examples


def test_example_initialize_gives_1024_blocks_of_16(run: Any) -> None:
    cache = run(INITIALIZE, {})["kv_cache"]
    assert (cache.block_size, cache.num_blocks, cache.capacity, cache.offset) == (
        16,
        1024,
        16384,
        0,
    )


def test_example_load_takes_any_entry_and_quantises_it_to_four_bits(
    run: Any, package: Package
) -> None:
    keys, values = rows(package, 9), rows(package, 9, seed=1)
    entry = SimpleNamespace(keys=keys, values=values, offset=7)
    names = run(INITIALIZE, {})
    cache = run(LOAD, {**names, "entry": entry})["kv_cache"]
    assert (cache.offset, cache.kv_quant_config.bits) == (7, 4)
    for held, given in zip(cache.state, (keys, values), strict=True):
        held, given = plain(package, held), plain(package, given)[:, :, :7]
        step = np.abs(given).max(axis=-1, keepdims=True) / 7
        assert held.shape == given.shape
        assert (np.abs(held - given) <= 0.5001 * step).all()


def test_example_monitor_prints_and_grows_where_growth_is_on(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MTPLX_DYNAMIC_PAGED_KV", "1")
    cache = run(MONITOR, run(INITIALIZE, {}))["kv_cache"]
    assert capsys.readouterr().out == "Capacity (tokens): 16384\nTokens currently stored: 0\n"
    assert cache.capacity >= 20000
    assert cache.offset == 0


def test_example_monitor_leaves_the_capacity_where_growth_is_off(run: Any) -> None:
    assert run(MONITOR, run(INITIALIZE, {}))["kv_cache"].capacity == 16384


def test_example_environment_quantises_all_new_caches(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches are made by the installer; the bare constructor takes its configuration as an
    argument."""
    monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_ATTN", "1")
    monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_ATTN_IMPL", "mlx_vector_paged")
    monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q4")
    caches = [package.cls(), package.cls(block_size=4)]
    stats = package.cache_state.configure_tail_owned_attention_kv_cache(caches)
    assert (stats["entries"], stats["kv_quant_mode"]) == (2, "q4")
    assert [cache.paged_stats()["kv_quant_mode"] for cache in caches] == ["q4", "q4"]


# ---- layout, allocation, growth


def test_pages_have_the_layout_of_the_kernels(package: Package) -> None:
    cache = filled(package, 5, block_size=4, num_blocks=3)
    for pages in (cache.key_cache, cache.value_cache):
        assert tuple(pages.shape) == (3, 4, 2, 8)


def test_the_cache_is_allocated_whole_before_it_is_full(package: Package) -> None:
    cache = filled(package, 1, block_size=4, num_blocks=8)
    before = tuple(cache.key_cache.shape)
    for i in range(31):
        cache.update_without_fetch(rows(package, 1, seed=i), rows(package, 1, seed=i))
    assert tuple(cache.key_cache.shape) == before == (8, 4, 2, 8)
    assert cache.paged_stats()["grow_events"] == 0


def test_logical_positions_are_contiguous_from_zero_across_pages(package: Package) -> None:
    keys, values = rows(package, 11), rows(package, 11, seed=1)
    cache = package.cls(block_size=4, num_blocks=3)
    for begin, end in ((0, 3), (3, 4), (4, 11)):
        cache.update_without_fetch(keys[:, :, begin:end], values[:, :, begin:end])
    assert np.array_equal(plain(package, cache.keys), plain(package, keys))
    assert np.array_equal(plain(package, cache.values), plain(package, values))
    pages = package.golden(cache.key_cache).stored.reshape(12, 2, 8)[:11]
    assert np.array_equal(pages.transpose(1, 0, 2), package.golden(keys).stored[0])


def test_a_full_cache_is_a_capacity_error_where_growth_is_off(package: Package) -> None:
    cache = filled(package, 12, block_size=4, num_blocks=3)
    with pytest.raises(ValueError, match="capacity.*13.*12"):
        cache.update_without_fetch(rows(package, 1), rows(package, 1))
    assert (cache.offset, cache.capacity) == (12, 12)


@pytest.mark.parametrize("word", ["1", "true", " ON ", "yes"])
def test_a_full_cache_grows_by_itself_where_growth_is_on(
    word: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(package, 12, block_size=4, num_blocks=3)
    held = [plain(package, x) for x in cache.state]
    monkeypatch.setenv("MTPLX_DYNAMIC_PAGED_KV", word)
    cache.update_without_fetch(rows(package, 1), rows(package, 1))
    assert (cache.offset, cache.capacity, cache.paged_stats()["grow_events"]) == (13, 20, 1)
    for now, before in zip(cache.state, held, strict=True):
        assert np.array_equal(plain(package, now)[:, :, :12], before)


def test_a_cache_grows_only_when_the_context_exceeds_its_capacity(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPLX_DYNAMIC_PAGED_KV", "1")
    cache = filled(package, 12, block_size=4, num_blocks=3)
    assert (cache.capacity, cache.grow_events) == (12, 0)


# ---- quantisation


@pytest.mark.parametrize("quant, low, high", [("q8", 0.48, 0.50), ("q4", 0.73, 0.75)])
def test_quantised_pages_take_50_to_75_percent_less_than_16_bits(
    quant: str, low: float, high: float, package: Package
) -> None:
    sizes = []
    for config in (None, package.config(quant)):
        cache = package.cls(block_size=16, num_blocks=4, kv_quant_config=config)
        cache.update_without_fetch(
            rows(package, 64, dim=128, dtype="float16"), rows(package, 64, dim=128, dtype="float16")
        )
        sizes.append(cache.nbytes)
    assert low <= 1 - sizes[1] / sizes[0] <= high


@pytest.mark.parametrize(
    "primary, fallback, mode",
    [
        (None, None, "off"),
        ("q8", None, "q8"),
        (None, "q4", "q4"),
        ("q8", "q4", "q8"),
        ("off", "q4", "off"),
        ("", "q4", "q4"),
    ],
)
def test_the_primary_variable_wins_over_the_fallback(
    primary: str | None,
    fallback: str | None,
    mode: str,
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("MTPLX_VLLM_METAL_PAGED_KV_QUANT", primary),
        ("MTPLX_PAGED_KV_QUANT", fallback),
    ):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert package.kv_quant.paged_kv_quant_mode_from_env() == mode
    config = package.kv_quant.config_from_env()
    assert (config.mode if config else "off") == mode


def test_a_mode_that_is_none_of_off_q8_q4_is_an_error(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPLX_PAGED_KV_QUANT", "q5")
    with pytest.raises(ValueError, match="q5"):
        package.kv_quant.paged_kv_quant_mode_from_env()


def test_the_configuration_is_an_immutable_dataclass(package: Package) -> None:
    config = package.kv_quant.PagedKVQuantConfig(mode="q4")
    assert dataclasses.is_dataclass(type(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "q8"
    assert config == package.kv_quant.PagedKVQuantConfig("q4")
    assert package.kv_quant.PagedKVQuantConfig() == package.kv_quant.PagedKVQuantConfig(mode="q8")


@pytest.mark.parametrize("quant, bits", [("q8", 8), ("q4", 4)])
def test_storing_quantises_and_retrieval_dequantises(
    quant: str, bits: int, package: Package
) -> None:
    cache = package.cls(block_size=4, num_blocks=3, kv_quant_config=package.config(quant))
    keys = rows(package, 7)
    cache.update_without_fetch(keys, rows(package, 7, seed=1))
    q, scale = package.kv_quant.quantize_symmetric(keys, bits=bits)
    codes = package.golden(cache.key_cache).stored.reshape(12, 2, -1)[:7].transpose(1, 0, 2)
    scales = package.golden(cache.key_scale_cache).stored.reshape(12, 2, 1)[:7].transpose(1, 0, 2)
    assert np.array_equal(codes, package.golden(q).stored[0])
    assert np.array_equal(scales, package.golden(scale).stored[0])
    x = package.kv_quant.dequantize_symmetric(q, scale, bits=bits, head_dim=8)
    assert np.array_equal(plain(package, cache.keys), plain(package, x))


# ---- attention, fallback, statistics


def test_attention_works_without_the_external_operations(package: Package) -> None:
    cache = filled(package, 6, block_size=4, num_blocks=3)
    queries = rows(package, 2, heads=4, seed=3)
    out = plain(package, cache.paged_attention(queries, scale=0.5, mask="causal"))
    k, v = (plain(package, x)[0].astype(np.float64).repeat(2, axis=0) for x in cache.state)
    scores = plain(package, queries)[0].astype(np.float64) @ k.transpose(0, 2, 1) * 0.5
    scores[:, 0, 5] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = p / p.sum(axis=-1, keepdims=True) @ v
    assert np.abs(out[0] - expected).max() < 2e-6


def test_missing_operations_are_warned_about_once() -> None:
    code = (
        f"from {ROOT}.cache_state import _warn_vllm_metal_ops_unavailable as warn\n"
        "warn(RuntimeError('first reason'), context='here')\n"
        "warn(RuntimeError('second reason'), context='there')\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.stdout == ""
    assert "first reason" in ran.stderr
    assert "second reason" not in ran.stderr


def test_counters_follow_writes_growth_reads_and_use(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPLX_DYNAMIC_PAGED_KV", "1")
    cache = package.cls(block_size=4, num_blocks=2, kv_quant_config=package.config("q8"))
    names = (
        "updates",
        "grow_events",
        "active_array_calls",
        "kv_quant_dequant_calls",
        "offset",
        "capacity",
    )

    def counts() -> tuple[int, ...]:
        return tuple(cache.paged_stats()[name] for name in names)

    assert counts() == (0, 0, 0, 0, 0, 8)
    cache.update_without_fetch(rows(package, 5), rows(package, 5))
    assert counts() == (1, 0, 0, 0, 5, 8)
    cache.update_and_fetch(rows(package, 5), rows(package, 5))
    assert counts() == (2, 1, 1, 1, 10, 12)
    assert cache.state[0] is not None
    assert counts() == (2, 1, 2, 2, 10, 12)


def test_the_statistics_of_a_model_sum_its_layers(package: Package) -> None:
    layers = [filled(package, 5), filled(package, 3)]
    total = package.cache_state.tail_owned_attention_kv_stats(layers)
    assert total["updates"] == 2
    assert total["bytes"] == sum(layer.nbytes for layer in layers)


# ---- restoring a session: active rows, not the capacity


def bytes_of(package: Package, state: Any) -> int:
    return sum(package.golden(x).stored.nbytes for x in state)


@pytest.mark.parametrize("quant", ["off", "q8", "q4"])
def test_a_snapshot_holds_the_rows_in_use_and_never_the_capacity(
    quant: str, package: Package
) -> None:
    sizes = []
    for num_blocks in (2, 256):
        cache = filled(package, 5, num_blocks=num_blocks, kv_quant_config=package.config(quant))
        snapshot = package.cache_state.snapshot_cache([cache])
        sizes.append(bytes_of(package, snapshot.states[0]))
    assert sizes == [2 * 2 * 5 * 8 * 4] * 2


@pytest.mark.parametrize("quant", ["off", "q8", "q4"])
def test_a_restored_cache_serves_the_same_rows(quant: str, package: Package) -> None:
    source = filled(package, 5, block_size=4, num_blocks=8, kv_quant_config=package.config(quant))
    snapshot = package.cache_state.snapshot_cache([source])
    copy = package.cls(block_size=4, num_blocks=8, kv_quant_config=package.config(quant))
    package.cache_state.restore_cache([copy], snapshot)
    assert (copy.offset, copy.meta_state) == (5, source.meta_state)
    for now, then in zip(copy.state, source.state, strict=True):
        assert np.array_equal(plain(package, now), plain(package, then))


@pytest.mark.parametrize("way", ["snapshot", "from_cache"])
def test_source_and_copy_are_independent(way: str, package: Package) -> None:
    source = filled(package, 5, block_size=4, num_blocks=8)
    if way == "snapshot":
        copy = package.cls(block_size=4, num_blocks=8)
        package.cache_state.restore_cache([copy], package.cache_state.snapshot_cache([source]))
    else:
        copy = package.cls.from_cache(source, block_size=4, num_blocks=8)
    held = [plain(package, x) for x in source.state]
    source.trim(3)
    source.update_without_fetch(rows(package, 6, seed=7), rows(package, 6, seed=8))
    for now, then in zip(copy.state, held, strict=True):
        assert np.array_equal(plain(package, now), then)
    after = [plain(package, x) for x in source.state]
    copy.trim(5)
    copy.update_without_fetch(rows(package, 8, seed=9), rows(package, 8, seed=10))
    for now, then in zip(source.state, after, strict=True):
        assert np.array_equal(plain(package, now), then)


def test_a_snapshot_does_not_see_later_writes(package: Package) -> None:
    source = filled(package, 5, block_size=4, num_blocks=8)
    snapshot = package.cache_state.snapshot_cache([source])
    held = [plain(package, x) for x in snapshot.states[0]]
    source.trim(5)
    source.update_without_fetch(rows(package, 5, seed=7), rows(package, 5, seed=8))
    for now, then in zip(snapshot.states[0], held, strict=True):
        assert np.array_equal(plain(package, now), then)


def test_where_asserted_a_long_context_refuses_to_materialise_active_arrays(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPLX_ASSERT_NO_PAGED_ACTIVE_ARRAYS", "1")
    monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_PARTITION_THRESHOLD", "6")
    cache = filled(package, 5)
    assert cache.keys is not None
    cache.update_without_fetch(rows(package, 1), rows(package, 1))
    for read in ("state", "keys", "values"):
        with pytest.raises(RuntimeError, match="materialize active K/V arrays"):
            getattr(cache, read)
