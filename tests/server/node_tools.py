"""Node and its modules (scripts/setup.sh puts them beside the tests). A test file that finds one missing ends with 77."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
CHROMIUM = os.environ.get("PAGEDKV_TEST_CHROMIUM") or shutil.which("chromium") or ""


def leave(why: str) -> NoReturn:
    """pytest.exit() while a file is collected is an error to pytest, not an exit status."""
    print(why, file=sys.stderr, flush=True)
    os._exit(77)


def need(*, chromium: bool = False) -> None:
    """Call at the head of a test file."""
    version = (
        subprocess.run(["node", "--version"], capture_output=True, text=True).stdout
        if shutil.which("node")
        else ""
    )
    if not version or int(version[1:].split(".")[0]) < 20:
        leave("node 20 or later is missing: scripts/setup.sh --all")
    if not (HERE / "node_modules").is_dir():
        leave("node's modules are missing: scripts/setup.sh --tests")
    if chromium and not CHROMIUM:
        leave("chromium is missing: scripts/setup.sh --all")


def node(*arguments: str, env: Mapping[str, str] | None = None, seconds: float = 600) -> str:
    """What node writes; a failure, with it, when it does not end with 0."""
    done = subprocess.run(
        ["node", *arguments],
        cwd=HERE,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
