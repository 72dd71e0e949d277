#!/usr/bin/env bash
# Formats all C++ with the pinned clang-format and the Python package and its tests with ruff, which also looks for
# faults; --check only tells what would change and fails then.
#   scripts/format.sh [--check]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

formatter=$venv/bin/clang-format
[ -x "$formatter" ] || { say "no $formatter: run scripts/setup.sh"; exit 77; }  # 77: ctest counts it as skipped
mode=(-i)
python_mode=()
[ "${1:-}" != --check ] || { mode=(--dry-run --Werror); python_mode=(--check); }
cd "$root"
find include src python examples tests bench cmake -type f \( -name '*.h' -o -name '*.cpp' \) -print0 |
  xargs -0 -r "$formatter" --style=file "${mode[@]}"
"$venv/bin/ruff" format -q "${python_mode[@]}" python tests/python tests/server tools/embed_web.py bench/python
"$venv/bin/ruff" check -q python tests/python tests/server tools/embed_web.py bench/python
