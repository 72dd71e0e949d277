"""The seed's configuration of the cache works for `serve`: its flags, their other spellings, its variables, and which of
them wins: flag, then variable, then file."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomllib
from serving import BINARY, Server

DEFAULTS = {"format": "f16", "page_size": 16, "growth": True}


def print_config(
    *flags: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The program's answer, whatever variables this process has."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PAGEDKV_", "MTPLX_", "XDG_"))
    }
    environment.update({"PAGEDKV_CONFIG": "none"} | dict(env or {}))
    return subprocess.run(
        [BINARY, "serve", "--print-config", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def settings(
    *flags: str, env: Mapping[str, str] | None = None, code: int = 0
) -> tuple[dict[str, Any], dict[str, str]]:
    """What --print-config says: each value, and its source."""
    done = print_config(*flags, env=env)
    assert done.returncode == code, done.stderr
    if code != 0:
        return {}, {}
    sources = {}
    for line in done.stdout.splitlines():
        if " = " in line:
            left, _, source = line.rpartition("# ")
            sources[left.lstrip("# ").split(" = ")[0]] = source
    return tomllib.loads(done.stdout)["serve"], sources


def cache_of(*flags: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a server that was started so says of its cache."""
    with Server("toy:", *flags, env={"PAGEDKV_CONFIG": "none"} | dict(env or {})) as server:
        props = server.get("/props").ok()
        return {**props["kv_cache"], "n_ctx": props["default_generation_settings"]["n_ctx"]}


