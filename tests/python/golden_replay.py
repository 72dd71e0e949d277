"""Replays what the seed did (tests/data/golden) on a package that keeps the seed's names.

    golden_replay.py [--package pagedkv.mtplx] [quant|traces|attention|tables ...]

The package needs `cache_state`, `kv_quant` and `attention_context`. Every difference must be covered by an entry of
DEVIATIONS, and every entry must be used; the seed itself (`--package mtplx`) is allowed none. Exit status 1 where that
does not hold.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import fnmatch
import hashlib
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from golden_data import (
    STORED,
    GoldenArray,
    Hash,
    Line,
    QuantCase,
    fnv1a,
    read_lines,
    read_quant,
    stored_from_float32,
)

SEED = "mtplx"
NOTHING = "nothing"  # in place of a value that is not there


# ---- the one list of what may differ


@dataclass(frozen=True)
class Difference:
    """One field of one operation that is not what the seed has. Counters: `seed` and `ours` count since the last look."""

    group: str
    case: str
    place: str
    operation: str  # "update_and_fetch", or the table's name
    field: str  # "error", "returned", "returned.0", "last_bailout.reason", "nbytes", "stats.updates", ...
    seed: Any
    ours: Any
    quant: str = "off"
    line: Line | None = None
    before: dict[str, Any] = field(
        default_factory=dict
    )  # what was seen of our cache before the operation
    after: dict[str, Any] = field(
        default_factory=dict
    )  # and after it; empty where `field` is a result
    refused: str = ""  # type of the error that we raised

    def seed_refused(self) -> str:
        return str(self.line.get("error.type", "")) if self.line is not None else ""

    def __str__(self) -> str:
        return (
            f"{self.place} {self.case}: {self.operation}: {self.field} is {self.ours!r}, "
            f"the seed has {self.seed!r}"
        )


def always(_: Difference) -> bool:
    return True


@dataclass(frozen=True)
class Deviation:
    """A difference is covered if its field, operation and case match a pattern each and `when` says yes.

    `parts`: from there on the two caches are no longer compared in that trace. An entry without fields is not a
    difference but another way to call, which the replay marks as used where it takes it.
    """

    name: str
    reason: str
    group: str
    fields: tuple[str, ...] = ()
    operations: tuple[str, ...] = ("*",)
    cases: tuple[str, ...] = ("*",)
    when: Callable[[Difference], bool] = always
    parts: bool = False

    def covers(self, d: Difference) -> bool:
        matches = lambda text, patterns: any(fnmatch.fnmatchcase(text, p) for p in patterns)
        return (
            d.group == self.group
            and matches(d.field, self.fields)
            and matches(d.operation, self.operations)
            and matches(d.case, self.cases)
            and self.when(d)
        )


READS = (
    "stats.active_array_calls",
    "stats.kv_quant_dequant_calls",
    "stats.kv_quant_dequant_tokens",
)
BYTES = ("nbytes", "stats.bytes")


def shape_mismatch(d: Difference) -> bool:
    """Of an update: values have other heads or tokens than keys."""
    assert d.line is not None
    return bool(d.line["k"].shape[1:3] != d.line["v"].shape[1:3])


DEVIATIONS = (
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
        "the seed keeps pages of keys without values when it refuses an odd value head_dim, and then refuses every write",
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
    # Memory.
    Deviation(
        "no working copies",
        "quantised pages are read as they are; the seed holds a mirror (q8) or a bank (q4) beside them",
        "traces",
        ("working_rows", *BYTES),
        when=lambda d: (
            d.quant != "off"
            and (d.ours in (0, NOTHING) or (d.field != "working_rows" and d.seed > d.ours))
        ),
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
        "rows that a read dequantises are counted each time; the seed counts what its mirror lacked",
        "traces",
        ("stats.kv_quant_dequant_tokens",),
        when=lambda d: d.quant == "q8" and d.ours in (d.after["offset"], d.before.get("offset")),
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
        when=lambda d: d.quant != "off",
    ),
    Deviation(
        "no split path",
        "one route: no call takes the seed's split path",
        "traces",
        ("stats.*large_q_split_sdpa_fallback_calls*", "stats.paged_attention_large_q_path"),
        ("paged_attention",),
        when=lambda d: d.ours in (0, NOTHING),
    ),
    Deviation(
        "nothing declined",
        "attention answers, or says what is wrong, where the seed returns nothing",
        "traces",
        ("error", "returned", "last_bailout.*", "stats.paged_attention_bailouts_by_phase_reason.*"),
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
        "rows without a token",
        "give zeros; the mean of the values on one of the seed's routes",
        "attention",
        ("rows_without_a_key_give",),
        when=lambda d: d.ours == "zero",
    ),
)

# Tables of functions that our package does not have, and why.
NOT_OURS = {
    "configure_attention_kv_cache": "",  # ours, and compared
    "dynamic_paged_kv_reservation": "what a server reserves for a request: the server's",
    "env_bool": "a stricter switch that other parts of the seed use",
    "gqa_route": "one route: the kernels serve grouped queries of every length",
    "kv_quant_kernel_switch": "one route",
    "kv_quant_q4_kernel_switch": "one route",
    "normalize_paged_kv_quantization": "the parser is behind paged_kv_quant_mode_from_env",
    "packed_quant_q_len": "a limit of a route",
    "paged_kv_quantization_env": "what the seed's server hands to its engine",
    "partition_threshold": "one route",
    "partitioned_attention_flag": "one route",
    "safe_2pass_q_len": "a limit of a route",
    "effective_sliding_window": "private; the traces of sliding_window_env show it",
}
NOT_OURS = {table: reason for table, reason in NOT_OURS.items() if reason}


class Verdicts:
    """What came of one group: differences that nothing covers, and how often each deviation was met."""

    def __init__(self, group: str, package: str) -> None:
        self.allowed = package != SEED
        self.list = [d for d in DEVIATIONS if d.group == group] if self.allowed else []
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.comparisons = 0

    def met(self, name: str) -> None:
        """The replay took the other way to call that this deviation names."""
        if not any(d.name == name for d in self.list):
            raise LookupError(f"no deviation of this group is called {name!r}")
        self.counts[name] += 1

    def differs(self, difference: Difference) -> Deviation | None:
        """The deviation that covers it; where there is none it is a failure."""
        for deviation in self.list:
            if deviation.covers(difference):
                self.counts[deviation.name] += 1
                return deviation
        self.failures.append(str(difference))
        return None

    def lines(self) -> list[str]:
        return [f"  {self.counts[d.name]} x {d.name}: {d.reason}" for d in self.list]

    def problems(self) -> list[str]:
        unused = [f"never used: deviation {d.name!r}" for d in self.list if not self.counts[d.name]]
        return self.failures + unused


# ---- the package


class Package:
    """A package that keeps the seed's names, and the arrays that it takes and gives."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.is_seed = root == SEED
        try:
            self.mx: ModuleType | None = importlib.import_module("mlx.core")
        except ImportError:
            self.mx = None
        self.cache_state = self.module("cache_state")
        self.kv_quant = self.module("kv_quant")
        self.attention_context = self.module("attention_context")
        self.cls = self.cache_state.VllmMetalPagedKVCache

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.root}.{name}")

    def config(self, quant: str) -> Any:
        return None if quant == "off" else self.kv_quant.PagedKVQuantConfig(mode=quant)

    def array(self, golden: GoldenArray) -> Any:
        """The array in the package's kind: mlx where it is installed, else numpy."""
        stored = np.ascontiguousarray(golden.stored)
        if self.mx is not None:
            made = self.mx.array(stored)
            return made.view(self.mx.bfloat16) if golden.dtype == "bfloat16" else made
        if golden.dtype == "bfloat16":
            import ml_dtypes

            return stored.view(ml_dtypes.bfloat16)
        return stored.copy()

    def golden(self, array: Any) -> GoldenArray:
        """An array of the package's kind as its stored bits."""
        name = str(array.dtype).removeprefix("mlx.core.").replace("bool_", "bool")
        if self.mx is not None and isinstance(array, self.mx.array):
            bits = array.view(self.mx.uint16) if name == "bfloat16" and array.size else array
            if name == "bfloat16" and not array.size:
                return GoldenArray(name, np.zeros(array.shape, STORED[name]))
            return GoldenArray(name, np.array(bits))
        plain = np.ascontiguousarray(array)
        return GoldenArray(name, plain.view(np.uint16) if name == "bfloat16" else plain)

    def word(self, value: Any) -> Any:
        """What a result is compared as: arrays as their hash."""
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return self.golden(value).hash()
        return list(value) if isinstance(value, tuple) else value


