#!/usr/bin/env bash
# Formats all C++ with the pinned clang-format; --check only tells what would change and fails then.
#   scripts/format.sh [--check]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

formatter=$venv/bin/clang-format
[ -x "$formatter" ] || { say "no $formatter: run scripts/setup.sh"; exit 77; }  # 77: ctest counts it as skipped
mode=(-i)
[ "${1:-}" != --check ] || mode=(--dry-run --Werror)
cd "$root"
find include src tests bench cmake -type f \( -name '*.h' -o -name '*.cpp' \) -print0 |
  xargs -0 -r "$formatter" --style=file "${mode[@]}"
