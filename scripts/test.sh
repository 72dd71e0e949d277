#!/usr/bin/env bash
# Sets up, builds the ci preset (warnings are errors), the kernels for AArch64 and the fuzzer, makes the test models and
# runs every test.
#   scripts/test.sh         what CI runs
#   scripts/test.sh --all   the random tests and the fuzzer ten times as long, then all tests of the kernels on AArch64
#                           (QEMU), all tests under AddressSanitizer + UBSan and under ThreadSanitizer, a short run of
#                           the benchmark, the wheel in fresh environments, and MTPLX's own tests with our cache;
#                           installs Chromium, without which the test of the chat page is skipped
# Ends with what was counted and ctest's closing lines; exit status 0 only if everything passed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

all=no
case ${1:-} in
  '') ;;
  --all) all=yes ;;
  *) say "usage: $(basename "$0") [--all]"; exit 2 ;;
esac

models=$root/build/test-models
logs=$root/build/test-logs

# newer TARGET SOURCE...: whether TARGET exists and is newer than all sources
newer() {
  local target=$1 source
  shift
  [ -e "$target" ] || return 1
  for source; do [ "$target" -nt "$source" ] || return 1; done
}

# make_f32.py reads the models back to float32; every other tools/make_*.py takes the folder to write into.
make_models() {
  mkdir -p "$models"
  local model maker target
  for model in "$small_model" "$gemma_model"; do
    ln -sfn "$model" "$models/$(basename "$model")"
    target=$(basename "$model")
    target=$models/${target%.*.gguf}.F32.gguf
    if newer "$target" "$model" "$root/tools/make_f32.py"; then continue; fi
    say "making $(basename "$target")"
    "$venv/bin/python" "$root/tools/make_f32.py" "$model" "$target"
  done
  for maker in "$root"/tools/make_*.py; do
    target=$models/.$(basename "$maker" .py)
    if [ "$maker" = "$root/tools/make_f32.py" ] || newer "$target" "$root"/tools/*.py; then continue; fi
    say "making test models: $(basename "$maker")"
    "$venv/bin/python" "$maker" "$models"
    touch "$target"
  done
}

# ThreadSanitizer cannot place its shadow memory when the kernel randomises addresses widely.
without_randomisation() {
  if setarch -R true 2>/dev/null; then setarch -R "$@"; else "$@"; fi
}

build() {
  (cd "$root" && cmake --preset "$1" && without_randomisation cmake --build --preset "$1")
}

# What tests of the ci preset run from other build trees; where a tool is missing they say so and are skipped.
build_what_ci_runs() {
  if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then build aarch64; fi
  if echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
    clang++ -x c++ - -fsanitize=fuzzer,address -o /dev/null 2>/dev/null; then build fuzz; fi
}

# run_tests PRESET [ctest arguments]: 0 if all pass; the output goes to the screen and a log
run_tests() {
  local preset=$1
  shift
  say "tests of preset $preset"
  mkdir -p "$logs"
  (cd "$root" && without_randomisation ctest --preset "$preset" --no-tests=error -j 2 "$@") 2>&1 |
    tee "$logs/$preset.log"
}

# The benchmark runs, and its JSON has what llama-bench's has.
bench_smoke() {
  "$root/build/ci/apps/pagedkv" bench -m "$small_model" -p 32 -n 8 -r 2 -t 1 -o json |
    "$venv/bin/python" -c '
import json, sys
rows = json.load(sys.stdin)
assert {(row["n_prompt"], row["n_gen"]) for row in rows} == {(32, 0), (0, 8)}, rows
assert all(row["avg_ts"] > 0 for row in rows), rows'
}

# mtplx's own tests with our class in the place of its: those files whose tests make an instance of it.
mtplx_tests() {
  PYTHONPATH=$root/build/ci/python "$venv/bin/python" "$root/tests/python/run_mtplx_tests.py" "$root/build/mtplx-tests" \
    --files cache_state graphbank_compiled_verify kv_attention_trace_526 kv_quant_memory kv_quant_meta_state_rewind_526 \
    kv_quant_q4_kernel_route promoted_paged_capacity_526 turboquant_fallback
}

# How many cases the tests have counted: "[ COUNT    ] 200 …", "12 traces, …", "40 of 41 cases …".
counts() {
  grep -hE '^(\[ COUNT |[0-9]+ (of [0-9]+ )?(cases|traces)\b)' "$root/build/$1/Testing/Temporary/LastTest.log" || true
}
closing_lines() { sed -n '/% tests passed/,$p' "$logs/$1.log"; }

if [ $all = yes ]; then "$root/scripts/setup.sh" --all; else "$root/scripts/setup.sh" --tests; fi
use_venv
rm -rf "$logs"
make_models
build ci
build_what_ci_runs

failed=()
if [ $all = no ]; then
  run_tests ci || exit 1
  counts ci
  closing_lines ci
  exit 0
fi

bench_smoke || failed+=("benchmark")
"$root/tests/python/check_wheel.sh" "$root/build/wheel-check" || failed+=("wheel")
mtplx_tests || failed+=("mtplx's tests")
PAGEDKV_TEST_SCALE=10 PAGEDKV_SOAK_SECONDS=60 run_tests ci || failed+=("ci")
if [ -e "$root/build/aarch64" ]; then run_tests aarch64 || failed+=("aarch64"); fi
soak_seconds=600
for preset in asan tsan; do
  # Real models are for the ci preset: a sanitizer makes them many times slower and sees the same code in tiny ones.
  { build $preset && PAGEDKV_SOAK_SECONDS=$soak_seconds run_tests $preset -E '^acceptance\.'; } || failed+=("$preset")
  soak_seconds=180
done
say "failed: ${failed[*]:-nothing}"
for preset in tsan asan aarch64 ci; do
  [ ! -e "$logs/$preset.log" ] || { echo "$preset:"; counts $preset; closing_lines $preset; }
done
[ ${#failed[@]} -eq 0 ]
