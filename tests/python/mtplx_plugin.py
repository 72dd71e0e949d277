"""A pytest plug-in for mtplx's own tests: records, and where asked puts our cache in the place of
mtplx's.

run_mtplx_tests.py loads it (`-p mtplx_plugin`). Variables:

- PAGEDKV_MTPLX_PACKAGE: root name of the package to put in place, e.g. "pagedkv.mtplx"; unset:
  mtplx as it is.
- PAGEDKV_MTPLX_ONLY: a file with one test a line: no other test runs.
- PAGEDKV_MTPLX_SKIP: the same, of tests that do not run.
- PAGEDKV_MTPLX_REPORT: a file that gets one JSON object a line: {"start": test} before a test,
  {"makes": test} when it first makes an instance of the class, and after it {"test", "outcome",
  "constructs", "why", "private"}. A test whose start has no end took the process with it.

"private" lists the names with a leading underscore that the test's own code ("test:_name") and
mtplx's code outside of the class ("mtplx:_name") read or set on an instance of the class.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

CLASS = "VllmMetalPagedKVCache"
QUANT_FUNCTIONS = (
    "quantize_symmetric",
    "dequantize_symmetric",
    "packed_dim",
    "compression_ratio",
    "PagedKVQuantConfig",
    "paged_kv_quant_mode_from_env",
    "config_from_env",
    "env_enabled",
)


class _NoLibrary:
    """In place of the macOS C library: every function does nothing and returns 0."""

    class _Function:
        restype: Any = None
        argtypes: Any = None

        def __call__(self, *args: Any) -> int:
            return 0

    def __getattr__(self, name: str) -> Any:
        function = self._Function()
        setattr(self, name, function)
        return function


def stub_macos_library() -> None:
    """mtplx.generation opens libSystem when it is imported; elsewhere than on macOS it gets a
    stub."""
    if sys.platform == "darwin":
        return
    load = ctypes.CDLL

    def load_or_stub(name: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str) and name.startswith("/usr/lib/libSystem"):
            return _NoLibrary()
        return load(name, *args, **kwargs)

    ctypes.CDLL = load_or_stub  # type: ignore[assignment,misc]


def replace_everywhere(old: Any, new: Any, root: str = "mtplx") -> int:
    """Sets `new` wherever a module under `root` holds `old` under any name; returns how often."""
    count = 0
    for name, module in list(sys.modules.items()):
        if name != root and not name.startswith(root + "."):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                setattr(module, attribute, new)
                count += 1
    return count


def put_in_place(package: str) -> type:
    """Puts the package's class and quantisation into mtplx and lets the package see mtplx's
    attention phase.

    mtplx's modules that are imported later find the replacements under mtplx's own names.
    """
    theirs = importlib.import_module("mtplx.cache_state")
    ours = importlib.import_module(package + ".cache_state")
    cls: type = getattr(ours, CLASS)
    if ours is theirs:
        return cls
    replace_everywhere(getattr(theirs, CLASS), cls)
    their_quant = importlib.import_module("mtplx.kv_quant")
    our_quant = importlib.import_module(package + ".kv_quant")
    for name in QUANT_FUNCTIONS:
        replace_everywhere(getattr(their_quant, name), getattr(our_quant, name))
    bridge_phase(package)
    return cls


def bridge_phase(package: str) -> None:
    """The package's phase functions become mtplx's, so that both see the phase that either sets."""
    theirs = importlib.import_module("mtplx.attention_context")
    ours = importlib.import_module(package + ".attention_context")
    for name in ("attention_phase", "current_attention_phase", "normalize_attention_phase"):
        if hasattr(ours, name):
            replace_everywhere(getattr(ours, name), getattr(theirs, name), root=package)


class Recorder:
    """Watches one class: which test makes instances, and who uses their private names."""

    def __init__(self, cls: type, report: str) -> None:
        self.cls = cls
        self.report = report
        self.test = ""
        self.constructs = False
        self.private: set[str] = set()
        self.outcome = ""
        self.why = ""
        self.own_files = {
            str(Path(sys.modules[c.__module__].__file__ or ""))
            for c in cls.__mro__
            if c is not object and c.__module__ in sys.modules
        }
        self.mtplx = str(Path(sys.modules["mtplx"].__file__ or "").parent)
        # Which tests make the class, and what is private, is learnt with mtplx's own. Ours is left alone: Python
        # that runs while mlx traces a graph can crash the interpreter.
        if cls.__module__.startswith("mtplx"):
            self._watch()

    def _watch(self) -> None:
        cls: Any = self.cls
        init, get, set_ = cls.__init__, cls.__getattribute__, cls.__setattr__

        def __init__(obj: Any, *args: Any, **kwargs: Any) -> None:
            if not self.constructs:
                self.constructs = True
                self.write(makes=self.test)
            init(obj, *args, **kwargs)

        def __getattribute__(obj: Any, name: str) -> Any:
            if name[0] == "_" and name[:2] != "__":
                self._note(name, sys._getframe(1))
            return get(obj, name)

        def __setattr__(obj: Any, name: str, value: Any) -> None:
            if name[0] == "_" and name[:2] != "__":
                self._note(name, sys._getframe(1))
            set_(obj, name, value)

        cls.__init__ = __init__
        cls.__getattribute__ = __getattribute__
        cls.__setattr__ = __setattr__

    def _note(self, name: str, frame: Any) -> None:
        # A helper such as getattr() or monkeypatch's setattr has a frame of pytest's: look one
        # further out.
        while frame is not None and "_pytest" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return
        file = frame.f_code.co_filename
        if file in self.own_files:
            owner = getattr(frame.f_code, "co_qualname", "")
            inside = owner.split(".")[0] == self.cls.__name__ if owner else True
            if inside:
                return
            self.private.add("mtplx:" + name)
        elif file.startswith(self.mtplx):
            self.private.add("mtplx:" + name)
        elif Path(file).name.startswith(("test_", "conftest", "helpers")) or "/tests/" in file:
            self.private.add("test:" + name)

    def write(self, **record: Any) -> None:
        if not self.report:
            return
        with open(self.report, "a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.test, self.constructs, self.private = item.nodeid, False, set()
        self.outcome, self.why = "passed", ""
        self.write(start=item.nodeid)
        yield
        self.write(
            test=item.nodeid,
            outcome=self.outcome,
            constructs=self.constructs,
            why=self.why,
            private=sorted(self.private),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "passed" or self.outcome == "failed":
            return
        self.outcome = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            self.why = f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"[:600]
        else:
            self.why = str(report.longrepr)[-600:]


def tests_in(variable: str) -> set[str] | None:
    path = os.environ.get(variable, "")
    return set(Path(path).read_text(encoding="utf-8").splitlines()) if path else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only, skip = tests_in("PAGEDKV_MTPLX_ONLY"), tests_in("PAGEDKV_MTPLX_SKIP") or set()
    keep = [i for i in items if i.nodeid not in skip and (only is None or i.nodeid in only)]
    config.hook.pytest_deselected(items=[i for i in items if i not in keep])
    items[:] = keep


def pytest_configure(config: pytest.Config) -> None:
    stub_macos_library()
    package = os.environ.get("PAGEDKV_MTPLX_PACKAGE", "") or "mtplx"
    cls = put_in_place(package)
    recorder = Recorder(cls, os.environ.get("PAGEDKV_MTPLX_REPORT", ""))
    config.pluginmanager.register(recorder, "pagedkv-recorder")
