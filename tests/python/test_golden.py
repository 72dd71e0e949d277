"""The seed's recordings, replayed: equal, but for the listed deviations. The package:
PAGEDKV_TEST_PACKAGE."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import golden_data
import golden_replay
import golden_traces
from golden_package import Package

# As many as tests/data/golden holds.
COUNTS = {
    "quant": "140 cases",
    "traces": "113 traces",
    "attention": "147 cases",
    "tables": "of 638 cases",
}


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(os.environ.get("PAGEDKV_TEST_PACKAGE", "pagedkv.mtplx"))


@pytest.mark.parametrize("group", golden_replay.GROUPS)
def test_equal_to_the_seed_but_for_listed_deviations_all_of_which_occur(
    group: str, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    text, verdicts = golden_replay.replay(group, package)
    with capsys.disabled():
        print("\n" + text)
    assert COUNTS[group] in text.splitlines()[0]
    assert verdicts.comparisons > 0
    problems = verdicts.problems()
    assert not problems, f"{len(problems)} problems\n" + "\n".join(problems[:50])


def off_by_one(method: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, **kwargs: method(*args, **kwargs) + 1


@pytest.mark.parametrize("broken", ["size", "kv_quant_working_rows", "trim"])
def test_the_replay_notices_a_cache_that_is_wrong(
    broken: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = golden_data.read_lines("traces")
    begins = [i for i, line in enumerate(lines) if line.word == "trace"]
    begin = next(i for i in begins if "trim_rewrite" in lines[i]["id"])
    end = next(i for i in begins if i > begin)
    monkeypatch.setattr(golden_traces, "read_lines", lambda group: lines[begin:end])
    _, right = golden_replay.replay("traces", package)
    assert not right.failures
    monkeypatch.setattr(package.cls, broken, off_by_one(getattr(package.cls, broken)))
    _, wrong = golden_replay.replay("traces", package)
    assert wrong.failures


def test_a_hash_is_of_bytes_dtype_and_shape() -> None:
    import numpy as np

    one = golden_data.GoldenArray("float32", np.zeros((2, 3), np.float32))
    assert one.hash() == golden_data.GoldenArray("float32", np.zeros((2, 3), np.float32)).hash()
    others: list[Any] = [
        golden_data.GoldenArray("float32", np.zeros((3, 2), np.float32)),
        golden_data.GoldenArray("float32", np.full((2, 3), -0.0, np.float32)),
        golden_data.GoldenArray("int8", np.zeros((2, 12), np.int8)),
    ]
    assert all(one.hash() != other.hash() for other in others)
