#include "core/page_set.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace pagedkv {
namespace {

size_t words(int64_t bits) noexcept { return static_cast<size_t>((bits + 63) / 64); }

}  // namespace

PageSet::PageSet(int64_t max_pages) {
  int64_t bits = max_pages;
  do {
    levels_.emplace_back();
    bits = static_cast<int64_t>(words(bits));
  } while (bits > 1);
}

void PageSet::reserve(int64_t num_pages) {
  for (auto& level : levels_) {
    const size_t size = words(num_pages);
    if (size > level.capacity()) level.reserve(std::max(size, 2 * level.capacity()));
    num_pages = static_cast<int64_t>(size);
  }
}

void PageSet::resize(int64_t num_pages) noexcept {
  num_pages_ = num_pages;
  for (auto& level : levels_) {
    level.resize(words(num_pages), 0);
    num_pages = static_cast<int64_t>(level.size());
  }
}

void PageSet::insert(int64_t page) noexcept {
  assert(page >= 0 && page < num_pages_ && !contains(page));
  ++size_;
  bound_ = std::min(bound_, page);
  for (auto& level : levels_) {
    uint64_t& word = level[static_cast<size_t>(page >> 6)];
    const bool was_empty = word == 0;
    word |= uint64_t{1} << (page & 63);
    if (!was_empty) return;
    page >>= 6;
  }
}

void PageSet::erase(int64_t page) noexcept {
  assert(page >= 0 && page < num_pages_ && contains(page));
  --size_;
  for (auto& level : levels_) {
    uint64_t& word = level[static_cast<size_t>(page >> 6)];
    word &= ~(uint64_t{1} << (page & 63));
    if (word != 0) return;
    page >>= 6;
  }
}

PageId PageSet::lowest() noexcept {
  const PageId page = at_or_after(bound_);
  if (page >= 0) bound_ = page;
  return page;
}

// Up to the first word that has a member on the wanted side, then down along its nearest bits.
PageId PageSet::at_or_after(int64_t page) const noexcept {
  page = std::max<int64_t>(page, 0);
  size_t up = 0;
  for (;; ++up) {
    if (up == levels_.size() || page >> 6 >= static_cast<int64_t>(levels_[up].size())) return -1;
    const uint64_t word = levels_[up][static_cast<size_t>(page >> 6)] >> (page & 63);
    if (word != 0) {
      page += std::countr_zero(word);
      break;
    }
    page = (page >> 6) + 1;
  }
  while (up-- > 0) page = page * 64 + std::countr_zero(levels_[up][static_cast<size_t>(page)]);
  return static_cast<PageId>(page);
}

PageId PageSet::at_or_before(int64_t page) const noexcept {
  page = std::min(page, num_pages_ - 1);
  size_t up = 0;
  for (;; ++up) {
    if (up == levels_.size() || page < 0) return -1;
    const uint64_t word = levels_[up][static_cast<size_t>(page >> 6)] << (63 - (page & 63));
    if (word != 0) {
      page -= std::countl_zero(word);
      break;
    }
    page = (page >> 6) - 1;
  }
  while (up-- > 0) page = page * 64 + 63 - std::countl_zero(levels_[up][static_cast<size_t>(page)]);
  return static_cast<PageId>(page);
}

bool PageSet::is_consistent() const noexcept {
  int64_t count = 0;
  for (const uint64_t word : levels_[0]) count += std::popcount(word);
  for (size_t up = 1; up < levels_.size(); ++up)
    for (size_t i = 0; i < levels_[up - 1].size(); ++i)
      if ((levels_[up - 1][i] != 0) != ((levels_[up][i / 64] >> (i % 64) & 1) != 0)) return false;
  return count == size_;
}

}  // namespace pagedkv
