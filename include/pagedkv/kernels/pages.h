// Views of one layer's pages. They own nothing; the pool that made them must outlive them. Growth of
// the pool never moves what they point to.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedkv/base/page_format.h"

namespace [[gnu::visibility("default")]] pagedkv {

using PageId = int32_t;                // a page of a layer group; valid in every layer of the group
inline constexpr PageId kNoPage = -1;  // block-table entry whose page was given back: never read

// The K or the V pages of one layer.
struct PageArray {
  // [num_pages, page_size, num_kv_heads, row_bytes(format, head_dim)], C order; 64 more bytes after the
  // last page may be read.
  std::byte* data = nullptr;
  // [num_pages, page_size, num_kv_heads, 1]; null where the format has none.
  float* scales = nullptr;
  PageFormat format = PageFormat::kF16;
  int head_dim = 0;  // 1..512
};

struct LayerPages {
  PageArray keys, values;  // head_dim and format may differ
  int page_size = 16;      // tokens, 1..256
  int num_kv_heads = 0;
};

}  // namespace pagedkv
