"""Our cache in place of the entries of a model's cache list."""

from __future__ import annotations

import os
from typing import Any

from pagedkv.mtplx._cache import (
    FROM_ENVIRONMENT,
    VllmMetalPagedKVCache,
    _FromEnvironment,
    _unless_off,
)
from pagedkv.mtplx._environment import env_strict_int, env_truthy
from pagedkv.mtplx._sizing import _dynamic_paged_num_blocks
from pagedkv.mtplx.kv_quant import PagedKVQuantConfig, config_from_env

Counts = dict[str, "int | str"]


def _is_replaceable(entry: Any) -> bool:
    """A plain cache of keys and values: it can be trimmed, and is no ring (rotating caches have _idx)."""
    trimmable = getattr(entry, "is_trimmable", None)
    return (
        callable(trimmable)
        and bool(trimmable())
        and getattr(entry, "_idx", None) is None
        and hasattr(entry, "keys")
        and hasattr(entry, "values")
    )


def install_vllm_metal_paged_attention_kv_cache(
    cache: list[Any],
    *,
    block_size: int = 16,
    num_blocks: int = 1024,
    turboquant_config: Any | None = None,
    kv_quant_config: PagedKVQuantConfig | _FromEnvironment | None = FROM_ENVIRONMENT,
) -> Counts:
    """Replaces the plain entries of the list in place by paged ones that hold the same tokens.

    None, recurrent and rotating entries stay. One of ours without pages takes the geometry; one with pages keeps its
    block size, grows to block_size * num_blocks tokens where growth is on, and stores its tokens anew where the
    quantisation differs. kv_quant_config left out: from the environment. Returns counts: entries, skipped and what was
    asked for; external_ops_required is 0, since the kernels are part of the package.
    """
    if isinstance(kv_quant_config, _FromEnvironment):
        kv_quant_config = config_from_env()
    if turboquant_config is not None:
        from pagedkv.mtplx.cache_state import _warn_vllm_metal_ops_unavailable

        _warn_vllm_metal_ops_unavailable(
            RuntimeError("TurboQuant needs the Metal kernels"), context="TurboQuant install"
        )
    kv_quant_config = _unless_off(kv_quant_config)
    mode = "" if kv_quant_config is None else kv_quant_config.normalized_mode
    entries = skipped = 0
    for index, entry in enumerate(cache or []):
        if isinstance(entry, VllmMetalPagedKVCache):
            _configure(entry, block_size, num_blocks, kv_quant_config)
        elif entry is not None and _is_replaceable(entry):
            cache[index] = VllmMetalPagedKVCache.from_cache(
                entry,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_quant_config=kv_quant_config,
            )
        else:
            skipped += 1
            continue
        entries += 1
    counts: Counts = {
        "enabled": 1,
        "mode": f"vllm_metal_paged_kv_{mode}" if mode else "vllm_metal_paged",
        "entries": entries,
        "skipped": skipped,
        "block_size": int(block_size),
        "num_blocks": int(num_blocks),
        "turboquant": 0,
        "kv_quant": int(bool(mode)),
        "attention_impl": _attention_impl() or "vllm_metal",
        "external_ops_required": 0,
    }
    if mode:
        counts["kv_quant_mode"] = mode
    if turboquant_config is not None:
        counts["turboquant_disabled_reason"] = "vllm_metal_ops_unavailable"
    return counts


def _attention_impl() -> str:
    return os.environ.get("MTPLX_VLLM_METAL_PAGED_ATTN_IMPL", "").strip().lower().replace("-", "_")


def _configure(
    entry: VllmMetalPagedKVCache,
    block_size: int,
    num_blocks: int,
    kv_quant_config: PagedKVQuantConfig | None,
) -> None:
    entry.kv_quant_config = kv_quant_config
    blocks = entry.allocated_blocks
    if blocks is None:
        entry.block_size, entry.num_blocks = int(block_size), int(num_blocks)
        return
    entry.num_blocks = blocks
    if int(block_size) * int(num_blocks) > entry.capacity:
        entry._grow_to_capacity(int(block_size) * int(num_blocks))


def _turboquant_from_environment() -> str | None:
    return "asked for" if env_truthy("MTPLX_VLLM_METAL_PAGED_TURBOQUANT") else None


def _install_from_environment(cache: list[Any], middle: str = "") -> Counts:
    """Sizes from MTPLX_VLLM_METAL_PAGED_{middle}BLOCK_SIZE and _NUM_BLOCKS, those without `middle` where unset."""

    def size(name: str, default: int) -> int:
        own = f"MTPLX_VLLM_METAL_PAGED_{middle}{name}"
        if not os.environ.get(own, "").strip():
            own = f"MTPLX_VLLM_METAL_PAGED_{name}"
        return env_strict_int(own, default)

    block_size = size("BLOCK_SIZE", 16)
    return install_vllm_metal_paged_attention_kv_cache(
        cache,
        block_size=block_size,
        num_blocks=_dynamic_paged_num_blocks(
            block_size=block_size, configured_blocks=size("NUM_BLOCKS", 1024)
        ),
        turboquant_config=None if middle else _turboquant_from_environment(),
        kv_quant_config=None if middle else FROM_ENVIRONMENT,
    )


