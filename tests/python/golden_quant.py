"""Replays tests/data/golden/quant.bin: codes, scales and values bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from golden_data import (
    STORED,
    GoldenArray,
    QuantCase,
    fnv1a,
    read_quant,
    stored_from_float32,
)
from golden_package import Package, environment
from golden_verdicts import NOTHING, Difference, Verdicts


def replay_quant(package: Package, verdicts: Verdicts) -> str:
    """Compares all cases; returns a line with their number."""
    counts: Counter[str] = Counter()
    with environment():
        for case in read_quant():
            counts[case.operation] += 1
            for name, seed, ours in quant_fields(package, case):
                verdicts.comparisons += 1
                if seed != ours:
                    verdicts.differs(
                        Difference(
                            "quant", case.name, "quant.bin", case.operation, name, seed, ours
                        )
                    )
    parts = ", ".join(f"{n} {operation}" for operation, n in counts.items())
    return f"{sum(counts.values())} cases of quant: {parts}; {verdicts.comparisons} comparisons"


def quant_fields(package: Package, case: QuantCase) -> Iterator[tuple[str, Any, Any]]:
    """(field, the seed's, ours) of one case."""
    quantise = package.kv_quant.quantize_symmetric
    dequantise = package.kv_quant.dequantize_symmetric

    def float32(values: np.ndarray) -> Any:
        return package.array(GoldenArray("float32", np.asarray(values, np.float32)))

    if case.operation == "error":
        try:
            if case.name == "error/bits6_quantize":
                quantise(float32(np.ones((2, 8))), bits=6)
            elif case.name == "error/bits6_dequantize":
                q = package.array(GoldenArray("uint8", np.zeros((2, 4), np.uint8)))
                dequantise(q, float32(np.ones((2, 1))), bits=6, head_dim=8)
            elif case.name == "error/odd_head_dim_q4":
                quantise(float32(np.ones((2, 5))), bits=4)
            else:
                raise LookupError(case.name)
            yield "error", "ValueError", NOTHING
        except ValueError:
            yield "error", "ValueError", "ValueError"
        return
    assert case.codes is not None and case.scales is not None
    dtype = "int8" if case.bits == 8 else "uint8"
    codes = GoldenArray(dtype, case.codes.view(STORED[dtype]))
    q, scale = package.array(codes), float32(case.scales)
    if case.x is not None:
        q, scale = quantise(package.array(case.x), bits=case.bits)
        yield "codes", codes.hash(), package.word(q)
        yield "scales", GoldenArray("float32", case.scales).hash(), package.word(scale)
    x = package.golden(dequantise(q, scale, bits=case.bits, head_dim=case.head_dim))
    yield "dequantised dtype", "float32", x.dtype
    yield "dequantised", case.dequantised, fnv1a(x.stored.tobytes())
    if case.x is not None:
        with np.errstate(over="ignore"):
            bits = stored_from_float32(x.stored, case.x.dtype)
        yield "in dtype", case.dequantised_in_dtype, fnv1a(bits.tobytes())