def test_the_default() -> None:
    cache = cache_of()
    assert {name: cache[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    "flags",
    [
        ["--paged-kv-quantization", "q8"],
        ["--paged-kv-quantization=q8"],
        ["--paged-kv-quant", "q8"],
        ["--kv-quant", "q8"],
        ["--kv-cache-dtype", "q8"],
        ["-ctk", "q8", "-ctv", "q8"],
        ["--cache-type-k", "q8", "--cache-type-v", "q8"],
    ],
)
def test_each_spelling_of_the_quantisation(flags: list[str]) -> None:
    assert cache_of(*flags)["format"] == "q8"


@pytest.mark.parametrize("word", ["q8", "q6", "q4", "off", "f32", "bf16"])
def test_each_mode(word: str) -> None:
    assert cache_of("--paged-kv-quantization", word)["format"] == ("f16" if word == "off" else word)


@pytest.mark.parametrize("flag", ["--context-window", "-c", "--ctx-size", "--max-model-len"])
def test_each_spelling_of_the_context(flag: str) -> None:
    assert cache_of(flag, "512")["n_ctx"] == 512
    assert settings(flag, "512")[0]["ctx-size"] == 512


@pytest.mark.parametrize(
    ("variable", "value", "name", "want"),
    [
        ("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q8", "format", "q8"),
        ("MTPLX_PAGED_KV_QUANT", "q4", "format", "q4"),
        ("MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE", "8", "page_size", 8),
        ("MTPLX_DYNAMIC_PAGED_KV", "0", "growth", False),
        ("MTPLX_DYNAMIC_PAGED_KV", "1", "growth", True),
        ("MTPLX_CONTEXT_WINDOW_TOKENS", "512", "n_ctx", 512),
        ("PAGEDKV_KV_CACHE_DTYPE", "q8", "format", "q8"),
        ("PAGEDKV_CTX_SIZE", "512", "n_ctx", 512),
        ("PAGEDKV_BLOCK_SIZE", "32", "page_size", 32),
        ("PAGEDKV_DYNAMIC", "false", "growth", False),
    ],
)
def test_each_variable(variable: str, value: str, name: str, want: Any) -> None:
    assert cache_of(env={variable: value})[name] == want


def test_the_seeds_number_of_pages() -> None:
    variables = {"MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS": "32", "MTPLX_DYNAMIC_PAGED_KV": "0"}
    assert cache_of(env=variables)["capacity_tokens"] == 32 * 16
    assert cache_of("--num-blocks", "48", env=variables)["capacity_tokens"] == 48 * 16


def test_a_flag_wins_over_variables_and_ours_over_the_seeds() -> None:
    seed = {"MTPLX_VLLM_METAL_PAGED_KV_QUANT": "q4", "MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE": "4"}
    ours = {"PAGEDKV_KV_CACHE_DTYPE": "q8", "PAGEDKV_BLOCK_SIZE": "8"}
    assert cache_of(env=seed)["format"] == "q4"
    both = cache_of(env=seed | ours)
    assert (both["format"], both["page_size"]) == ("q8", 8)
    all_three = cache_of("--paged-kv-quantization", "q6", "--block-size", "32", env=seed | ours)
    assert (all_three["format"], all_three["page_size"]) == ("q6", 32)


def test_flag_then_variable_then_file(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        'paged-kv-quantization = "q4"\n[serve]\nblock-size = 4\nctx-size = 256\nmax-num-seqs = 3\ndynamic = false\n'
    )
    file = {"PAGEDKV_CONFIG": str(config)}
    values, sources = settings(env=file)
    assert (values["kv-cache-dtype"], values["block-size"], values["ctx-size"]) == ("q4", 4, 256)
    assert (values["max-num-seqs"], values["dynamic"]) == (3, False)
    assert sources["block-size"] == f"{config}:3" and sources["kv-cache-dtype"] == f"{config}:1"
    assert sources["host"] == "default"

    values, sources = settings(env=file | {"PAGEDKV_BLOCK_SIZE": "8"})
    assert (values["block-size"], sources["block-size"]) == (8, "PAGEDKV_BLOCK_SIZE")
    values, sources = settings("--block-size", "32", env=file | {"PAGEDKV_BLOCK_SIZE": "8"})
    assert (values["block-size"], sources["block-size"]) == (32, "flag")

    with Server("toy:", env=file | {"PAGEDKV_BLOCK_SIZE": "8"}) as server:
        props = server.get("/props").ok()
        assert (props["kv_cache"]["format"], props["kv_cache"]["page_size"]) == ("q4", 8)
        assert (props["default_generation_settings"]["n_ctx"], props["total_slots"]) == (256, 3)
        assert props["kv_cache"]["growth"] is False


def test_llama_cpps_flag_for_metrics_is_taken() -> None:
    settings("--metrics")


def test_what_is_printed_can_be_read_again(tmp_path: Path) -> None:
    flags = [
        "--paged-kv-quantization",
        "k=f16,v=q8",
        "--served-model-name",
        "a",
        "--api-key",
        "x",
        "-np",
        "7",
    ]
    first, _ = settings(*flags)
    again = tmp_path / "again.toml"
    done = print_config(*flags)
    assert done.returncode == 0, done.stderr
    again.write_text(done.stdout)
    second, sources = settings(env={"PAGEDKV_CONFIG": str(again)})
    assert second == first
    assert sources["parallel" if "parallel" in sources else "max-num-seqs"].startswith(str(again))


@pytest.mark.parametrize(
    ("flags", "env", "named"),
    [
        (["--paged-kv-quantization", "q5"], {}, "q5"),
        (["--context-window", "0"], {}, "0"),
        (["--context-window", "1e30"], {}, "1e30"),
        (["--block-size", "0"], {}, "0"),
        (["--metrics-compat", "other"], {}, "other"),
        ([], {"MTPLX_VLLM_METAL_PAGED_KV_QUANT": "q5"}, "q5"),
        ([], {"PAGEDKV_BLOCK_SIZE": "x"}, "PAGEDKV_BLOCK_SIZE"),
    ],
)
def test_bad_values_are_named(flags: list[str], env: dict[str, str], named: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PAGEDKV_", "MTPLX_"))}
    done = subprocess.run(
        [BINARY, "serve", "-m", "toy:", "--port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment | {"PAGEDKV_CONFIG": "none"} | env,
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
