// The pages of one layer group: their memory in every array of every layer, their reference counts
// and the list of free ones. Knows no budget; PagePool decides how many pages there may be.
//
// Invariants: num_committed() = held + cached + free; a page is on the free list exactly when its
// count is 0 and nobody keeps it; capacity() >= num_committed(). Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/page_memory.h"
#include "pagedkv/core/page_pool.h"

namespace pagedkv {

class PageGroup {
 public:
  // Reserves address space for max_pages. Throws MemoryError.
  PageGroup(const LayerGroupSpec& spec, int page_size, int64_t num_pages, int64_t max_pages);

  int sliding_window() const noexcept { return sliding_window_; }
  std::span<const LayerPages> layers() const noexcept { return layers_; }
  int64_t page_bytes() const noexcept { return page_bytes_; }  // over all arrays
  int64_t capacity() const noexcept { return capacity_; }      // ids that may be handed out
  int64_t max_pages() const noexcept { return max_pages_; }
  int64_t num_committed() const noexcept { return static_cast<int64_t>(references_.size()); }
  int64_t num_free() const noexcept {
    return static_cast<int64_t>(free_.size());
  }  // of the committed
  int64_t num_cached() const noexcept { return num_cached_; }
  int64_t num_held() const noexcept { return num_committed() - num_free() - num_cached_; }
  int64_t reserved_bytes() const noexcept;
  int64_t resident_bytes() const;
  int32_t references(PageId page) const noexcept {
    return page >= 0 && page < num_committed() ? references_[page] : 0;
  }

  // Room for the first num_pages pages: in the lists, which may throw and changes nothing else, then in
  // every array, in two steps: opening moves boundaries, committing backs them with memory. Each of these
  // returns 0 or the errno of the array that failed, the ones before it being done.
  // decommit_to(num_committed()) undoes either; add_committed() after all makes the new pages free.
  void reserve_lists(int64_t num_pages);
  [[nodiscard]] int try_open(int64_t num_pages) noexcept;
  [[nodiscard]] int try_commit(int64_t num_pages) noexcept;
  void decommit_to(int64_t num_pages) noexcept;
  void add_committed(int64_t num_pages) noexcept;
  void set_capacity(int64_t num_pages) noexcept { capacity_ = num_pages; }
  // Gives back the memory of free pages from num_pages on, as far as no held page lies behind them;
  // capacity becomes max(num_pages, what stays committed). Returns whether memory was given back.
  bool shrink_to(int64_t num_pages) noexcept;

  // Takes out.size() <= num_free() pages: the last released ones first, fresh ones in ascending
  // order; in an order that `random` draws unless it is null.
  void take(std::span<PageId> out, uint64_t* random) noexcept;
  // As PagePool's calls of these names.
  void retain(std::span<const PageId> pages);
  void release(std::span<const PageId> pages);
  void keep(PageId page);
  void unkeep(PageId page);
  bool is_kept(PageId page) const noexcept {
    return page >= 0 && page < num_committed() && (flags_[page] & kKept) != 0;
  }
  void zero_when_freed(std::span<const PageId> pages) noexcept;
  void copy_page(PageId from, PageId to) noexcept;
  // Who hears of pages that become cached or held again, with the group's number.
  void set_keeper(PageKeeper* keeper, int group) noexcept { keeper_ = keeper, group_ = group; }

  void verify(const std::vector<int32_t>* expected) const;

 private:
  static constexpr uint8_t kKept = 1, kZeroed = 2;

  void add_reference(PageId page) noexcept;
  void drop_reference(PageId page) noexcept;
  void make_free(PageId page) noexcept;
  std::byte* add_array(int64_t page_bytes);
  PageArray make_array(PageFormat format, int head_dim, int num_kv_heads, int page_size);

  int sliding_window_ = 0;
  int64_t page_bytes_ = 0;
  int64_t capacity_ = 0;
  int64_t max_pages_ = 0;
  std::vector<PageMemory> arrays_;  // K, its scales, V, its scales, layer by layer
  std::vector<LayerPages> layers_;
  std::vector<int32_t> references_;  // of each committed page
  std::vector<uint8_t> flags_;       // of each: kKept, kZeroed (when it becomes free)
  std::vector<PageId> free_;         // a stack; its storage has room for every committed page
  int64_t num_cached_ = 0;
  PageKeeper* keeper_ = nullptr;
  int group_ = 0;
};

}  // namespace pagedkv
