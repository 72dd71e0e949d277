#!/usr/bin/env bash
# Fuzzes for a minute, or PAGEDKV_TEST_SCALE minutes, from the inputs in tests/fuzz/corpus.
#   run.sh CMAKE BUILD_TREE TARGET
# What breaks it is kept as BUILD_TREE/crash-… (or leak-, oom-, timeout-…): BUILD_TREE/tests/fuzz/TARGET FILE repeats it.
set -euo pipefail
cmake=$1 tree=$2 target=$3
seconds=$(awk -v scale="${PAGEDKV_TEST_SCALE:-1}" 'BEGIN {print int(60 * (scale < 1 ? 1 : scale))}')

[ -e "$tree/CMakeCache.txt" ] || {
  echo "no fuzz build in $tree: scripts/setup.sh --tests, cmake --preset fuzz, cmake --build --preset fuzz"
  exit 77
}
"$cmake" --build "$tree" --target "$target" >"$tree/build.log" 2>&1 || { tail -n 40 "$tree/build.log"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export UBSAN_OPTIONS=print_stacktrace=1
"$tree/tests/fuzz/$target" "$work" "$(dirname "$0")/corpus" -max_total_time="$seconds" -max_len=2048 -timeout=20 \
  -rss_limit_mb=3000 -artifact_prefix="$tree/" -print_final_stats=1 >"$work/log" 2>&1 || { tail -n 60 "$work/log"; exit 1; }
executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/log")
echo "[ COUNT    ] $executed inputs fuzzed in $seconds s: no crash, no sanitizer report"
[ "$executed" -gt 0 ]