def is_array(value: Any) -> bool:
    return isinstance(value, GoldenArray)


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Without variables of the seed or ours; gives the environment back."""
    before = dict(os.environ)
    try:
        for name in before:
            ours = name.startswith("PAGEDKV_") and not name.startswith(
                ("PAGEDKV_TEST", "PAGEDKV_KERNELS")
            )
            if name.startswith("MTPLX_") or ours:
                del os.environ[name]
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def error_type(error: Exception, expected: str) -> str:
    """The expected type's name where the error is one, as a subclass is, else its own."""
    kind = getattr(builtins, expected, None)
    if isinstance(kind, type) and isinstance(error, kind):
        return expected
    return type(error).__name__


# ---- quant


def replay_quant(package: Package) -> tuple[list[str], Verdicts]:
    verdicts = Verdicts("quant", package.root)
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
    lines = [
        f"{sum(counts.values())} cases of quant: {parts}; {verdicts.comparisons} comparisons",
        *verdicts.lines(),
    ]
    return lines, verdicts


def quant_fields(package: Package, case: QuantCase) -> Iterator[tuple[str, Any, Any]]:
    """(field, the seed's, ours) of one case."""
    quantise, dequantise = (
        package.kv_quant.quantize_symmetric,
        package.kv_quant.dequantize_symmetric,
    )
    float32 = lambda values: package.array(GoldenArray("float32", np.asarray(values, np.float32)))
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


