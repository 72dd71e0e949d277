// Where a sliding window begins, in pages.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pagedkv/core/page_pool.h"

namespace pagedkv {

// The first page of a sequence with a token that a query at `position` sees, or the query's own. 0 without a window.
inline int64_t first_page_seen(const PagePool& pool, int group, int64_t position) noexcept {
  const int window = pool.sliding_window(group);
  return window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window) / pool.page_size();
}

}  // namespace pagedkv
