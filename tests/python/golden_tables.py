"""Replays tests/data/golden/tables.txt: parsing and sizing functions, equal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from golden_data import GoldenArray, Line, read_lines
from golden_package import Package, environment, error_type, flat, set_variable
from golden_verdicts import NOTHING, Difference, Verdicts


class Entry:
    """A cache of a model's list that is not a paged one, with what the installer looks at."""

    def __init__(self, package: Package, trimmable: bool = True, rotating: bool = False) -> None:
        rows = GoldenArray("float32", np.zeros((1, 2, 3, 64), np.float32))
        self.keys = self.values = package.array(rows)
        self.offset = 3
        self._trimmable = trimmable
        if rotating:
            self._idx = 0

    def is_trimmable(self) -> bool:
        return self._trimmable


def table_quant_config(p: Package, line: Line) -> Any:
    config = p.kv_quant.PagedKVQuantConfig(mode=line["in.mode"])
    return {"normalized_mode": config.normalized_mode, "bits": config.bits}


def table_config_from_env(p: Package, line: Line) -> Any:
    config = p.kv_quant.config_from_env()
    if config is None:
        return None
    return {"mode": config.mode, "normalized_mode": config.normalized_mode, "bits": config.bits}


def table_configure(p: Package, line: Line) -> Any:
    caches = [Entry(p), None, Entry(p, trimmable=False), Entry(p, rotating=True), p.cls()]
    return p.cache_state.configure_tail_owned_attention_kv_cache(caches)


def table_growth_flag(p: Package, line: Line) -> Any:
    return p.cache_state._dynamic_paged_growth_blocks(
        block_size=16, current_blocks=4, required_tokens=65
    )


def table_num_blocks(p: Package, line: Line) -> Any:
    tokens = re.search(r"request_tokens=(\d+)", line["table"])
    more = {"request_tokens": int(tokens[1])} if tokens else {}
    return p.cache_state._dynamic_paged_num_blocks(block_size=16, configured_blocks=1024, **more)


def table_reservation(p: Package, line: Line) -> Any:
    reserve = p.module("server.openai")._dynamic_paged_kv_reservation
    return reserve(prompt_tokens=1000, max_new_tokens=line["in.max_new_tokens"], mtp_depth=3)


def table_env_bool(p: Package, line: Line) -> Any:
    set_variable("X", line["in.X"])
    return p.module("runtime_options").env_bool("X", default=False)


def table_gqa_route(p: Package, line: Line) -> Any:
    decision = p.cache_state._paged_gqa_sdpa_route_decision_from_env(**line.under("in"))
    return {"route": decision.route, "reason": decision.reason}


def table_decode_route(p: Package, line: Line) -> Any:
    bits, offset = line.get("in.bits", 8), line.get("in.offset", 1024)
    shape = line.get("in.shape", (4, 2, 64, 64))
    shape = None if shape is None else tuple(shape)
    return p.cache_state.kv_quant_decode_route(bits, route_offset=offset, attention_shape=shape)


def table_normalize(p: Package, line: Line) -> Any:
    more = {"allow_none": True} if "allow_none" in line["table"] else {}
    return p.module("runtime_options").normalize_paged_kv_quantization(line["in.value"], **more)


def table_packed_quant(p: Package, line: Line) -> Any:
    names = ("query_heads", "kv_heads", "k_dim", "v_dim")
    return p.cls._packed_quant_safe_q_len_for(**dict(zip(names, line["in.shape"], strict=True)))


def table_grown_blocks(p: Package, line: Line) -> Any:
    if line["table"] == "paged_grown_blocks":
        args = [line[f"in.{n}"] for n in ("current_blocks", "required_tokens", "block_size")]
    else:
        args = [10, 161, 16]
    return p.cache_state.paged_grown_blocks(*args)


def table_lease(p: Package, line: Line) -> Any:
    given = line.under("in")
    return p.cache_state.paged_lease_capacity_after(given.pop("capacity"), 16, **given)


