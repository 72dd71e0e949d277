// A set of page ids that finds its lowest member, or the nearest one from any id, in a few loads: a bit for each id,
// and above it a bit for each word of 64 that is not empty, up to a single word. A million ids take 130 KB.
//
// Not thread-safe. Only reserve() allocates.
#pragma once

#include <cstdint>
#include <vector>

#include "pagedkv/kernels/pages.h"

namespace pagedkv {

class PageSet {
 public:
  // For ids below max_pages, which is at least 1.
  explicit PageSet(int64_t max_pages);

  // Makes room for ids below num_pages, so that resize() to them does not throw. Throws std::bad_alloc.
  void reserve(int64_t num_pages);
  // Ids are below num_pages from here on; members must be, and room must have been reserved.
  void resize(int64_t num_pages) noexcept;

  int64_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  bool contains(int64_t page) const noexcept {
    return (levels_[0][static_cast<size_t>(page >> 6)] >> (page & 63) & 1) != 0;
  }
  void insert(int64_t page) noexcept;  // not a member
  void erase(int64_t page) noexcept;   // a member

  PageId lowest() noexcept;  // -1: empty
  // The nearest member that is >= page, or <= page; -1 where there is none. `page` need not be below num_pages.
  PageId at_or_after(int64_t page) const noexcept;
  PageId at_or_before(int64_t page) const noexcept;

  // Recounts; false when size() or an upper level is wrong.
  bool is_consistent() const noexcept;

 private:
  std::vector<std::vector<uint64_t>> levels_;  // [0]: a bit for each id; the last is one word
  int64_t num_pages_ = 0;
  int64_t size_ = 0;
  int64_t bound_ = 0;  // no member is lower: lowest() begins here
};

}  // namespace pagedkv
