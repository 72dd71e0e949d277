#!/usr/bin/env python3
"""Runs mtplx's own tests with our cache in the place of mtplx's.

    run_mtplx_tests.py FOLDER [--python PYTHON] [--sdist FOLDER] [--package NAME] [--files NAME ...]
    [--jobs N] [--again]

FOLDER is for scratch: a virtual environment with the versions that mtplx asks for (none where
--python names an interpreter that has them), mtplx's source distribution (none where --sdist names
an unpacked one), and results. First mtplx's whole suite runs as it is, once, to learn which tests
make an instance of the class (--files: of these test files alone; --again: anew). Then those tests
run with our class, found by PYTHONPATH. Prints a table of what passed and why the rest does not.
Exit status 1 where a test fails that mtplx_expected.toml does not list, or a listed one passes.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import tomllib

HERE = Path(__file__).resolve().parent
VERSION = "2.12.2"
# What mtplx's metadata asks for on macOS, where alone its markers let pip see all of it, and what
# its tests import.
REQUIREMENTS = (
    "mlx[cpu]==0.32.2",
    "mlx-lm>=0.31,<0.32",
    "transformers>=5.10.0,!=5.13.0,<5.17",
    "fastapi>=0.136",
    "huggingface-hub>=0.36",
    "pillow>=10",
    "numpy>=2",
    "ml_dtypes",
    "pydantic>=2",
    "rich>=14",
    "safetensors>=0.6",
    "uvicorn>=0.46",
    "httpx",
    "pytest>=8",
)
MINUTES = 5  # of one process


@dataclass
class Result:
    """Of one test. `private`: names that the plug-in saw used; see there."""

    test: str
    outcome: str  # passed, failed, skipped or crashed
    constructs: bool
    why: str
    private: list[str]


def say(text: str) -> None:
    print(text, flush=True)


# ---- setting up


def make_python(folder: Path) -> Path:
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        say("making a virtual environment")
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    return python


def get_sdist(folder: Path, python: Path) -> Path:
    """The unpacked source distribution."""
    unpacked = folder / f"mtplx-{VERSION}"
    if unpacked.exists():
        return unpacked
    say(f"getting mtplx {VERSION}")
    pip = [str(python), "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "mtplx"]
    subprocess.run([*pip, "-d", str(folder), f"mtplx=={VERSION}"], check=True)
    with tarfile.open(folder / f"mtplx-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return unpacked


# ---- running


@dataclass(frozen=True)
class Runner:
    python: Path
    sdist: Path
    results: Path
    package: str  # "mtplx": as it is

    def run_file(self, file: str, only: Iterable[str] | None = None) -> list[Result]:
        """All tests of a file, or `only` those; where one takes the process with it the rest runs
        in another."""
        start = f"{self.package}-{Path(file).stem}"
        report, listed, done, output = (
            self.results / (start + end) for end in (".jsonl", ".only", ".done", ".txt")
        )
        report.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PAGEDKV_MTPLX_PACKAGE": self.package,
            "PAGEDKV_MTPLX_REPORT": str(report),
            "PAGEDKV_MTPLX_SKIP": str(done),
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if only is not None:
            listed.write_text("\n".join(only), encoding="utf-8")
            environment["PAGEDKV_MTPLX_ONLY"] = str(listed)
        results: dict[str, Result] = {}
        while True:
            done.write_text("\n".join(results), encoding="utf-8")
            with output.open("a", encoding="utf-8") as log:
                ended = self.pytest(file, environment, log)
            started, makes = read_report(report, results)
            if not started:
                return list(results.values())
            why = f"the process ended: {ended}"
            results[started] = Result(started, "crashed", makes, why, [])
            report.unlink()

    def pytest(self, file: str, environment: dict[str, str], log: TextIO) -> str:
        """How the process ended."""
        # Where mlx has lost its frames a traceback of the crash may never end.
        plugins = ["-p", "mtplx_plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
        command = [str(self.python), "-m", "pytest", "-q", *plugins]
        try:
            ran = subprocess.run(
                [*command, file],
                cwd=self.sdist,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=MINUTES * 60,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {MINUTES} minutes"
        return f"status {ran.returncode}"

    def run_files(self, files: dict[str, list[str] | None], jobs: int) -> list[Result]:
        """Of each file all tests (None) or those named."""
        with ThreadPoolExecutor(jobs) as pool:
            lists = pool.map(lambda item: self.run_file(*item), files.items())
            return [result for results in lists for result in results]


def read_report(report: Path, results: dict[str, Result]) -> tuple[str, bool]:
    """Adds what a process reported; the test that it ended in, if any, and whether that made an
    instance."""
    started, makes = "", False
    for line in report.read_text(encoding="utf-8").splitlines() if report.exists() else ():
        record = json.loads(line)
        if "start" in record:
            started, makes = record["start"], False
        elif "makes" in record:
            makes = True
        else:
            results[record["test"]] = Result(**record)
            started = ""
    return started, makes


def recorded(runner: Runner, files: Sequence[str], jobs: int, again: bool) -> list[Result]:
    """What the tests of these files give with mtplx as it is; kept in the scratch folder, by
    file."""
    kept = runner.results / "recorded.json"
    known: dict[str, list[dict[str, Any]]] = {}
    if kept.exists() and not again:
        known = json.loads(kept.read_text(encoding="utf-8"))
    missing = [file for file in files if file not in known]
    if missing:
        say(f"running {len(missing)} files of mtplx's tests as they are")
    for begin in range(0, len(missing), 8):  # kept every few files: the whole takes long
        some = missing[begin : begin + 8]
        results = runner.run_files({file: None for file in some}, jobs)
        for file in some:
            known[file] = [asdict(r) for r in results if r.test.split("::")[0] == file]
        kept.write_text(json.dumps(known), encoding="utf-8")
    return [Result(**record) for file in files for record in known[file]]


# ---- judging


@dataclass
class Expected:
    """An entry of mtplx_expected.toml: failing tests with one reason."""

    reason: str
    tests: list[str]

    def covers(self, test: str) -> bool:
        short = test.removeprefix("tests/test_")
        return any(fnmatch.fnmatchcase(short, p.replace("[", "[[]")) for p in self.tests)


def read_expected() -> list[Expected]:
    with (HERE / "mtplx_expected.toml").open("rb") as file:
        return [Expected(**entry) for entry in tomllib.load(file).get("expected", [])]


def attributes(result: Result) -> str:
    """The missing attribute that the failure names, else the private names that the test uses."""
    missing = re.search(r"has no attribute '(\w+)'", result.why)
    if missing:
        return f"no {missing[1]}"
    used = sorted({name.split(":")[1] for name in result.private})
    return "uses " + ", ".join(used) if used else ""


def passed(result: Result) -> bool:
    return result.outcome in ("passed", "skipped")


def judge(real: dict[str, Result], ours: list[Result], expected: list[Expected]) -> int:
    """Prints the table; the number of surprises."""
    both = [r for r in ours if passed(r) and passed(real[r.test])]
    regressed = [r for r in ours if not passed(r) and passed(real[r.test])]
    neither = [r for r in ours if not passed(r) and not passed(real[r.test])]
    gained = [r for r in ours if passed(r) and not passed(real[r.test])]
    say(f"{len(ours)} cases of mtplx's tests make our class")
    say(f"  {len(both)} pass with mtplx's class and with ours")
    say(f"  {len(gained)} pass with ours alone")
    say(f"  {len(neither)} fail with both, here without Metal")
    say(f"  {len(regressed)} fail with ours alone:")
    surprises = 0
    for entry in expected:
        mine = [r for r in regressed if entry.covers(r.test)]
        say(f"    {len(mine)}: {entry.reason}")
        for r in mine:
            say(f"      {r.test.removeprefix('tests/test_')}  {attributes(r)}")
        surprises += report_stale(entry, ours, both + gained)
    unlisted = [r for r in regressed if not any(e.covers(r.test) for e in expected)]
    if unlisted:
        say(f"    {len(unlisted)} NOT LISTED in mtplx_expected.toml:")
    for r in unlisted:
        say(f"      {r.test.removeprefix('tests/test_')}  {attributes(r)}")
        say(f"        {first_line(r.why)}")
    names = Counter(attributes(r) for r in regressed)
    say(
        "  by private name: "
        + "; ".join(f"{n} {name or 'none'}" for name, n in names.most_common())
    )
    return surprises + len(unlisted)


def report_stale(entry: Expected, ours: list[Result], passing: list[Result]) -> int:
    """Prints what of an entry is no longer true, for the files that ran; how much that is."""
    files = {r.test.split("::")[0].removeprefix("tests/test_") for r in ours}
    stale = [f"LISTED, BUT PASSES: {r.test}" for r in passing if entry.covers(r.test)]
    for pattern in entry.tests:
        one = Expected(entry.reason, [pattern])
        if pattern.split("::")[0] in files and not any(one.covers(r.test) for r in ours):
            stale.append(f"LISTED, BUT NO SUCH TEST: {pattern}")
    for line in stale:
        say(f"    {line}")
    return len(stale)


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--sdist", type=Path)
    parser.add_argument("--package", default="pagedkv.mtplx", help="root name")
    parser.add_argument(
        "--files", nargs="*", help="names such as cache_state, for test_cache_state.py"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()

    folder: Path = arguments.folder.resolve()
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    python = arguments.python or make_python(folder)
    sdist = (arguments.sdist or get_sdist(folder, python)).resolve()
    files = sorted(str(f.relative_to(sdist)) for f in (sdist / "tests").glob("test_*.py"))
    if arguments.files:
        files = [f for f in files if Path(f).stem.removeprefix("test_") in arguments.files]

    real = recorded(Runner(python, sdist, results, "mtplx"), files, arguments.jobs, arguments.again)
    wanted: dict[str, list[str] | None] = {}
    for result in real:
        if result.constructs:
            tests = wanted.setdefault(result.test.split("::")[0], [])
            assert tests is not None
            tests.append(result.test)
    ours = Runner(python, sdist, results, arguments.package).run_files(wanted, arguments.jobs)
    surprises = judge({r.test: r for r in real}, ours, read_expected())
    missing = {t for tests in wanted.values() for t in tests or ()} - {r.test for r in ours}
    for test in sorted(missing):
        say(f"  DID NOT RUN with ours: {test}")
    return 1 if surprises or missing else 0


if __name__ == "__main__":
    sys.exit(main())
