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

// A run of free pages inside the extent gives its memory back when at least 7 in 8 of its bytes come free: what the
// kernel holds then stays near what counts as committed. The rest lies in OS pages that neighbours share.
bool is_worth_it(int64_t freed, int64_t run_bytes) noexcept { return freed >= run_bytes / 8 * 7; }

void fail(const std::string& fault) { throw std::logic_error("page pool: " + fault); }

}  // namespace

PageGroup::PageGroup(const LayerGroupSpec& spec, int page_size, int64_t num_pages,
                     int64_t max_pages)
    : sliding_window_(spec.sliding_window),
      page_bytes_(group_page_bytes(spec, page_size)),
      capacity_(num_pages),
      max_pages_(max_pages),
      free_(max_pages),
      absent_(max_pages) {
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
  free_.reserve(num_pages);
  absent_.reserve(num_pages);
}

// ---- commits

template <class Visit>
void PageGroup::for_each_restored(int64_t num_pages, const Visit& visit) const noexcept {
  int64_t left = num_pages - num_committed();
  for (PageId first = absent_.at_or_after(0); first >= 0 && left > 0;) {
    const PageRange hole = hole_with({first, first});
    visit(hole, std::min(left, hole.size()));
    left -= hole.size();
    first = absent_.at_or_after(hole.last);
  }
}

int PageGroup::try_open(int64_t num_pages) noexcept {
  int error = 0;
  for (size_t i = 0; i < arrays_.size() && error == 0; ++i) error = arrays_[i].try_open(num_pages);
  return error;
}

int PageGroup::try_commit(int64_t num_pages) noexcept {
  int error = 0;
  for (PageMemory& array : arrays_) {
    for_each_restored(num_pages, [&](PageRange hole, int64_t count) {
      if (error == 0) error = array.try_restore(hole, count);
    });
    if (error == 0) error = array.try_commit(std::max(extent(), num_pages));
    if (error != 0) break;
  }
  return error;
}

void PageGroup::undo_commit(int64_t num_pages) noexcept {
  for (PageMemory& array : arrays_) {
    array.decommit_to(extent());
    for_each_restored(num_pages, [&](PageRange hole, int64_t count) {
      array.try_give_back({hole.first, hole.first + count}, hole);
    });
  }
}

void PageGroup::add_committed(int64_t num_pages) noexcept {
  for (int64_t left = num_pages - num_committed(); left > 0 && !absent_.empty(); --left) {
    const PageId page = absent_.lowest();
    absent_.erase(page);
    free_.insert(page);
  }
  const int64_t first = extent();
  resize(std::max(first, num_pages));
  for (int64_t page = first; page < extent(); ++page) free_.insert(page);
  if (absent_.empty())
    for (PageMemory& array : arrays_) array.use_huge_pages(true);
}

void PageGroup::resize(int64_t num_pages) noexcept {
  references_.resize(static_cast<size_t>(num_pages), 0);
  flags_.resize(static_cast<size_t>(num_pages), 0);
  free_.resize(num_pages);
  absent_.resize(num_pages);
}

// ---- giving back

// `run` and the absent pages on both sides of it.
PageRange PageGroup::hole_with(PageRange run) const noexcept {
  while (run.first > 0 && absent_.contains(run.first - 1)) --run.first;
  while (run.last < extent() && absent_.contains(run.last)) ++run.last;
  return run;
}

// Of the free pages with memory that end before `last`: at most `most`.
int64_t PageGroup::free_run_start(int64_t last, int64_t most) const noexcept {
  const int64_t lowest = std::max<int64_t>(0, last - most);
  while (last > lowest && free_.contains(last - 1)) --last;
  return last;
}

int64_t PageGroup::cut_to(int64_t num_pages) noexcept {
  int64_t end = extent();
  while (end > num_pages && is_free(end - 1)) --end;
  if (end == extent()) return 0;
  while (end > 0 && absent_.contains(end - 1)) --end;  // the last page has its memory
  const int64_t before = num_committed();
  for (int64_t page = end; page < extent(); ++page)
    (free_.contains(page) ? free_ : absent_).erase(page);
  resize(end);
  for (PageMemory& array : arrays_) {
    array.decommit_to(end);
    if (absent_.empty()) array.use_huge_pages(true);
  }
  return before - num_committed();
}

