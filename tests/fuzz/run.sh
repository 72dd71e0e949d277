#!/usr/bin/env bash
# Fuzzes from the inputs in tests/fuzz/corpus: the same 5,000 inputs each time and at most a minute, or, where
# PAGEDKV_TEST_SCALE is above 1, other inputs each time for so many minutes.
#   run.sh CMAKE BUILD_TREE TARGET
# What breaks it is kept as BUILD_TREE/crash-… (or leak-, oom-, timeout-…): BUILD_TREE/tests/fuzz/TARGET FILE repeats it.
set -euo pipefail
cmake=$1 tree=$2 target=$3
seconds=$(awk -v scale="${PAGEDKV_TEST_SCALE:-1}" 'BEGIN {print int(60 * (scale < 1 ? 1 : scale))}')
repeatable=()
[ "$seconds" -gt 60 ] || repeatable=(-seed=1 -runs=5000)

[ -e "$tree/CMakeCache.txt" ] || {
  echo "no fuzz build in $tree: scripts/setup.sh --tests, cmake --preset fuzz, cmake --build --preset fuzz"
  exit 77
}
"$cmake" --build "$tree" --target "$target" >"$tree/build.log" 2>&1 || { tail -n 40 "$tree/build.log"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export UBSAN_OPTIONS=print_stacktrace=1
"$tree/tests/fuzz/$target" "$work" "$(dirname "$0")/corpus" -max_total_time="$seconds" "${repeatable[@]}" -max_len=2048 -timeout=20 \
  -rss_limit_mb=3000 -artifact_prefix="$tree/" -print_final_stats=1 >"$work/log" 2>&1 || { tail -n 60 "$work/log"; exit 1; }
executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/log")
echo "[ COUNT    ] $executed inputs fuzzed in at most $seconds s: no crash, no sanitizer report"
[ "$executed" -gt 0 ]
