// Where a sequence's tokens live: tokens to slots, for the kernels, through one block-table row.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/visibility.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv::cpu {

class TokenRows {
 public:
  // `range` is what the work may look at: pages outside it may be missing from the table.
  TokenRows(const PageId* pages, int page_size, TokenRange range) noexcept
      : pages_(pages),
        page_size_(page_size),
        shift_(std::has_single_bit(page_size_) ? std::countr_zero(page_size_) : -1),
        range_(range) {}

  // Tiles never straddle a page.
  bool whole_tiles() const noexcept { return page_size_ % kTile == 0; }

  int64_t clamp(int64_t token) const noexcept {
    return std::clamp(token, range_.first, range_.last - 1);
  }

  // token must be in range, which must not be empty.
  int64_t slot(int64_t token) const noexcept {
    const auto t = static_cast<uint32_t>(token);  // sequence lengths are int32
    const uint32_t page = shift_ >= 0 ? t >> shift_ : t / page_size_;
    return int64_t{pages_[page]} * page_size_ + (t - page * page_size_);
  }

  // The slots of the 16 tokens from `first`, a multiple of 16, of which some are in range. A token out of range gets a
  // slot that may be read but whose content means nothing.
  void slots(int64_t first, int64_t* out) const noexcept {
    if (whole_tiles()) {
      const int64_t base = slot(clamp(first)) - (clamp(first) - first);
      for (int t = 0; t < kTile; ++t) out[t] = base + t;
    } else {
      for (int t = 0; t < kTile; ++t) out[t] = slot(clamp(first + t));
    }
  }

 private:
  const PageId* pages_;
  uint32_t page_size_;
  int shift_;  // log2 of page_size, or -1: a division for each tile shows in short heads
  TokenRange range_;
};

}  // namespace pagedkv::cpu