int64_t PageGroup::give_back(int64_t keep, int64_t most) noexcept {
  int64_t given = 0;
  for (int64_t end = extent(); end > 0;) {
    const int64_t left = std::min(most - given, num_committed() - keep);
    const int64_t last = free_.at_or_before(end - 1) + 1;
    if (left <= 0 || last <= 0) break;
    const PageRange run{free_run_start(last, left), last};
    const bool gives = last == extent() ? cut_to(run.first) > 0 : try_give_back(run);
    if (gives) given += run.size();
    end = gives ? run.first : free_run_start(run.first, run.first);
  }
  return given;
}

bool PageGroup::try_give_back(PageRange run) noexcept {
  const PageRange hole = hole_with(run);
  const auto freed = [&](const PageMemory& array) {
    return array.hole_bytes(hole) - array.hole_bytes({hole.first, run.first}) -
           array.hole_bytes({run.last, hole.last});
  };
  int64_t bytes = 0;
  for (const PageMemory& array : arrays_) bytes += freed(array);
  if (!is_worth_it(bytes, run.size() * page_bytes_)) return false;
  for (PageMemory& array : arrays_) {
    array.use_huge_pages(false);
    // The first to refuse stops it; once one has given, the pages are absent, and restored before use.
    if (!array.try_give_back(run, hole) && &array == &arrays_.front()) {
      array.use_huge_pages(absent_.empty());
      return false;
    }
  }
  for (int64_t page = run.first; page < run.last; ++page) {
    free_.erase(page);
    absent_.insert(page);
  }
  return true;
}

// ---- references

std::vector<int32_t> PageGroup::page_map() const {
  std::vector<int32_t> map = references_;
  for (PageId page = 0; page < extent(); ++page) {
    if (map[page] > 0) continue;
    map[page] = is_kept(page)            ? PagePool::kCachedPage
                : absent_.contains(page) ? PagePool::kPageWithoutMemory
                                         : PagePool::kFreePage;
  }
  return map;
}

int64_t PageGroup::count_shared() const noexcept {
  return std::ranges::count_if(references_, [](int32_t references) { return references > 1; });
}

void PageGroup::take(std::span<PageId> out, uint64_t* random) noexcept {
  assert(static_cast<int64_t>(out.size()) <= num_free());
  for (PageId& page : out) {
    page = -1;
    if (random != nullptr)
      page = free_.at_or_after(
          static_cast<int64_t>(next_random(*random) % static_cast<uint64_t>(extent())));
    if (page < 0) page = free_.lowest();
    free_.erase(page);
    references_[page] = 1;
  }
  peak_held_ = std::max(peak_held_, num_held());
}

void PageGroup::add_reference(PageId page) noexcept {
  if (references_[page]++ > 0 || (flags_[page] & kKept) == 0) return;
  --num_cached_;
  peak_held_ = std::max(peak_held_, num_held());
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
  free_.insert(page);
}

void PageGroup::retain(std::span<const PageId> pages) {
  for (PageId page : pages)
    if (references(page) == 0 && !is_kept(page))
      throw std::invalid_argument("page " + std::to_string(page) +
                                  " is not held: it cannot be shared");
  for (PageId page : pages) add_reference(page);
}

// From the last to the first, so that the page of a sequence's end is cached before those it builds on.
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
  flags_[to] |= flags_[from] & kZeroed;
}

void PageGroup::verify(const std::vector<int32_t>* expected) const {
  if (capacity_ < extent() || capacity_ > max_pages_)
    fail("capacity " + std::to_string(capacity_) + " with " + std::to_string(extent()) +
         " pages, of " + std::to_string(max_pages_) + " at most");
  if (!free_.is_consistent() || !absent_.is_consistent()) fail("a set of free pages is broken");
  if (extent() > 0 && absent_.contains(extent() - 1)) fail("the last page has no memory");
  for (const PageMemory& array : arrays_)
    if (array.pages() != extent())
      fail("an array has " + std::to_string(array.pages()) + " of " + std::to_string(extent()) +
           " pages");

  int64_t cached = 0;
  for (int64_t page = 0; page < extent(); ++page) {
    const int32_t count = references_[page];
    const bool kept = is_kept(static_cast<PageId>(page));
    cached += kept && count == 0;
    if (free_.contains(page) && absent_.contains(page))
      fail("page " + std::to_string(page) + " is free with and without its memory");
    if (count < 0 || (count == 0 && !kept) != is_free(page))
      fail("page " + std::to_string(page) + " has " + std::to_string(count) + " references, is " +
           (kept ? "kept" : "not kept") + " and is " + (is_free(page) ? "free" : "not free"));
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
