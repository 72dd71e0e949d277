"""VllmMetalPagedKVCache and what goes with it, by MTPLX's names."""

from __future__ import annotations

from pagedkv import _pagedkv
from pagedkv.mtplx._cache import VllmMetalPagedKVCache
from pagedkv.mtplx._install import (
    configure_mtp_attention_kv_cache,
    configure_tail_owned_attention_kv_cache,
    install_vllm_metal_paged_attention_kv_cache,
    tail_owned_attention_kv_stats,
)
from pagedkv.mtplx._sizing import (
    _dynamic_paged_growth_blocks,
    _dynamic_paged_num_blocks,
    kv_quant_decode_route,
    kv_quant_kernel_q_len,
    kv_quant_working_copy_peak_rows,
    paged_grown_blocks,
    paged_lease_capacity_after,
)
from pagedkv.mtplx._snapshot import CacheSnapshot, restore_cache, snapshot_cache

__all__ = [
    "CacheSnapshot",
    "VllmMetalPagedKVCache",
    "_dynamic_paged_growth_blocks",
    "_dynamic_paged_num_blocks",
    "_warn_vllm_metal_ops_unavailable",
    "configure_mtp_attention_kv_cache",
    "configure_tail_owned_attention_kv_cache",
    "install_vllm_metal_paged_attention_kv_cache",
    "kv_quant_decode_route",
    "kv_quant_kernel_q_len",
    "kv_quant_working_copy_peak_rows",
    "paged_grown_blocks",
    "paged_lease_capacity_after",
    "restore_cache",
    "snapshot_cache",
    "tail_owned_attention_kv_stats",
]


def _warn_vllm_metal_ops_unavailable(exc: BaseException, *, context: str) -> None:
    """Warns on stderr, once in the process, that slower kernels serve: our C++ reference where no SIMD set fits the
    CPU (the library's own warning is this one), and the plain pages where TurboQuant was asked for."""
    _pagedkv.warn_once(
        "kernels.reference",
        f"fast kernels are unavailable ({context}): {exc}; falling back to {_pagedkv.kernel_set()} kernels",
    )
