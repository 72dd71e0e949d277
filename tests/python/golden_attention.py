"""Replays tests/data/golden/attention.txt: within the seed's own error against double precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from golden_data import Line, read_lines
from golden_package import (
    Package,
    environment,
    error_type,
    is_array,
    ones_mask,
    set_variable,
)
from golden_verdicts import Difference, Verdicts


def visible(line: Line, semantics: str) -> tuple[np.ndarray, np.ndarray | float]:
    """Which keys a query sees [rows, context], and what is added to its scores."""
    context, rows, window = line["context"], line["q_len"], line["sliding_window"]
    key = np.arange(context)
    position = max(0, context - rows) + np.arange(rows)[:, None]
    see = np.ones((rows, context), bool)
    if semantics == "causal":
        see &= key <= position
    if window > 0:
        see &= key >= context - window
    bias: np.ndarray | float = 0.0
    if is_array(line["mask"]):
        mask = line["mask"]
        if mask.dtype == "bool":
            see &= np.broadcast_to(mask.stored[0, 0], see.shape)
        else:
            bias = mask.float32()[0, 0].astype(np.float64)
    return see, bias


def oracle(line: Line, keys: np.ndarray, values: np.ndarray, semantics: str) -> np.ndarray:
    """Double precision over what the cache holds; a row without a key gives zeros."""
    see, bias = visible(line, semantics)
    queries = line["q"].float32().astype(np.float64)[0]
    group = queries.shape[0] // keys.shape[1]
    k = keys[0].astype(np.float64).repeat(group, axis=0)
    v = values[0].astype(np.float64).repeat(group, axis=0)
    scores = np.where(see, queries @ k.transpose(0, 2, 1) * line["scale"] + bias, -np.inf)
    most = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(most), 0.0, most))
    total = p.sum(axis=-1, keepdims=True)
    return ((p / np.where(total == 0, 1.0, total)) @ v)[None]


def tolerance(line: Line) -> float:
    """Four times the seed's own error, at least what the dtype takes."""
    own = [
        v
        for k, v in line.fields.items()
        if k
        in ("max_abs_diff_from_float64", "max_abs_diff_from_float64_without_cast_to_source_dtype")
    ]
    floor = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[line["dtype"]]
    return max(4 * max(own, default=0.0), floor)


def written(package: Package, line: Line) -> Any:
    """The case's cache: keys and values written in its chunks."""
    cache = package.cls(
        block_size=line["block_size"],
        num_blocks=line["stats.num_blocks"],
        kv_quant_config=package.config(line["quant"]),
    )
    begin = 0
    for count in line["chunks"]:
        k, v = (line[name].tokens(begin, begin + count) for name in ("k", "v"))
        cache.update_without_fetch(package.array(k), package.array(v))
        begin += count
    return cache


def attention_case(package: Package, line: Line, verdicts: Verdicts) -> float:
    """Compares one case; returns the largest difference as a share of its tolerance."""
    for name, value in line.under("env").items():
        set_variable(name, value)

    def differ(name: str, seed: Any, ours: Any) -> None:
        where = ("attention", line["id"], line.place, "paged_attention")
        verdicts.differs(Difference(*where, name, seed, ours, line["quant"], line))

    cache = written(package, line)
    mask, declined = line["mask"], line["out"] is None
    semantics = line.get("semantics", "array_mask" if is_array(mask) else "causal")
    if is_array(mask):
        given = package.array(mask)
    elif semantics == "full" and mask is None and line["q_len"] > 1 and not package.is_seed:
        given = ones_mask(package, line["q_len"], line["context"], line["sliding_window"])
        verdicts.met("q8 without a mask")
    else:
        given = mask
    how = {
        "scale": line["scale"],
        "sliding_window": line["sliding_window"],
        "impl_override": line["impl_override"],
    }
    verdicts.comparisons += 1
    try:
        out = cache.paged_attention(package.array(line["q"]), mask=given, **how)
    except Exception as error:
        differ(
            "out", None if declined else "an array", f"{error_type(error, 'ValueError')}: {error}"
        )
        return 0.0
    if out is None:
        if not declined:
            differ("out", "an array", None)
        return 0.0
    ours = package.golden(out)
    if declined:
        differ("out", None, "an array")
        keys, values = (package.golden(x).float32() for x in cache.state)
        expected = oracle(line, keys, values, semantics)
    else:
        expected = line["out"].float32().astype(np.float64)
    if ours.shape != expected.shape or ours.dtype != line["dtype"]:
        differ("shape", [line["dtype"], expected.shape], [ours.dtype, ours.shape])
        return 0.0
    apart = np.abs(ours.float32() - expected)
    limit = tolerance(line)
    blind = ~visible(line, semantics)[0].any(axis=-1)
    if blind.any() and not apart[0, :, blind].max() <= limit:
        zero = not ours.float32()[0, :, blind].any()
        seed = line["rows_without_a_key_give"]
        differ("rows_without_a_key_give", seed, "zero" if zero else "something else")
        apart[0, :, blind] = 0
    worst = float(apart.max(initial=0.0))
    if not worst <= limit:
        differ("out", f"within {limit}", f"off by {worst}")
    return worst / limit


def replay_attention(package: Package, verdicts: Verdicts) -> str:
    """Compares all cases; returns a line with their number."""
    lines = read_lines("attention")
    worst = 0.0
    for line in lines:
        with environment():
            worst = max(worst, attention_case(package, line, verdicts))
    return f"{len(lines)} cases of attention; largest difference {worst:.3g} of its tolerance"
