// How many bytes the pages of a layer take, and whether a pool of them can exist. Format of the
// bytes: docs/page-format.md.
#pragma once

#include <cstdint>

#include "pagedkv/core/page_pool.h"

namespace pagedkv {

// Bytes of one page in one array of a layer: codes or floats, and the scales beside them (0: none).
struct PageBytes {
  int64_t rows = 0;
  int64_t scales = 0;
};

PageBytes page_bytes(PageFormat format, int head_dim, int num_kv_heads, int page_size) noexcept;

// Over the arrays of all layers of a group.
int64_t group_page_bytes(const LayerGroupSpec& group, int page_size) noexcept;

// The most address space one array, and one page over all its layers, may ask for: what user space
// has on x86-64 and on arm64 with four-level tables.
inline constexpr int64_t kAddressSpace = int64_t{1} << 47;

// Throws std::invalid_argument, naming the value and its limits, unless every option is within its
// range and num_pages and max_pages fit the address space.
void check_options(const PagePoolOptions& options);

}  // namespace pagedkv