TABLES: dict[str, Callable[[Package, Line], Any]] = {
    "PagedKVQuantConfig": table_quant_config,
    "compression_ratio": lambda p, line: p.kv_quant.compression_ratio(**line.under("in")),
    "config_from_env": table_config_from_env,
    "configure_attention_kv_cache": table_configure,
    "dynamic_growth_flag": table_growth_flag,
    "dynamic_paged_kv_reservation": table_reservation,
    "dynamic_paged_num_blocks": table_num_blocks,
    "effective_sliding_window": lambda p, line: p.cls()._effective_sliding_window(9),
    "env_bool": table_env_bool,
    "gqa_route": table_gqa_route,
    "kv_quant_decode_route": table_decode_route,
    "kv_quant_kernel_q_len": lambda p, line: p.cache_state.kv_quant_kernel_q_len(
        line["in.bits"], tuple(line["in.shape"])
    ),
    "kv_quant_kernel_switch": lambda p, line: p.cls._kv_quant_kernel_enabled(),
    "kv_quant_q4_kernel_switch": lambda p, line: p.cls._kv_quant_q4_kernel_enabled(),
    "kv_quant_working_copy_peak_rows": lambda p, line: (
        p.cache_state.kv_quant_working_copy_peak_rows(**line.under("in"))
    ),
    "normalize_paged_kv_quantization": table_normalize,
    "packed_dim": lambda p, line: p.kv_quant.packed_dim(line["in.head_dim"], line["in.bits"]),
    "packed_quant_q_len": table_packed_quant,
    "paged_attention_flag": lambda p, line: p.cache_state.configure_tail_owned_attention_kv_cache(
        []
    )["enabled"],
    "paged_grown_blocks": table_grown_blocks,
    "paged_kv_quant_mode_from_env": lambda p, line: p.kv_quant.paged_kv_quant_mode_from_env(),
    "paged_kv_quantization_env": lambda p, line: p.module(
        "runtime_options"
    ).paged_kv_quantization_env(line["in.mode"]),
    "paged_lease_capacity_after": table_lease,
    "partition_threshold": lambda p, line: p.cls()._partition_threshold(),
    "partitioned_attention_flag": lambda p, line: p.cls()._partitioned_attention_enabled(),
    "safe_2pass_q_len": lambda p, line: p.cls._safe_2pass_paged_q_len(**line.under("in")),
    "stats_sliding_window": lambda p, line: p.cls().paged_stats()["sliding_window"],
}


def replay_tables(package: Package, verdicts: Verdicts, not_ours: dict[str, str]) -> str:
    """Compares all tables but those of functions that the package lacks, which `not_ours` must
    name; returns a line with the number of cases, and one for each table left out."""
    compared: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for line in read_lines("tables"):
        table = line["table"].split("(")[0]
        seed = {k: v for k, v in line.fields.items() if k == "out" or k.startswith("out.")}
        if "error.type" in line:
            seed["error"] = line["error.type"]
        try:
            ours = called(package, table, line)
        except (ImportError, AttributeError) as error:
            left_out[table] += 1
            if table not in not_ours:
                verdicts.failures.append(f"{line.place} {line['id']}: {error!r}")
            continue
        compared[table] += 1
        for name in {**seed, **ours}:
            verdicts.comparisons += 1
            a, b = seed.get(name, NOTHING), ours.get(name, NOTHING)
            if type(a) is not type(b) or a != b:
                difference = Difference(
                    "tables", line["id"], line.place, table, name, a, b, line=line
                )
                verdicts.differs(difference)
    verdicts.failures += [
        f"never used: {t!r} of the tables left out" for t in not_ours if not left_out[t]
    ]
    head = f"{compared.total()} of {compared.total() + left_out.total()} cases of tables compared"
    lines = [f"  {n} of {t} not compared: {not_ours.get(t, '?')}" for t, n in left_out.items()]
    return "\n".join([head, *lines])


def called(package: Package, table: str, line: Line) -> dict[str, Any]:
    """What the function gives, as out or out.name, or the type of its error."""
    with environment():
        for name, value in line.under("env").items():
            set_variable(name, value)
        try:
            return dict(flat(TABLES[table](package, line), "out"))
        except (ImportError, AttributeError):
            raise
        except Exception as error:
            return {"error": error_type(error, str(line.get("error.type", "")))}