# ---- traces

# Fields that count, compared by what an operation added.
COUNTERS = re.compile(
    r"stats\.(updates|grow_events|\w*_(calls|tokens|rebuilds|hits)(_by_\w+\..*)?|\w+_by_phase_reason\..*)$"
)
TIMES = re.compile(r"\w*_time_s$")


def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}")
    else:
        yield name, value


def rows_of(package: Package, pages: Any, offset: int) -> np.ndarray:
    """The first `offset` rows [row, head, width] of pages [num_blocks, block_size, heads, width]."""
    stored = package.golden(pages).stored
    return np.ascontiguousarray(stored.reshape(-1, *stored.shape[2:])[:offset])


def content(codes: np.ndarray, scales: np.ndarray | None, dtype: str) -> GoldenArray:
    """Rows as the cache reads them: [1, heads, rows, head_dim] in the source dtype."""
    if scales is not None:
        if codes.dtype == np.uint8:
            pairs = np.stack([codes & 15, codes >> 4], axis=-1)
            codes = pairs.reshape(*codes.shape[:-1], -1).astype(np.int16) - 8
        values = codes.astype(np.float32) * scales
        codes = stored_from_float32(values, dtype)
    return GoldenArray(dtype, np.ascontiguousarray(codes.transpose(1, 0, 2))[None])


def seen(package: Package, cache: Any, source_dtypes: dict[str, str]) -> dict[str, Any]:
    """All that can be seen of a cache without moving a counter, in the words of the recordings.

    The source dtypes of quantised pages ("k", "v") are the recording's: only a read tells ours.
    """
    out: dict[str, Any] = {
        "offset": cache.offset,
        "size": cache.size(),
        "capacity": cache.capacity,
        "num_blocks": cache.num_blocks,
        "block_size": cache.block_size,
        "allocated_blocks": cache.allocated_blocks,
        "nbytes": cache.nbytes,
        "empty": cache.empty(),
        "meta_state": list(cache.meta_state),
        "is_trimmable": cache.is_trimmable(),
        "working_rows": cache.kv_quant_working_rows(),
    }
    try:
        for name, value in flat(cache.paged_stats(), "stats"):
            if value not in (0, "") and not TIMES.search(name):
                out[name] = value
    except Exception as error:
        out["stats.error.type"], out["stats.error.text"] = type(error).__name__, str(error)
        out["stats.error.text_is_mlx"] = False
    if out["empty"]:
        return out
    for letter, part in (("k", "key"), ("v", "value")):
        rows = {}
        for name in (f"{part}_cache", f"{part}_scale_cache"):
            pages = getattr(cache, name)
            if pages is None:
                continue
            golden = package.golden(pages)
            rows[name] = rows_of(package, pages, cache.offset)
            out[f"pages.{name}.shape"] = list(golden.shape)
            out[f"pages.{name}.dtype"] = golden.dtype
            out[f"pages.{name}.rows_sha256"] = hashlib.sha256(rows[name].tobytes()).hexdigest()
        scales = rows.get(f"{part}_scale_cache")
        dtype = source_dtypes[letter] if scales is not None else out[f"pages.{part}_cache.dtype"]
        read = content(rows[f"{part}_cache"], scales, dtype)
        out[f"content.shape_{letter}"] = list(read.shape)
        out[f"content.dtype_{letter}"] = dtype
        out[f"content.sha256_{letter}"] = read.hash().sha256
    return out


