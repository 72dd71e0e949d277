#!/usr/bin/env bash
# Runs one test program as built for this machine and as built for AArch64, and compares the bits that both report.
#   run.sh CMAKE AARCH64_BUILD_TREE PROGRAM AARCH64_PROGRAM      the last relative to the build tree
set -euo pipefail
cmake=$1 tree=$2 here=$3 there=$4

[ -e "$tree/CMakeCache.txt" ] || {
  echo "no AArch64 build in $tree: scripts/setup.sh --tests, cmake --preset aarch64, cmake --build --preset aarch64"
  exit 77
}
"$cmake" --build "$tree" --target "$(basename "$there")" >"$tree/neon.log" 2>&1 || { tail -n 40 "$tree/neon.log"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PAGEDKV_CASE_BITS=$work/here "$here" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
PAGEDKV_CASE_BITS=$work/there qemu-aarch64 -L /usr/aarch64-linux-gnu "$tree/$there"
diff "$work/here" "$work/there" || { echo "AArch64 and this machine differ: < here, > there"; exit 1; }
echo "[ COUNT    ] $(wc -l <"$work/there") kernel cases have the same bits on AArch64 (QEMU) and on $(uname -m)"
