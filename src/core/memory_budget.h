// How much memory this process may still take, as the kernel and its cgroups tell it, and how much of it a pool.
//
// Read anew at each call: about ten small files of /proc and /sys. Thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "pagedkv/core/page_pool.h"

namespace pagedkv {

inline constexpr int64_t kUnlimitedBytes = std::numeric_limits<int64_t>::max();

// min over
//   MemAvailable of /proc/meminfo, and
//   limit - usage + inactive_file of the process's memory cgroup and of each of its ancestors
//   (v2: memory.max, memory.current; v1: memory.limit_in_bytes, memory.usage_in_bytes),
// never negative. inactive_file is page cache that the kernel drops before it refuses memory. What
// cannot be read does not limit: with nothing readable the answer is kUnlimitedBytes.
// `root` is put before every path that is read (tests).
int64_t available_memory(const std::string& root = {});

// The most it may use in all: the least of MemTotal and the limits of the same cgroups.
int64_t memory_limit(const std::string& root = {});

// With vm.overcommit_memory = 2 the kernel refuses writable memory beyond CommitLimit, touched or not: what is left of
// it. kUnlimitedBytes in the other modes.
int64_t commit_room(const std::string& root = {});

// The most bytes a pool may have committed.
struct PoolLimit {
  int64_t bytes;
  bool by_machine;  // else by max_bytes
};

// For a pool that has `committed` bytes on a machine that can give `available` more.
PoolLimit pool_limit(const PagePoolOptions& options, int64_t available, int64_t committed) noexcept;

}  // namespace pagedkv
