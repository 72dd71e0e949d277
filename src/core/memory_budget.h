// How much memory this process may still take, as the kernel and its cgroups tell it.
//
// Read anew at each call: about ten small files of /proc and /sys. Thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

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

}  // namespace pagedkv
