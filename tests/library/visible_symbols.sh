#!/usr/bin/env bash
# The shared library shows names of namespace pagedkv that its public headers declare, and nothing of its own making:
# no Impl, no private class, no Highway.
#   visible_symbols.sh LIBRARY
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# Functions that the library itself defines; what the compiler instantiates (W, V, u) is the standard library's.
shown=$(nm -DC --defined-only "$1" | awk '$2 == "T" { $1 = $2 = ""; print }')
[ "$(wc -l <<< "$shown")" -gt 50 ]
strange=$(grep -vE '^ *pagedkv::' <<< "$shown" || true)
hidden=$(grep -E 'Impl::|::(cpu|reference|avx2|avx512|N_AVX[0-9]*)::' <<< "$shown" || true)
undeclared=
for name in $(sed -E 's/^ *pagedkv::([A-Za-z_]+(::~?[A-Za-z_]+)?).*/\1/' <<< "$shown" | sort -u); do
  last=${name##*::}
  grep -rqw -- "${last#\~}" "$root/include/pagedkv" || undeclared+=" $name"
done
if [ -n "$strange$hidden$undeclared" ]; then
  echo "outside of pagedkv: $strange"
  echo "private: $hidden"
  echo "in no public header:$undeclared"
  exit 1
fi