@dataclass
class Slot:
    cache: Any = None  # None: we refused to make it
    seed: dict[str, Any] = field(default_factory=dict)  # what was seen last
    ours: dict[str, Any] = field(default_factory=dict)
    comparable: bool = True


class Trace:
    """One trace on its way."""

    def __init__(self, package: Package, line: Line, verdicts: Verdicts) -> None:
        self.package = package
        self.verdicts = verdicts
        self.case: str = line["id"]
        self.quant: str = line["quant"]
        self.slots: dict[str, Slot] = {}
        self.entries: dict[str, Any] = {}
        self.snapshots: dict[str, Any] = {}
        self.line = line
        self.target = "c"
        self.refused = ""
        self.operations = 0
        self.behind = 0  # operations that could not be compared any more
        for name, value in line.under("env").items():
            set_variable(name, value)

    @property
    def slot(self) -> Slot:
        return self.slots[self.target]

    # -- operations

    def run(self, line: Line) -> None:
        self.operations += 1
        self.line = line
        self.target = line.get("to", line.get("cache", "c"))
        self.refused = ""
        known = self.slots.get(self.target)
        if known is not None and known.cache is None and "to" not in line:
            self.behind += 1
            return
        returned: dict[str, Any] = {}
        expected = str(line.get("error.type", ""))
        text = ""
        try:
            with contextlib.ExitStack() as stack:
                if "phase" in line:
                    stack.enter_context(
                        self.package.attention_context.attention_phase(line["phase"])
                    )
                operation: Callable[[Line], Any] = getattr(self, "op_" + line.word)
                returned = dict(self.named(operation(line), "returned"))
        except LookupError:
            raise
        except Exception as error:
            self.refused, text = error_type(error, expected), str(error)
            if line.word in ("construct", "from_cache") and not expected:
                self.slots[self.target] = Slot()
        if known is not None and not known.comparable and self.slots[self.target] is known:
            self.behind += 1
            return
        self.compare_outcome(returned, text)

    def named(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """A result as the recordings name its parts: returned, or returned.0 and returned.1, or returned.mode ..."""
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from self.named(inner, f"{name}.{key}")
        elif isinstance(value, tuple):
            for i, inner in enumerate(value):
                yield from self.named(inner, f"{name}.{i}")
        else:
            yield name, value

    def arrays(self, line: Line, *names: str) -> list[Any]:
        return [self.package.array(line[name]) for name in names]

    def place(self, cache: Any) -> None:
        self.slots[self.target] = Slot(cache)

    def made_with(self, line: Line) -> dict[str, Any]:
        sizes = {k: v for k, v in line.under("args").items() if k != "quant"}
        return {**sizes, "kv_quant_config": self.package.config(line.get("args.quant", self.quant))}

    def op_setenv(self, line: Line) -> None:
        set_variable(line["name"], line["value"])

    def op_construct(self, line: Line) -> None:
        self.place(self.package.cls(**self.made_with(line)))

    def op_foreign(self, line: Line) -> None:
        keys, values = self.arrays(line, "k", "v")
        self.entries[self.target] = SimpleNamespace(keys=keys, values=values, offset=line["offset"])

    def op_from_cache(self, line: Line) -> None:
        source = line.get("cache", "c")
        entry = self.entries[source] if source in self.entries else self.slots[source].cache
        self.place(self.package.cls.from_cache(entry, **self.made_with(line)))

    def op_update_and_fetch(self, line: Line) -> Any:
        return tuple(self.slot.cache.update_and_fetch(*self.arrays(line, "k", "v")))

    def op_update_without_fetch(self, line: Line) -> Any:
        return self.slot.cache.update_without_fetch(*self.arrays(line, "k", "v"))

    def op_get_state(self, line: Line) -> Any:
        return tuple(self.slot.cache.state)

    def op_set_state(self, line: Line) -> None:
        self.slot.cache.state = tuple(self.arrays(line, "k", "v"))

    def op_set_state_none(self, line: Line) -> None:
        self.slot.cache.state = (None, None)

    def op_set_keys(self, line: Line) -> None:
        self.slot.cache.keys = self.package.array(line["x"]) if "x" in line else None

    def op_set_values(self, line: Line) -> None:
        self.slot.cache.values = self.package.array(line["x"]) if "x" in line else None

    def op_set_meta_state(self, line: Line) -> None:
        self.slot.cache.meta_state = tuple(line["value"])

    def op_snapshot(self, line: Line) -> Any:
        snapshot = self.package.cache_state.snapshot_cache([self.slot.cache])
        self.snapshots[line["slot"]] = snapshot
        return {"state": tuple(snapshot.states[0]), "meta_state": list(snapshot.meta_states[0])}

    def op_restore(self, line: Line) -> None:
        self.package.cache_state.restore_cache([self.slot.cache], self.snapshots[line["slot"]])

    def op_trim(self, line: Line) -> Any:
        return self.slot.cache.trim(line["n"])

    def op_make_mask(self, line: Line) -> Any:
        how = {"return_array": line["return_array"], "window_size": line["window_size"]}
        return self.slot.cache.make_mask(line["N"], **how)

    def op_forbidden(self, line: Line) -> Any:
        return self.slot.cache.long_context_dense_fallback_forbidden()

    def op_record_dense_fallback(self, line: Line) -> None:
        self.slot.cache.record_dense_fallback()

    def op_reinstall(self, line: Line) -> Any:
        impl = line[
            "returned.attention_impl"
        ]  # that it was set stands nowhere else; this is the word for unset
        given = {
            "MTPLX_VLLM_METAL_PAGED_ATTN": "1",
            "MTPLX_VLLM_METAL_PAGED_ATTN_IMPL": "" if impl == "vllm_metal" else impl,
            "MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE": str(line["block_size"]),
            "MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS": str(line["num_blocks"]),
            "MTPLX_VLLM_METAL_PAGED_KV_QUANT": self.quant,
        }
        before = {name: os.environ.get(name) for name in given}
        caches = [self.slot.cache]
        try:
            os.environ.update(given)
            return self.package.cache_state.configure_tail_owned_attention_kv_cache(caches)
        finally:
            for name, value in before.items():
                set_variable(name, value)
            self.slot.cache = caches[0]

    def op_paged_attention(self, line: Line) -> Any:
        (queries,) = self.arrays(line, "q")
        tokens, mask = line["q"].shape[2], line.get("mask")
        full = self.quant == "q8" and mask is None and tokens > 1 and line["q"].shape[0] == 1
        if full and not self.package.is_seed:
            ones = np.ones((1, 1, tokens, self.slot.cache.offset), bool)
            mask = self.package.array(GoldenArray("bool", ones))
            self.verdicts.met("q8 without a mask")
        how = {k: line[k] for k in ("scale", "sliding_window") if k in line}
        return self.slot.cache.paged_attention(
            queries, mask=mask, impl_override=line.get("impl"), **how
        )

    # -- comparing

    def difference(
        self, name: str, seed: Any, ours: Any, after: dict[str, Any] | None = None
    ) -> Difference:
        slot = self.slots.get(self.target, Slot())
        return Difference(
            "traces", self.case, self.line.place, self.line.word, name, seed, ours, self.quant, self.line,
            slot.ours, after or {}, self.refused,
        )  # fmt: skip

    def compare(self, name: str, seed: Any, ours: Any, after: dict[str, Any] | None = None) -> bool:
        """Whether the two go on being comparable."""
        self.verdicts.comparisons += 1
        if (
            type(seed) is type(ours)
            and seed == ours
            or (seed == ours and not isinstance(seed, bool))
        ):
            return True
        deviation = self.verdicts.differs(self.difference(name, seed, ours, after))
        return deviation is None or not deviation.parts

    def compare_outcome(self, returned: dict[str, Any], text: str) -> None:
        line, slot = self.line, self.slots.get(self.target, Slot())
        seed_error = line.get("error.type", NOTHING)
        if not self.compare("error", seed_error, self.refused or NOTHING):
            slot.comparable = False
        bailout = line.under("last_bailout")
        if bailout and slot.cache is not None:
            ours = getattr(slot.cache, "paged_attention_last_bailout", {})
            for name, value in bailout.items():
                self.compare(f"last_bailout.{name}", value, ours.get(name, NOTHING))
        if seed_error != NOTHING or self.refused:
            if seed_error != NOTHING and self.refused:
                self.compare_text(text)
            return
        expected = {
            k: v for k, v in line.fields.items() if k == "returned" or k.startswith("returned.")
        }
        for name in {**expected, **returned}:
            seed, ours = expected.get(name, NOTHING), returned.get(name, NOTHING)
            if line.word == "paged_attention" and is_array(seed) and ours is not None:
                self.compare(name, "within 2e-06", self.attention_error(seed, ours))
            else:
                self.compare(name, seed.hash() if is_array(seed) else seed, self.package.word(ours))

    def attention_error(self, seed: GoldenArray, array: Any) -> str:
        ours = self.package.golden(array)
        if (seed.shape, seed.dtype) != (ours.shape, ours.dtype):
            return f"{ours.dtype}{list(ours.shape)} for {seed.dtype}{list(seed.shape)}"
        worst = float(np.abs(seed.float32() - ours.float32()).max(initial=0.0))
        return "within 2e-06" if worst <= 2e-6 else f"off by {worst}"

    def compare_text(self, ours: str) -> None:
        """Of the seed itself the text is the same; of others it names what the seed's names."""
        seed = str(self.line["error.text"])
        if self.line["error.text_is_mlx"]:
            return
        if self.package.is_seed:
            self.compare("error.text", seed, ours)
            return
        for word in named_words(seed):
            found = (
                re.search(rf"(?<![0-9A-Za-z]){re.escape(word)}(?![0-9A-Za-z])", ours) is not None
            )
            self.compare("error.text", f"… {word} …", f"… {word} …" if found else ours)

    def after(self, line: Line) -> None:
        slot = self.slots.get(line["cache"])
        if slot is None or slot.cache is None:
            return
        seed = {k: v for k, v in slot.seed.items() if k not in line.gone}
        seed.update({k: v for k, v in line.fields.items() if k != "cache"})
        dtypes = {x: seed.get(f"content.dtype_{x}", "float32") for x in "kv"}
        ours = seen(self.package, slot.cache, dtypes)
        guarded = self.refused == "RuntimeError"
        if self.refused and slot.ours and not self.package.is_seed and not guarded:
            self.expect_nothing_changed(slot.ours, ours)
        if slot.comparable:
            for name in {**seed, **ours}:
                if COUNTERS.match(name):
                    added = lambda now, then: now.get(name, 0) - then.get(name, 0)
                    self.compare(name, added(seed, slot.seed), added(ours, slot.ours), ours)
                else:
                    self.compare(name, seed.get(name, NOTHING), ours.get(name, NOTHING), ours)
        slot.seed, slot.ours = seed, ours

    def expect_nothing_changed(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in {**before, **now}:
            reads = name in READS or "bailouts" in name or "route" in name
            if not reads and before.get(name) != now.get(name):
                self.verdicts.failures.append(
                    f"{self.line.place} {self.case}: {name} changed from {before.get(name)!r} to {now.get(name)!r} "
                    f"in an operation that failed: {self.line.word}"
                )


def named_words(text: str) -> list[str]:
    """Numbers and dtypes in the text of an error; of one that says "had …, got …" those that differ."""
    find = lambda part: re.findall(r"(?<![A-Za-z0-9])(?:b?float)?[0-9]+", part)
    both = re.search(r": had (.*), got (.*)", text, re.DOTALL)
    if both is None:
        return find(text)
    return [w for a, b in zip(find(both[1]), find(both[2])) if a != b for w in (a, b)]


def replay_traces(package: Package) -> tuple[list[str], Verdicts]:
    verdicts = Verdicts("traces", package.root)
    traces: list[Trace] = []
    with contextlib.ExitStack() as stack:
        for line in read_lines("traces"):
            if line.word == "trace":
                stack.close()
                stack.enter_context(environment())
                traces.append(Trace(package, line, verdicts))
            elif line.word == "after":
                traces[-1].after(line)
            else:
                traces[-1].run(line)
    operations, behind = sum(t.operations for t in traces), sum(t.behind for t in traces)
    head = (
        f"{len(traces)} traces, {operations} operations ({behind} behind a difference that stays), "
        f"{verdicts.comparisons} comparisons"
    )
    return [head, *verdicts.lines()], verdicts


# ---- attention


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
    differ = lambda name, seed, ours: verdicts.differs(
        Difference(
            "attention",
            line["id"],
            line.place,
            "paged_attention",
            name,
            seed,
            ours,
            line["quant"],
            line,
        )
    )
    cache = written(package, line)
    mask, declined = line["mask"], line["out"] is None
    semantics = line.get("semantics", "array_mask" if is_array(mask) else "causal")
    if is_array(mask):
        given = package.array(mask)
    elif semantics == "full" and mask is None and line["q_len"] > 1 and not package.is_seed:
        given = package.array(
            GoldenArray("bool", np.ones((1, 1, line["q_len"], line["context"]), bool))
        )
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
    except ValueError as error:
        differ("out", None if declined else "an array", f"ValueError: {error}")
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
    blind = ~visible(line, semantics)[0].any(axis=-1)
    if blind.any() and line["rows_without_a_key_give"] == "mean" and not package.is_seed:
        zero = not ours.float32()[0, :, blind].any()
        differ("rows_without_a_key_give", "mean", "zero" if zero else "something else")
        apart[0, :, blind] = 0
    worst, limit = float(apart.max(initial=0.0)), tolerance(line)
    if not worst <= limit:
        differ("out", f"within {limit}", f"off by {worst}")
    return worst / limit


def replay_attention(package: Package) -> tuple[list[str], Verdicts]:
    verdicts = Verdicts("attention", package.root)
    lines = read_lines("attention")
    worst = 0.0
    for line in lines:
        with environment():
            worst = max(worst, attention_case(package, line, verdicts))
    head = f"{len(lines)} cases of attention; largest difference {worst:.3g} of its tolerance"
    return [head, *verdicts.lines()], verdicts


# ---- tables


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
    return p.cls._packed_quant_safe_q_len_for(**dict(zip(names, line["in.shape"])))


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


def replay_tables(package: Package) -> tuple[list[str], Verdicts]:
    verdicts = Verdicts("tables", package.root)
    compared: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for line in read_lines("tables"):
        table = line["table"].split("(")[0]
        with environment():
            for name, value in line.under("env").items():
                set_variable(name, value)
            seed = {k: v for k, v in line.fields.items() if k == "out" or k.startswith("out.")}
            if "error.type" in line:
                seed["error"] = line["error.type"]
            try:
                ours = dict(flat(TABLES[table](package, line), "out"))
            except (ImportError, AttributeError) as error:
                left_out[table] += 1
                if package.is_seed or table not in NOT_OURS:
                    verdicts.failures.append(f"{line.place} {line['id']}: {error!r}")
                continue
            except Exception as error:
                ours = {"error": error_type(error, str(seed.get("error", "")))}
        compared[table] += 1
        for name in {**seed, **ours}:
            verdicts.comparisons += 1
            a, b = seed.get(name, NOTHING), ours.get(name, NOTHING)
            if type(a) is not type(b) or a != b:
                verdicts.differs(
                    Difference("tables", line["id"], line.place, table, name, a, b, line=line)
                )
    total = sum(compared.values()) + sum(left_out.values())
    lines = [f"{sum(compared.values())} of {total} cases of tables compared", *verdicts.lines()]
    if not package.is_seed:
        lines += [
            f"  {n} of {table} not compared: {NOT_OURS.get(table, '?')}"
            for table, n in left_out.items()
        ]
        verdicts.failures += [f"never used: {t!r} of NOT_OURS" for t in NOT_OURS if not left_out[t]]
    return lines, verdicts


GROUPS: dict[str, Callable[[Package], tuple[list[str], Verdicts]]] = {
    "quant": replay_quant,
    "traces": replay_traces,
    "attention": replay_attention,
    "tables": replay_tables,
}


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
        lines, verdicts = GROUPS[group](package)
        print("\n".join(lines), flush=True)
        problems += verdicts.problems()
    print("\n".join(problems), file=sys.stderr)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
