// What the tests of core share: small pools, and a budget that no machine takes part in.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "pagedkv/core/page_pool.h"

namespace pagedkv::testing {

// How often the random loops run, as a share of their usual count (PAGEDKV_TEST_SCALE, at least one
// round).
inline int scaled(int rounds) {
  const char* text = std::getenv("PAGEDKV_TEST_SCALE");
  const double scale = text != nullptr ? std::atof(text) : 1.0;
  return scale > 0 ? std::max(1, static_cast<int>(rounds * scale)) : rounds;
}

inline LayerSpec layer(int heads, int head_dim, PageFormat format = PageFormat::kF16) {
  return {heads, head_dim, head_dim, format, format};
}

inline LayerGroupSpec group(int num_layers, LayerSpec spec, int window = 0) {
  return {window, std::vector<LayerSpec>(static_cast<size_t>(num_layers), spec)};
}

// A pool of one group on a machine without limits.
inline PagePoolOptions options(int32_t num_pages, int page_size = 16,
                               LayerGroupSpec layers = group(2, layer(1, 32))) {
  PagePoolOptions o;
  o.groups = {std::move(layers)};
  o.page_size = page_size;
  o.num_pages = num_pages;
  o.max_pages = 4096 + num_pages;
  o.available_bytes = [] { return std::numeric_limits<int64_t>::max(); };
  return o;
}

// What the kernel may hold beyond the committed bytes of `num_arrays` arrays: whole OS pages and
// the slack behind the last page; up to the boundary where huge pages come unasked and an array is
// large enough.
inline int64_t resident_rounding(int64_t num_arrays, int64_t array_bytes) {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string setting;
  std::getline(file, setting);
  const bool huge =
      array_bytes >= (int64_t{2} << 20) && setting.find("[always]") != std::string::npos;
  return num_arrays * ((huge ? int64_t{256} << 10 : 0) + 2 * int64_t{sysconf(_SC_PAGESIZE)});
}

// Of this process, of which the kernel allows vm.max_map_count.
inline int64_t num_mappings() {
  std::ifstream file("/proc/self/maps");
  std::string line;
  int64_t count = 0;
  while (std::getline(file, line)) ++count;
  return count;
}

inline std::vector<PageId> take(PagePool& pool, int64_t count, int group = 0, int64_t room = 0) {
  std::vector<PageId> pages(static_cast<size_t>(count), -1);
  if (!pool.try_allocate(group, pages, room)) pages.clear();
  return pages;
}

// A number of KiB in a file of /proc; -1 without it.
inline int64_t kib_in(const char* path, const char* key) {
  std::ifstream file(path);
  std::string word;
  int64_t value = -1;
  while (file >> word)
    if (word == key && file >> value) break;
  return value;
}

inline int64_t status_kib(const char* key) { return kib_in("/proc/self/status", key); }

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // maps memory of its own
#else
inline constexpr bool kSanitized = false;
#endif

inline bool operator==(const PagePoolStats& a, const PagePoolStats& b) {
  return a.pages_capacity == b.pages_capacity && a.pages_committed == b.pages_committed &&
         a.pages_held == b.pages_held && a.pages_peak == b.pages_peak &&
         a.bytes_reserved == b.bytes_reserved && a.bytes_committed == b.bytes_committed &&
         a.bytes_in_use == b.bytes_in_use && a.bytes_peak == b.bytes_peak &&
         a.bytes_moved == b.bytes_moved && a.allocations == b.allocations &&
         a.grow_events == b.grow_events && a.commit_events == b.commit_events;
}

}  // namespace pagedkv::testing
