#!/usr/bin/env bash
# Builds examples/engine outside of this project and runs it.
#   outside_project.sh WAY BUILD FOLDER COMPILER CMAKE
# WAY: shared, static (find_package), subdirectory (add_subdirectory), pkg-config, pkg-config-static. The library is
# installed from BUILD into FOLDER and moved once, since an installed tree may be.
set -euo pipefail
way=$1 build=$2 folder=$3 compiler=$4 cmake=$5
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ "$way" = subdirectory ] && [ "${PAGEDKV_TEST_SCALE:-1}" -lt 10 ]; then
  echo "builds the whole library once more: only with PAGEDKV_TEST_SCALE of 10 or more"
  exit 77
fi
rm -rf "$folder"
mkdir -p "$folder/project"
cp "$root"/examples/engine/* "$folder/project"
cd "$folder"
prefix="$folder/moved here/usr"
if [ "$way" != subdirectory ]; then
  "$cmake" --install "$build" --component library --prefix "$folder/installed/usr" >/dev/null
  mv installed "moved here"
fi

by_cmake() {
  CXX=$compiler "$cmake" -S project -B out -DCMAKE_BUILD_TYPE=Release "$@" >/dev/null
  "$cmake" --build out -j 2 >/dev/null
  program=out/engine
}
case $way in
  shared) by_cmake "-DCMAKE_PREFIX_PATH=$prefix" ;;
  static) by_cmake "-DCMAKE_PREFIX_PATH=$prefix" -DBUILD_SHARED_LIBS=OFF ;;
  subdirectory) by_cmake "-DPAGEDKV_SOURCE_DIR=$root" ;;
  pkg-config*)
    command -v pkg-config >/dev/null || { echo "no pkg-config"; exit 77; }
    PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name pagedkv.pc)")
    export PKG_CONFIG_PATH
    static=()
    [ "$way" = pkg-config ] || static=(--static)
    # A path with a blank comes quoted for a shell.
    eval "flags=($(pkg-config "${static[@]}" --cflags --libs pagedkv))"
    if [ "$way" = pkg-config ]; then
      flags+=("-Wl,-rpath,$(dirname "$PKG_CONFIG_PATH")")
    else
      rm "$(dirname "$PKG_CONFIG_PATH")"/libpagedkv.so*
    fi
    "$compiler" -std=c++20 -O1 project/engine.cpp "${flags[@]}" -o engine
    program=./engine
    ;;
esac
needed=$(readelf -d "$program" | grep -c 'libpagedkv\.so\.0\.1' || true)
case $way in shared | pkg-config) want=1 ;; *) want=0 ;; esac
[ "$needed" = "$want" ] || { echo "needs libpagedkv.so: $needed, expected $want"; exit 1; }
"$program" | tee answer.txt
grep -q "the same tokens" answer.txt
