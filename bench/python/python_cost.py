#!/usr/bin/env python3
"""What Python costs: update + attention of one token at 8,192 tokens (9/3 heads x 64, float16, one thread) through the
Python classes with numpy arrays, over the same calls in C++ (build/release/bench/cache/cache_bench). Alternating pairs,
medians; JSON on stdout.

    PYTHONPATH=build/ci/python bench/python/python_cost.py [CACHE_BENCH] [PAIRS = 9]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

os.environ["MTPLX_DYNAMIC_PAGED_KV"] = "1"
for name in ("mlx", "mlx.core"):
    sys.modules[name] = None  # type: ignore[assignment]

import numpy as np  # noqa: E402

import pagedkv  # noqa: E402
from pagedkv.mtplx.cache_state import VllmMetalPagedKVCache  # noqa: E402

DEPTH, STEPS = 8192, 64


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32).astype(np.float16)


def ours() -> float:
    cache = pagedkv.PagedKVCache(num_blocks=(DEPTH + STEPS + 64) // 16)
    cache.update(rows(3, DEPTH, 64), rows(3, DEPTH, 64))
    token, query = rows(3, 1, 64), rows(9, 1, 64)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(STEPS):
            cache.update(token, token)
            cache.attend(query)
        times.append((time.perf_counter() - start) / STEPS)
        cache.trim(STEPS)
    return statistics.median(times)


def mtplx_class() -> float:
    cache = VllmMetalPagedKVCache(num_blocks=(DEPTH + STEPS + 64) // 16, kv_quant_config=None)
    cache.update_without_fetch(rows(1, 3, DEPTH, 64), rows(1, 3, DEPTH, 64))
    token, query = rows(1, 3, 1, 64), rows(1, 9, 1, 64)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(STEPS):
            cache.update_without_fetch(token, token)
            cache.paged_attention(query, scale=0.125)
        times.append((time.perf_counter() - start) / STEPS)
        cache.trim(STEPS)
    return statistics.median(times)


def cpp(program: str) -> float:
    done = subprocess.run([program, "5", "decode"], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["cache_us"]) * 1e-6


def main() -> None:
    program = sys.argv[1] if len(sys.argv) > 1 else "build/release/bench/cache/cache_bench"
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    pagedkv.set_num_threads(1)
    measured = [(cpp(program), ours(), mtplx_class()) for _ in range(pairs)]
    median = [statistics.median(column) * 1e6 for column in zip(*measured)]
    print(
        json.dumps(
            {
                "case": "9/3 x 64 f16, one layer at 8192 tokens, one thread",
                "kernel_set": pagedkv.kernel_set(),
                "pairs": pairs,
                "cpp_us": round(median[0], 1),
                "PagedKVCache_us": round(median[1], 1),
                "VllmMetalPagedKVCache_us": round(median[2], 1),
                "PagedKVCache_ratio": round(statistics.median(p / c for c, p, _ in measured), 3),
                "VllmMetalPagedKVCache_ratio": round(
                    statistics.median(m / c for c, _, m in measured), 3
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