def configure_tail_owned_attention_kv_cache(cache: list[Any]) -> Counts:
    """Installs our cache as the environment says: MTPLX_VLLM_METAL_PAGED_ATTN switches it on, …_BLOCK_SIZE (16),
    …_NUM_BLOCKS (1024) and the growth variables size it, the quantisation variables choose its format. Counts as
    install_vllm_metal_paged_attention_kv_cache(), or {"enabled": 0, …} where it is off."""
    if not env_truthy("MTPLX_VLLM_METAL_PAGED_ATTN"):
        return {"enabled": 0, "entries": 0, "skipped": 0, "mode": "disabled"}
    return _install_from_environment(cache)


def configure_mtp_attention_kv_cache(cache: list[Any]) -> Counts:
    """The same for a draft model's list: MTPLX_VLLM_METAL_PAGED_MTP_ATTN switches it on, …_MTP_BLOCK_SIZE and
    …_MTP_NUM_BLOCKS size it. Not quantised."""
    if not env_truthy("MTPLX_VLLM_METAL_PAGED_MTP_ATTN"):
        return {"enabled": 0, "entries": 0, "skipped": 0, "mode": "disabled"}
    counts = _install_from_environment(cache, "MTP_")
    counts["mode"] = "vllm_metal_paged_mtp"
    return counts


# Of paged_stats(): what tail_owned_attention_kv_stats() adds up, and counts by a key.
_SUMMED = (
    "partitioned_attention_calls",
    "turboquant_attention_calls",
    "kv_quant_attention_calls",
    "gqa_sdpa_calls",
    "active_array_calls",
    "active_array_time_s",
    "kv_quant_dequant_calls",
    "kv_quant_dequant_time_s",
    "kv_quant_dequant_tokens",
    "kv_quant_dequant_memo_hits",
    "kv_quant_dequant_memo_rebuilds",
    "kv_quant_kernel_calls",
    "dense_fallback_calls",
    "prefill_dense_fallback_calls",
    "decode_dense_fallback_calls",
    "ar_dense_fallback_calls",
    "postcommit_dense_fallback_calls",
    "large_q_split_sdpa_fallback_calls",
    "prefill_large_q_split_sdpa_fallback_calls",
    "decode_large_q_split_sdpa_fallback_calls",
    "partitioned_paged_calls",
    "prefill_partitioned_paged_calls",
    "decode_partitioned_paged_calls",
    "grow_events",
)
_SUMMED_BY_KEY = (
    "large_q_split_sdpa_fallback_calls_by_phase",
    "partitioned_paged_calls_by_phase",
    "gqa_sdpa_calls_by_phase",
    "gqa_sdpa_calls_by_route",
    "gqa_sdpa_route_misses_by_phase_reason",
    "gqa_sdpa_route_misses_by_q_len",
    "paged_attention_bailouts_by_phase_reason",
)


def tail_owned_attention_kv_stats(cache: list[Any] | None) -> dict[str, Any]:
    """The statistics of all our entries together: counts and times are sums, `arrays` the attention calls, `time_s`
    writing and attention; mode and sizes are the last entry's."""
    total: dict[str, Any] = {
        "enabled": 0,
        "entries": 0,
        "updates": 0,
        "arrays": 0,
        "bytes": 0,
        "time_s": 0.0,
        "mode": "disabled",
    }
    for entry in cache or []:
        if not isinstance(entry, VllmMetalPagedKVCache):
            continue
        stats = entry.paged_stats()
        total["enabled"] = 1
        total["entries"] += 1
        total["updates"] += stats["updates"]
        total["arrays"] += stats["paged_attention_calls"]
        total["bytes"] += stats["bytes"]
        total["time_s"] += stats["cache_write_time_s"] + stats["attention_time_s"]
        for key in ("mode", "block_size", "num_blocks", "capacity"):
            total[key] = stats[key]
        for key in _SUMMED:
            total[key] = total.get(key, 0) + stats[key]
        for key in _SUMMED_BY_KEY:
            counts = total.setdefault(key, {})
            for name, count in stats[key].items():
                counts[name] = counts.get(name, 0) + count
        for key in ("turboquant", "kv_quant"):
            total[key] = total.get(key, 0) or stats[key]
        if stats["kv_quant_mode"]:
            total["kv_quant_mode"] = stats["kv_quant_mode"]
    return total
