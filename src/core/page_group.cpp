#include "core/page_group.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/page_layout.h"

namespace pagedkv {
namespace {

// splitmix64 (Steele, Lea, Flood 2014).
uint64_t next_random(uint64_t& state) noexcept {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

void fail(const std::string& fault) { throw std::logic_error("page pool: " + fault); }

}  // namespace

PageGroup::PageGroup(const LayerGroupSpec& spec, int page_size, int64_t num_pages,
                     int64_t max_pages)
    : sliding_window_(spec.sliding_window),
      page_bytes_(group_page_bytes(spec, page_size)),
      capacity_(num_pages),
      max_pages_(max_pages) {
  for (const LayerSpec& l : spec.layers) {
    LayerPages pages;
    pages.page_size = page_size;
    pages.num_kv_heads = l.num_kv_heads;
    pages.keys = make_array(l.key_format, l.key_head_dim, l.num_kv_heads, page_size);
    pages.values = make_array(l.value_format, l.value_head_dim, l.num_kv_heads, page_size);
    layers_.push_back(pages);
  }
}

std::byte* PageGroup::add_array(int64_t page_bytes) {
  return arrays_.emplace_back(page_bytes, max_pages_).data();
}

PageArray PageGroup::make_array(PageFormat format, int head_dim, int num_kv_heads, int page_size) {
  const PageBytes bytes = pagedkv::page_bytes(format, head_dim, num_kv_heads, page_size);
  PageArray array;
  array.format = format;
  array.head_dim = head_dim;
  array.data = add_array(bytes.rows);
  if (bytes.scales > 0) array.scales = reinterpret_cast<float*>(add_array(bytes.scales));
  return array;
}

int64_t PageGroup::reserved_bytes() const noexcept {
  int64_t sum = 0;
  for (const PageMemory& array : arrays_) sum += array.reserved_bytes();
  return sum;
}

int64_t PageGroup::resident_bytes() const {
  int64_t sum = 0;
  for (const PageMemory& array : arrays_) sum += array.resident_bytes();
  return sum;
}

void PageGroup::reserve_lists(int64_t num_pages) {
  references_.reserve(static_cast<size_t>(num_pages));
  flags_.reserve(static_cast<size_t>(num_pages));
  free_.reserve(static_cast<size_t>(num_pages));
}

int PageGroup::try_open(int64_t num_pages) noexcept {
  int error = 0;
  for (size_t i = 0; i < arrays_.size() && error == 0; ++i) error = arrays_[i].try_open(num_pages);
  return error;
}

int PageGroup::try_commit(int64_t num_pages) noexcept {
  int error = 0;
  for (size_t i = 0; i < arrays_.size() && error == 0; ++i)
    error = arrays_[i].try_commit(num_pages);
  return error;
}

void PageGroup::decommit_to(int64_t num_pages) noexcept {
  for (PageMemory& array : arrays_) array.decommit_to(num_pages);
}

bool PageGroup::shrink_to(int64_t num_pages) noexcept {
  int64_t kept = num_committed();
  while (kept > num_pages && references_[kept - 1] == 0 && !is_kept(static_cast<PageId>(kept - 1)))
    --kept;
  const bool gives_back = kept < num_committed();
  if (gives_back) {
    std::erase_if(free_, [&](PageId page) { return page >= kept; });
    references_.resize(static_cast<size_t>(kept));
    flags_.resize(static_cast<size_t>(kept));
    decommit_to(kept);
  }
  capacity_ = std::min(capacity_, std::max(num_pages, kept));
  return gives_back;
}

void PageGroup::add_committed(int64_t num_pages) noexcept {
  const int64_t first = num_committed();
  references_.resize(static_cast<size_t>(num_pages), 0);
  flags_.resize(static_cast<size_t>(num_pages), 0);
  // At the bottom of the stack, so that what is already warm is taken first.
  free_.insert(free_.begin(), static_cast<size_t>(num_pages - first), 0);
  for (int64_t i = 0; i < num_pages - first; ++i) free_[i] = static_cast<PageId>(num_pages - 1 - i);
}

void PageGroup::take(std::span<PageId> out, uint64_t* random) noexcept {
  assert(out.size() <= free_.size());
  for (PageId& page : out) {
    if (random != nullptr) std::swap(free_[next_random(*random) % free_.size()], free_.back());
    page = free_.back();
    free_.pop_back();
    references_[page] = 1;
  }
}

void PageGroup::add_reference(PageId page) noexcept {
  if (references_[page]++ > 0 || (flags_[page] & kKept) == 0) return;
  --num_cached_;
  keeper_->on_held(group_, page);
}

void PageGroup::drop_reference(PageId page) noexcept {
  if (--references_[page] > 0) return;
  if ((flags_[page] & kKept) == 0) return make_free(page);
  ++num_cached_;
  keeper_->on_cached(group_, page);
}

void PageGroup::make_free(PageId page) noexcept {
  if ((flags_[page] & kZeroed) != 0)
    for (const PageMemory& array : arrays_)
      std::memset(array.data() + page * array.page_bytes(), 0,
                  static_cast<size_t>(array.page_bytes()));
  flags_[page] = 0;
  free_.push_back(page);
}

void PageGroup::retain(std::span<const PageId> pages) {
  for (PageId page : pages)
    if (references(page) == 0 && !is_kept(page))
      throw std::invalid_argument("page " + std::to_string(page) +
                                  " is not held: it cannot be shared");
  for (PageId page : pages) add_reference(page);
}

// From the last to the first, so that a table's pages come out again in the order it had them, and that the page of a
// sequence's end is cached before those it builds on.
void PageGroup::release(std::span<const PageId> pages) {
  for (size_t i = 0; i < pages.size(); ++i) {  // first without effect, since it may be refused
    if (references(pages[i]) > 0) {
      --references_[pages[i]];
      continue;
    }
    for (size_t k = 0; k < i; ++k) ++references_[pages[k]];
    throw std::invalid_argument("page " + std::to_string(pages[i]) +
                                " is released more often than it is held");
  }
  for (PageId page : pages) ++references_[page];
  for (size_t i = pages.size(); i-- > 0;) drop_reference(pages[i]);
}

void PageGroup::keep(PageId page) {
  if (references(page) == 0)
    throw std::invalid_argument("page " + std::to_string(page) + " is not held: it cannot be kept");
  flags_[page] |= kKept;
}

void PageGroup::unkeep(PageId page) {
  if (!is_kept(page)) throw std::invalid_argument("page " + std::to_string(page) + " is not kept");
  flags_[page] &= static_cast<uint8_t>(~kKept);
  if (references_[page] > 0) return;
  --num_cached_;
  make_free(page);
}

void PageGroup::zero_when_freed(std::span<const PageId> pages) noexcept {
  for (PageId page : pages) flags_[page] |= kZeroed;
}

void PageGroup::copy_page(PageId from, PageId to) noexcept {
  for (const PageMemory& array : arrays_) {
    const int64_t bytes = array.page_bytes();
    std::memcpy(array.data() + to * bytes, array.data() + from * bytes, static_cast<size_t>(bytes));
  }
}

void PageGroup::verify(const std::vector<int32_t>* expected) const {
  const int64_t committed = num_committed();
  if (capacity_ < committed || capacity_ > max_pages_)
    fail("capacity " + std::to_string(capacity_) + " with " + std::to_string(committed) +
         " pages committed");
  if (free_.capacity() < references_.size()) fail("the free list has no room for every page");
  for (const PageMemory& array : arrays_)
    if (array.pages() != committed)
      fail("an array has " + std::to_string(array.pages()) + " of " + std::to_string(committed) +
           " pages");

  int64_t cached = 0;
  std::vector<bool> is_free(references_.size());
  for (PageId page : free_) {
    if (page < 0 || page >= committed)
      fail("free page " + std::to_string(page) + " does not exist");
    if (is_free[page]) fail("page " + std::to_string(page) + " is twice on the free list");
    is_free[page] = true;
  }
  for (int64_t page = 0; page < committed; ++page) {
    const int32_t count = references_[page];
    const bool kept = is_kept(static_cast<PageId>(page));
    cached += kept && count == 0;
    if (count < 0 || (count == 0 && !kept) != is_free[page])
      fail("page " + std::to_string(page) + " has " + std::to_string(count) + " references, is " +
           (kept ? "kept" : "not kept") + " and is " + (is_free[page] ? "free" : "not free"));
    const auto i = static_cast<size_t>(page);
    const int32_t wanted = expected == nullptr ? count : i < expected->size() ? (*expected)[i] : 0;
    if (count != wanted)
      fail("page " + std::to_string(page) + " has " + std::to_string(count) +
           " references, expected are " + std::to_string(wanted));
  }
  if (cached != num_cached_)
    fail(std::to_string(num_cached_) + " pages counted as cached, there are " +
         std::to_string(cached));
  if (expected != nullptr)
    for (size_t i = references_.size(); i < expected->size(); ++i)
      if ((*expected)[i] != 0)
        fail("page " + std::to_string(i) + " is expected to be held and has no memory");
}

}  // namespace pagedkv
