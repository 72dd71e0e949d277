"""What may differ from the seed, what did, and whether the two agree."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from golden_data import Line

NOTHING = "nothing"  # in place of a value that is not there

# Statistics that a read of keys and values moves.
READS = (
    "stats.active_array_calls",
    "stats.kv_quant_dequant_calls",
    "stats.kv_quant_dequant_tokens",
)


@dataclass(frozen=True)
class Difference:
    """One field of one operation that is not what the seed has. Counters: `seed` and `ours` count
    since the last look."""

    group: str
    case: str
    place: str
    operation: str  # "update_and_fetch", or the table's name
    field: str  # "error", "returned", "returned.0", "last_bailout.reason", "stats.updates", ...
    seed: Any
    ours: Any
    quant: str = "off"
    line: Line = dataclasses.field(default_factory=lambda: Line("", "", {}, []))
    # What was seen of our cache before the operation, and after it (empty for a result's field).
    before: dict[str, Any] = dataclasses.field(default_factory=dict)
    after: dict[str, Any] = dataclasses.field(default_factory=dict)
    refused: str = ""  # type of the error that we raised

    def seed_refused(self) -> str:
        return str(self.line.get("error.type", ""))

    def __str__(self) -> str:
        return (
            f"{self.place} {self.case}: {self.operation}: {self.field} is {self.ours!r}, "
            f"the seed has {self.seed!r}"
        )


def always(_: Difference) -> bool:
    return True


def matches(text: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Deviation:
    """A difference is covered if its field, operation and case match a pattern each and `when` says
    yes.

    `parts`: from there on the two caches are no longer compared in that trace. An entry without
    fields is not a difference but another way to call, which the replay marks as used where it
    takes it.
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
        return (
            d.group == self.group
            and matches(d.field, self.fields)
            and matches(d.operation, self.operations)
            and matches(d.case, self.cases)
            and self.when(d)
        )


class Verdicts:
    """What came of one group: differences that nothing covers, and how often each deviation was
    met."""

    def __init__(self, group: str, allowed: Sequence[Deviation]) -> None:
        self.list = [d for d in allowed if d.group == group]
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
