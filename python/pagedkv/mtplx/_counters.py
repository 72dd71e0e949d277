"""What VllmMetalPagedKVCache counts, by MTPLX's names."""

from __future__ import annotations

from typing import Any

from pagedkv.mtplx.attention_context import current_attention_phase


class Counters:
    """Of one cache. Those of routes that we have not stay 0."""

    def __init__(self) -> None:
        self.update_calls = 0
        self.paged_attention_calls = 0
        self.partitioned_attention_calls = 0
        self.turboquant_attention_calls = 0
        self.kv_quant_attention_calls = 0
        self.kv_quant_kernel_calls = 0
        self.gqa_sdpa_calls = 0
        self.gqa_sdpa_calls_by_route: dict[str, int] = {}
        self.gqa_sdpa_calls_by_phase: dict[str, int] = {}
        self.gqa_sdpa_route_misses_by_phase_reason: dict[str, int] = {}
        self.gqa_sdpa_route_misses_by_q_len: dict[str, int] = {}
        self.gqa_sdpa_last_route_miss: dict[str, int | str] = {}
        self.active_array_calls = 0
        self.active_array_time_s = 0.0
        self.kv_quant_dequant_calls = 0
        self.kv_quant_dequant_time_s = 0.0
        self.kv_quant_dequant_tokens = 0
        self.kv_quant_dequant_memo_hits = 0
        self.kv_quant_dequant_memo_rebuilds = 0
        self.kv_quant_bank_rebuilds = 0
        self.kv_quant_bank_extended_tokens = 0
        self.dense_fallback_calls = 0
        self.dense_fallback_calls_by_phase: dict[str, int] = {}
        self.paged_attention_bailouts_by_phase_reason: dict[str, int] = {}
        self.paged_attention_last_bailout: dict[str, int | str] = {}
        self.paged_attention_large_q_path = ""
        self.large_q_split_sdpa_fallback_calls = 0
        self.large_q_split_sdpa_fallback_calls_by_phase: dict[str, int] = {}
        self.partitioned_paged_calls = 0
        self.partitioned_paged_calls_by_phase: dict[str, int] = {}
        self.grow_events = 0
        self.cache_write_time_s = 0.0
        self.attention_time_s = 0.0
        self._kv_quant_route: str | None = None  # of this request: set by its first attention
        self._kv_quant_route_offset = -1

    def record_dense_fallback(self) -> None:
        """Counts a call that the caller served from state."""
        phase = current_attention_phase()
        self.dense_fallback_calls += 1
        self.dense_fallback_calls_by_phase[phase] = (
            self.dense_fallback_calls_by_phase.get(phase, 0) + 1
        )

    def counts(self) -> dict[str, Any]:
        """The counters by their keys in paged_stats()."""
        dense, split = (
            self.dense_fallback_calls_by_phase,
            self.large_q_split_sdpa_fallback_calls_by_phase,
        )
        partitioned = self.partitioned_paged_calls_by_phase
        return {
            "updates": self.update_calls,
            "paged_attention_calls": self.paged_attention_calls,
            "partitioned_attention_calls": self.partitioned_attention_calls,
            "turboquant_attention_calls": self.turboquant_attention_calls,
            "kv_quant_attention_calls": self.kv_quant_attention_calls,
            "gqa_sdpa_calls": self.gqa_sdpa_calls,
            "gqa_sdpa_calls_by_route": dict(self.gqa_sdpa_calls_by_route),
            "gqa_sdpa_calls_by_phase": dict(self.gqa_sdpa_calls_by_phase),
            "gqa_sdpa_route_misses_by_phase_reason": dict(
                self.gqa_sdpa_route_misses_by_phase_reason
            ),
            "gqa_sdpa_route_misses_by_q_len": dict(self.gqa_sdpa_route_misses_by_q_len),
            "gqa_sdpa_last_route_miss": dict(self.gqa_sdpa_last_route_miss),
            "active_array_calls": self.active_array_calls,
            "active_array_time_s": self.active_array_time_s,
            "kv_quant_dequant_calls": self.kv_quant_dequant_calls,
            "kv_quant_dequant_time_s": self.kv_quant_dequant_time_s,
            "kv_quant_dequant_tokens": self.kv_quant_dequant_tokens,
            "kv_quant_dequant_memo_hits": self.kv_quant_dequant_memo_hits,
            "kv_quant_dequant_memo_rebuilds": self.kv_quant_dequant_memo_rebuilds,
            "kv_quant_kernel_calls": self.kv_quant_kernel_calls,
            "kv_quant_bank_rebuilds": self.kv_quant_bank_rebuilds,
            "kv_quant_bank_extended_tokens": self.kv_quant_bank_extended_tokens,
            "kv_quant_route": self._kv_quant_route or "",
            "kv_quant_route_offset": self._kv_quant_route_offset,
            "dense_fallback_calls": self.dense_fallback_calls,
            "prefill_dense_fallback_calls": dense.get("prefill", 0),
            "decode_dense_fallback_calls": dense.get("decode_verify", 0),
            "ar_dense_fallback_calls": dense.get("ar_decode", 0),
            "postcommit_dense_fallback_calls": dense.get("postcommit", 0),
            "paged_attention_bailouts_by_phase_reason": dict(
                self.paged_attention_bailouts_by_phase_reason
            ),
            "paged_attention_large_q_path": self.paged_attention_large_q_path,
            "large_q_split_sdpa_fallback_calls": self.large_q_split_sdpa_fallback_calls,
            "large_q_split_sdpa_fallback_calls_by_phase": dict(split),
            "prefill_large_q_split_sdpa_fallback_calls": split.get("prefill", 0),
            "decode_large_q_split_sdpa_fallback_calls": split.get("decode_verify", 0),
            "partitioned_paged_calls": self.partitioned_paged_calls,
            "partitioned_paged_calls_by_phase": dict(partitioned),
            "prefill_partitioned_paged_calls": partitioned.get("prefill", 0),
            "decode_partitioned_paged_calls": partitioned.get("decode_verify", 0),
            "grow_events": self.grow_events,
            "turboquant": 0,
            "turboquant_k_quant": "",
            "turboquant_v_quant": "",
            "cache_write_time_s": self.cache_write_time_s,
            "attention_time_s": self.attention_time_s,
        }
