#!/usr/bin/env bash
# Counts instructions of attention, which no other program on the machine disturbs: one JSON object a line, with the
# instructions for each token that a query sees (all heads together).
#   bench/attention/instructions.sh [ATTENTION_BENCH]
# On the avx2 set: valgrind, which it needs, knows no AVX-512. Sizes are small, since it takes about 50 times as long.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bench=${1:-$root/build/release/bench/attention/attention_bench}
command -v valgrind >/dev/null || { echo "$(basename "$0"): needs valgrind" >&2; exit 1; }
[ -x "$bench" ] || { echo "$(basename "$0"): no $bench: build attention_bench, or name it" >&2; exit 1; }

counts=$(mktemp)
trap 'rm -f "$counts"' EXIT
for words in "heads=32/8 dims=128/128 seqs=2048:1" "heads=9/3 dims=64/64 seqs=2048:1" \
  "heads=32/32 dims=128/128 seqs=1024:1" "heads=9/3 dims=64/64 seqs=512:128"; do
  for format in f16 q8 q6 q4; do
    line=$(valgrind --quiet --tool=callgrind --toggle-collect=pagedkv_timed_call \
      --callgrind-out-file="$counts" "$bench" --case "keys=$format values=$format $words" --set avx2 --runs 1 \
      --no-check --no-peaks)
    instructions=$(sed -n 's/^totals: //p' "$counts")
    [ "${instructions:-0}" -gt 0 ] || { echo "$(basename "$0"): nothing was counted" >&2; exit 1; }
    python3 - "$line" "$instructions" <<'PY'
import json, sys
line, instructions = json.loads(sys.argv[1]), int(sys.argv[2])
print(json.dumps({"case": line["case"], "kernel_set": line["kernel_set"], "instructions": instructions,
                  "visible_tokens": line["visible_tokens"],
                  "instructions_per_token": round(instructions / line["visible_tokens"], 1)}), flush=True)
PY
  done
done
