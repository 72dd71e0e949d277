#!/usr/bin/env bash
# Builds llama.cpp's own programs from the sources that pagedkv's libraries come from, to measure against:
# llama-bench, llama-completion, llama-perplexity, llama-quantize, llama-server (without its page); and with the same
# libraries ggml_attention, ours. Prints the folder they are in; all else goes to stderr.
#   bench/peers/build.sh [default|ours]
# default: llama.cpp's default flags (shared libraries, OpenMP); ours: the flags of pagedkv's copy (static, ggml's own
# threads). Each is built once into the cache folder.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../scripts/lib.sh"

flavour=${1:-default}
"$root/scripts/setup.sh"
use_venv
mapfile -t our_flags < <(cmake -P "$root/cmake/LlamaFlags.cmake")
version=$(sed -n 's/^set(PAGEDKV_LLAMA_VERSION \([0-9.]*\)).*/\1/p' "$root/cmake/LlamaFlags.cmake")
source=${PAGEDKV_LLAMA_SOURCE_DIR:-$cache_dir/sources/llama_cpp_python-$version/vendor/llama.cpp}

# Leaving out other programs changes nothing in those that are built.
server=(-DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF)  # its page would be downloaded
flags=(-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "${server[@]}" -DGGML_CCACHE=OFF)
case $flavour in
  default) ;;
  ours) flags=("${our_flags[@]}" -DLLAMA_BUILD_TOOLS=ON "${server[@]}") ;;
  *) say "usage: $(basename "$0") [default|ours]"; exit 2 ;;
esac

# What the compiler makes of -march=native is part of the folder's name: another machine needs its own build.
native=$({ c++ --version; c++ -march=native -Q --help=target; echo "$source" "${flags[@]}"; } | sha256sum | cut -c1-12)
folder=$cache_dir/peers/$flavour-$version-$native
mkdir -p "$folder"
exec 9> "$folder/.lock"
flock 9
programs=(llama-bench llama-completion llama-perplexity llama-quantize llama-server)
if [ "$(cat "$folder/complete" 2>/dev/null)" != "${programs[*]}" ]; then
  {
    cmake -S "$source" -B "$folder" -G Ninja "${flags[@]}"
    cmake --build "$folder" --target "${programs[@]}"
  } >&2
  echo "${programs[*]}" > "$folder/complete"
fi

# Ours, built again when its sources change.
sources=("$root"/bench/peers/ggml_attention.cpp "$root"/src/{apps/attention_case,apps/measure,base/page_format,base/quant_words}.cpp)
stamp=$(cat "${sources[@]}" "$root"/src/apps/{attention_case,measure}.h | sha256sum)
if [ "$(cat "$folder/ggml_attention.stamp" 2>/dev/null)" != "$stamp" ]; then
  mapfile -t libraries < <(find "$folder/bin" "$folder/ggml/src" -maxdepth 1 -regextype egrep \
    -regex '.*/libggml(-base|-cpu)?\.(so|a)')
  c++ -std=c++20 -O2 -I"$root/include" -I"$root/src" -isystem "$source/ggml/include" "${sources[@]}" \
    -o "$folder/bin/ggml_attention" -Wl,--start-group "${libraries[@]}" -Wl,--end-group -Wl,-rpath,'$ORIGIN' -pthread -ldl >&2
  echo "$stamp" > "$folder/ggml_attention.stamp"
fi
echo "$folder/bin"
