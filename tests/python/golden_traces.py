"""Replays tests/data/golden/traces.txt: operations in order, and all that can be seen after
each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from golden_data import GoldenArray, Line, read_lines, stored_from_float32
from golden_package import (
    Package,
    environment,
    error_type,
    flat,
    is_array,
    ones_mask,
    set_variable,
)
from golden_verdicts import NOTHING, READS, Difference, Verdicts

COUNTERS = re.compile(
    r"stats\.(updates|grow_events|\w*_(calls|tokens|rebuilds|hits)(_by_\w+\..*)?"
    r"|\w+_by_phase_reason\..*)$"
)
TIMES = re.compile(r"\w*_time_s$")


def rows_of(package: Package, pages: Any, offset: int) -> np.ndarray:
    """The first `offset` rows [row, head, width] of pages [num_blocks, block_size, heads,
    width]."""
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
        """A result as the recordings name its parts: returned, or returned.0 and returned.1, or
        returned.mode ..."""
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
            mask = ones_mask(
                self.package, tokens, self.slot.cache.offset, line.get("sliding_window", 0)
            )
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
            group="traces",
            case=self.case,
            place=self.line.place,
            operation=self.line.word,
            field=name,
            seed=seed,
            ours=ours,
            quant=self.quant,
            line=self.line,
            before=slot.ours,
            after=after or {},
            refused=self.refused,
        )

    def compare(self, name: str, seed: Any, ours: Any, after: dict[str, Any] | None = None) -> bool:
        """Whether the two go on being comparable."""
        self.verdicts.comparisons += 1
        if (type(seed) is type(ours) and seed == ours) or (
            seed == ours and not isinstance(seed, bool)
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
            pairs = [self.pair(name, slot, seed, ours) for name in {**seed, **ours}]
            slot.comparable = all([self.compare(*pair, ours) for pair in pairs])
        slot.seed, slot.ours = seed, ours

    @staticmethod
    def pair(
        name: str, slot: Slot, seed: dict[str, Any], ours: dict[str, Any]
    ) -> tuple[str, Any, Any]:
        """(field, the seed's, ours): of a counter what was added since the last look."""
        if COUNTERS.match(name):
            added = (
                now.get(name, 0) - then.get(name, 0)
                for now, then in ((seed, slot.seed), (ours, slot.ours))
            )
            return name, *added
        return name, seed.get(name, NOTHING), ours.get(name, NOTHING)

    def expect_nothing_changed(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        changed = [
            f"{name} from {before.get(name)!r} to {now.get(name)!r}"
            for name in {**before, **now}
            if name not in READS
            and not re.search("bailouts|route", name)
            and before.get(name) != now.get(name)
        ]
        if changed:
            self.verdicts.failures.append(
                f"{self.line.place} {self.case}: {self.line.word} failed, and changed "
                + ", ".join(changed)
            )


def named_words(text: str) -> list[str]:
    """Numbers and dtypes in the text of an error; of one that says "had …, got …" those that
    differ."""
    find = re.compile(r"(?<![A-Za-z0-9])(?:b?float)?[0-9]+").findall
    both = re.search(r": had (.*), got (.*)", text, re.DOTALL)
    if both is None:
        return find(text)
    return [w for a, b in zip(find(both[1]), find(both[2]), strict=False) if a != b for w in (a, b)]


def replay_traces(package: Package, verdicts: Verdicts) -> str:
    """Compares all traces; returns a line with their number."""
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
    return (
        f"{len(traces)} traces, {operations} operations ({behind} behind a difference that stays), "
        f"{verdicts.comparisons} comparisons"
    )
