#!/usr/bin/env bash
# Sets up, builds and lets the small model answer a prompt, its keys and values living in our pages.
#   scripts/demo.sh ["prompt"]
# stdout: the answer alone. Everything else goes to stderr.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Greedy, so that everyone reads the same; the penalty keeps a model this small from going round in circles.
prompt=${1:-What is the capital of France? Answer in one sentence.}
{
  "$root/scripts/setup.sh"
  use_venv
  cmake -S "$root" --preset release
  cmake --build "$root/build/release" --target pagedkv
} >&2
exec "$root/build/release/apps/pagedkv" run -m "$small_model" --temperature 0 --repetition-penalty 1.1 -n 128 \
  -- "$prompt"
