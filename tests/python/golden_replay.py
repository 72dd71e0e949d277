"""Replays what the seed did (tests/data/golden) on a package that keeps the seed's names.

    golden_replay.py [--package pagedkv.mtplx] [quant|traces|attention|tables ...]

The package needs `cache_state`, `kv_quant` and `attention_context`. Every difference must be
covered by an entry of DEVIATIONS, and every entry must be used; the seed itself (`--package mtplx`)
is allowed none. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import sys

from golden_attention import replay_attention
from golden_package import SEED, Package
from golden_quant import replay_quant
from golden_tables import replay_tables
from golden_traces import replay_traces
from golden_verdicts import NOTHING, READS, Deviation, Difference, Verdicts

BYTES = ("nbytes", "stats.bytes")


def shape_mismatch(d: Difference) -> bool:
    """Of an update: values have other heads or tokens than keys."""
    return bool(d.line["k"].shape[1:3] != d.line["v"].shape[1:3])


def smaller(d: Difference) -> bool:
    return isinstance(d.seed, int) and isinstance(d.ours, int) and d.ours < d.seed


DEVIATIONS = (
    Deviation(
        "q6",
        "a format of ours; its words and sizes are errors in the seed",
        "quant",
        ("error",),
        when=lambda d: "bits6" in d.case,
    ),
    # Refusals where the seed has a defect.
    Deviation(
        "checked geometry",
        "sizes below 1 are refused; the seed fails later",
        "traces",
        ("error",),
        ("construct", "from_cache"),
        when=lambda d: d.ours == "ValueError" and d.seed == NOTHING,
        parts=True,
    ),
    Deviation(
        "negative trim",
        "refused; the seed moves its offset over rows that nobody wrote",
        "traces",
        ("error",),
        ("trim",),
        when=lambda d: d.ours == "ValueError" and d.line["n"] < 0,
        parts=True,
    ),
    Deviation(
        "values match keys",
        "other heads or tokens than the keys' are refused; the seed broadcasts or misplaces them",
        "traces",
        ("error",),
        ("update_*",),
        when=lambda d: d.ours == "ValueError" and shape_mismatch(d),
        parts=True,
    ),
    Deviation(
        "half of an empty cache",
        "setting keys or values is refused; the seed ignores them",
        "traces",
        ("error",),
        ("set_keys", "set_values"),
        when=lambda d: d.ours == "ValueError" and d.before["empty"],
    ),
    Deviation(
        "no half-made pages",
        "the seed keeps keys without values when it refuses an odd value head_dim",
        "traces",
        ("error",),
        ("update_*",),
        when=lambda d: d.seed == "ValueError" and "had None/None" in d.line["error.text"],
        parts=True,
    ),
    Deviation(
        "a refusal changes nothing",
        "the seed has allocated pages when it refuses a first write",
        "traces",
        ("allocated_blocks", *BYTES),
        ("update_*", "set_state", "from_cache"),
        when=lambda d: bool(d.refused) and d.ours == d.before.get(d.field, NOTHING),
    ),
    Deviation(
        "a refused state changes nothing",
        "the seed has emptied the cache when it refuses a state",
        "traces",
        ("*",),
        ("set_state",),
        when=lambda d: (
            d.refused == d.seed_refused() == "ValueError"
            and d.ours == d.before.get(d.field, d.ours)
        ),
        parts=True,
    ),
    # Memory.
    Deviation(
        "memory follows use",
        "where growth is on memory comes as tokens come; the seed allocates its whole capacity",
        "traces",
        BYTES,
        cases=("*/dyn1/*",),
        when=smaller,
    ),
    Deviation(
        "no working copies",
        "quantised pages are read as they are; the seed holds a mirror (q8) or a bank (q4) too",
        "traces",
        BYTES,
        when=lambda d: d.quant != "off" and (d.ours in (0, NOTHING) or smaller(d)),
    ),
    Deviation(
        "no working rows",
        "no mirror, no bank: attention needs no copy of the rows",
        "traces",
        ("working_rows",),
        when=lambda d: d.quant != "off" and d.ours == 0,
    ),
    Deviation(
        "no mirror, no bank",
        "nothing to count: no mirror, no bank",
        "traces",
        ("stats.kv_quant_dequant_memo_*", "stats.kv_quant_bank_*"),
        when=lambda d: d.ours == 0,
    ),
    Deviation(
        "every read counts",
        "rows that a read dequantises count each time; the seed counts what its mirror lacked",
        "traces",
        ("stats.kv_quant_dequant_tokens",),
        when=lambda d: d.quant == "q8" and d.ours in (d.after["offset"], d.before.get("offset")),
    ),
    Deviation(
        "restoring is no read",
        "the seed reads the state that it replaces",
        "traces",
        READS,
        ("restore",),
        when=lambda d: d.ours == 0,
    ),
    Deviation(
        "blank variable",
        "a blank window counts as unset; it is an error in the seed's statistics",
        "traces",
        ("stats.*",),
        ("setenv", "paged_attention"),
        ("trace/sliding_window_env/*",),
    ),
    # One attention route.
    Deviation(
        "attention is no read",
        "the seed's dense route counts a read of state for each call",
        "traces",
        READS,
        ("paged_attention",),
        when=lambda d: d.ours == 0,
    ),
    Deviation(
        "one route",
        "the kernels read every format, for queries of any length",
        "traces",
        ("stats.kv_quant_route", "stats.kv_quant_route_offset", "stats.kv_quant_kernel_calls"),
        when=lambda d: d.quant != "off" and d.ours != "dequant",
    ),
    Deviation(
        "no split path",
        "one route: no call takes the seed's split path",
        "traces",
        ("stats.*large_q_split_sdpa_fallback_calls*", "stats.paged_attention_large_q_path"),
        when=lambda d: d.ours in (0, NOTHING),
    ),
    Deviation(
        "nothing declined",
        "attention answers, or says what is wrong, where the seed returns nothing",
        "traces",
        ("error", "returned", "last_bailout.*", "stats.*bailouts*", "stats.*attention_calls"),
        ("paged_attention",),
        when=lambda d: (
            "last_bailout.reason" in d.line and (d.field != "error" or d.ours == "ValueError")
        ),
    ),
    Deviation(
        "q8 without a mask",
        "the seed's q8 then lets every query see every token; here that is a mask of ones",
        "traces",
    ),
    # Guards.
    Deviation(
        "no guard on attention",
        "attention never materialises keys and values, so nothing forbids it",
        "traces",
        ("error", "stats.*attention_calls", "stats.active_array_calls"),
        ("paged_attention",),
        when=lambda d: d.seed_refused() == "RuntimeError" and not d.refused,
    ),
    # Attention cases.
    Deviation(
        "q8 without a mask",
        "the seed's q8 then lets every query see every token; here that is a mask of ones",
        "attention",
    ),
    Deviation(
        "nothing declined",
        "attention answers where the seed returns nothing",
        "attention",
        ("out",),
        when=lambda d: d.seed is None,
    ),
    Deviation(
        "more queries than tokens",
        "refused, since queries are tokens held; each can be asked for alone",
        "attention",
        ("out",),
        cases=("*q_longer_than_context*",),
        when=lambda d: str(d.ours).startswith("ValueError"),
    ),
    Deviation(
        "rows without a token",
        "give zeros; the mean of the values on one of the seed's routes",
        "attention",
        ("rows_without_a_key_give",),
        when=lambda d: d.ours == "zero",
    ),
    # Words, sizes and prices.
    Deviation(
        "q6",
        "a format of ours; its words and sizes are errors in the seed",
        "tables",
        ("error", "out"),
        ("normalize_paged_kv_quantization", "packed_dim"),
        when=lambda d: d.seed in ("ValueError", NOTHING),
    ),
    Deviation(
        "uint8",
        "one list of words; the seed's configuration object keeps uint8 as a name, with 8 bits",
        "tables",
        ("out.normalized_mode",),
        when=lambda d: d.seed == "uint8",
    ),
    Deviation(
        "blank variable",
        "counts as unset; in the seed a blank first variable of the two means off, and a blank "
        "window is an error in its statistics",
        "tables",
        ("error", "out"),
        ("paged_kv_quant_mode_from_env", "stats_sliding_window"),
    ),
    Deviation(
        "kernels included",
        "the kernels are part of the package: no installation is refused for want of them",
        "tables",
        ("error", "out.*"),
        ("configure_attention_kv_cache",),
        when=lambda d: d.seed in ("RuntimeError", NOTHING),
    ),
    Deviation(
        "one route",
        "quantised pages are attended as they are, at every offset, in every shape",
        "tables",
        ("error", "out"),
        ("kv_quant_decode_route*", "kv_quant_kernel_q_len"),
    ),
    Deviation(
        "no working copies",
        "nothing is kept beside quantised pages",
        "tables",
        ("out",),
        ("kv_quant_working_copy_peak_rows",),
        when=lambda d: d.ours == 0,
    ),
)

# Tables of functions that our package does not have, and why.
NOT_OURS = {
    "dynamic_paged_kv_reservation": "what a server reserves for a request: the server's",
    "env_bool": "a stricter switch that other parts of the seed use",
    "gqa_route": "one route: the kernels serve grouped queries of every length",
    "kv_quant_kernel_switch": "one route",
    "kv_quant_q4_kernel_switch": "one route",
    "packed_quant_q_len": "a limit of a route",
    "paged_kv_quantization_env": "what the seed's server hands to its engine",
    "partitioned_attention_flag": "one route",
    "safe_2pass_q_len": "a limit of a route",
}

GROUPS = ("quant", "traces", "attention", "tables")


def replay(group: str, package: Package) -> tuple[str, Verdicts]:
    """What to print, the number of cases first, and what came of it."""
    verdicts = Verdicts(group, () if package.root == SEED else DEVIATIONS)
    if group == "tables":
        text = replay_tables(package, verdicts, {} if package.root == SEED else NOT_OURS)
    else:
        run = {"quant": replay_quant, "traces": replay_traces, "attention": replay_attention}
        text = run[group](package, verdicts)
    return "\n".join([text, *verdicts.lines()]), verdicts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", default="pagedkv.mtplx", help="its root name")
    parser.add_argument("groups", nargs="*", help="all, if none is named")
    arguments = parser.parse_args()
    package = Package(arguments.package)
    problems: list[str] = []
    for group in arguments.groups or GROUPS:
        text, verdicts = replay(group, package)
        print(text, flush=True)
        problems += verdicts.problems()
    print("\n".join(problems), file=sys.stderr)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
