# Shared by the scripts of this folder (bash, sourced). Sets root, cache_dir and PATH; prints to stderr only.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache_dir=$("$root/scripts/cache_dir.sh")
export PAGEDKV_CACHE_DIR=$cache_dir  # so that CMake and pagedkv itself look where the scripts put things
venv=$root/.venv
small_model=$cache_dir/models/SmolLM2-135M-Instruct.Q4_1.gguf
gemma_model=$cache_dir/models/gemma-3-270m.Q4_K_M.gguf

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

# What setup.sh has put into .venv goes first: the pinned CMake, Ninja and clang-format.
use_venv() { export PATH=$venv/bin:$PATH; }

# Compile jobs: the CPUs we may use, but no more than memory carries (the largest source files take about 1 GiB).
build_jobs() {
  local cpus memory_kb by_memory
  cpus=$(nproc)
  memory_kb=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  by_memory=$((${memory_kb:-4194304} / 1048576))
  echo $((by_memory < 1 ? 1 : by_memory < cpus ? by_memory : cpus))
}
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(build_jobs)}
