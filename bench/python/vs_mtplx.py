#!/usr/bin/env python3
"""Our VllmMetalPagedKVCache beside mtplx's own, on mlx[cpu] in one process: microseconds for a token (write, attend, and
have the values) at 8,192 tokens, growth, and bytes. Alternating pairs, medians; one JSON object a line.

    PYTHONPATH=build/ci/python PYTHON bench/python/vs_mtplx.py [PAIRS = 9]

PYTHON has mtplx 2.12.2 with mlx 0.32.2 (tests/python/run_mtplx_tests.py makes such an environment). Both use as many
threads as they choose.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ["MTPLX_DYNAMIC_PAGED_KV"] = "1"

import mlx.core as mx
import mtplx.cache_state
import mtplx.kv_quant

import pagedkv
import pagedkv.mtplx.cache_state
import pagedkv.mtplx.kv_quant

DEPTH, STEPS, SCALE = 8192, 16, 128**-0.5
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def rows(heads: int, tokens: int) -> Any:
    array = mx.random.normal((1, heads, tokens, HEAD_DIM)).astype(mx.float16)
    mx.eval(array)
    return array


class Measured:
    def __init__(self, package: Any, quant: Any, mode: str) -> None:
        config = None if mode == "off" else quant.PagedKVQuantConfig(mode)
        self.cache = package.VllmMetalPagedKVCache(
            block_size=16, num_blocks=DEPTH // 16 + 16, kv_quant_config=config
        )
        self.cache.update_without_fetch(PROMPT, PROMPT)
        self.decode()  # what is made once is there

    def decode(self) -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            self.cache.update_without_fetch(TOKEN, TOKEN)
            mx.eval(self.cache.paged_attention(QUERY, scale=SCALE, mask="causal"))
        seconds = (time.perf_counter() - start) / STEPS
        self.cache.trim(STEPS)
        return seconds

    def grow(self) -> float:
        start = time.perf_counter()
        assert self.cache._grow_to_capacity(self.cache.capacity + 1)
        return time.perf_counter() - start


PROMPT, TOKEN, QUERY = rows(KV_HEADS, DEPTH), rows(KV_HEADS, 1), rows(Q_HEADS, 1)


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    for mode in ("off", "q8", "q4"):
        ours = Measured(pagedkv.mtplx.cache_state, pagedkv.mtplx.kv_quant, mode)
        theirs = Measured(mtplx.cache_state, mtplx.kv_quant, mode)
        decode = [
            (ours.decode(), theirs.decode())
            if i % 2 == 0
            else (theirs.decode(), ours.decode())[::-1]
            for i in range(pairs)
        ]
        size = ours.cache.nbytes, theirs.cache.nbytes
        growth = ours.grow(), theirs.grow()
        print(
            json.dumps(
                {
                    "case": f"{Q_HEADS}/{KV_HEADS} x {HEAD_DIM}, {mode}, {DEPTH} tokens, one layer",
                    "kernel_set": pagedkv.kernel_set(),
                    "threads": pagedkv.num_threads(),
                    "pairs": pairs,
                    "ours_us": round(statistics.median(o for o, _ in decode) * 1e6, 1),
                    "mtplx_us": round(statistics.median(t for _, t in decode) * 1e6, 1),
                    "mtplx_over_ours": round(statistics.median(t / o for o, t in decode), 2),
                    "ours_bytes": size[0],
                    "mtplx_bytes": size[1],
                    "ours_growth_ms": round(growth[0] * 1e3, 3),
                    "mtplx_growth_ms": round(growth[1] * 1e3, 3),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
