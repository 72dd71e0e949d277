// The pages of one layer group: their memory in every array of every layer, their reference counts
// and the sets of free ones. Knows no budget; PagePool decides how many pages there may be.
//
// The ids below extent() exist. Each is held, cached (nobody holds it, but the keeper keeps it), free with
// its memory (free_) or free without (absent_): a page is in one of the two sets exactly when its count is 0
// and nobody keeps it. num_committed() = held + cached + num_free(); the last page has its memory;
// capacity() >= extent(). Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/page_memory.h"
#include "core/page_set.h"
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
  int64_t extent() const noexcept { return static_cast<int64_t>(references_.size()); }
  int64_t num_committed() const noexcept { return extent() - absent_.size(); }  // have memory
  int64_t num_free() const noexcept { return free_.size(); }                    // of the committed
  int64_t num_in_use() const noexcept { return num_committed() - num_free(); }  // not free
  int64_t num_cached() const noexcept { return num_cached_; }
  int64_t num_held() const noexcept { return num_in_use() - num_cached_; }
  int64_t peak_held() const noexcept { return peak_held_; }
  int64_t reserved_bytes() const noexcept;
  int64_t resident_bytes() const;
  int32_t references(PageId page) const noexcept {
    return page >= 0 && page < extent() ? references_[page] : 0;
  }

  // Memory for num_pages pages in all, at least num_committed(): absent pages get it back first, the lowest
  // ones first, then the extent grows. First room in the lists, which may throw and changes nothing else,
  // then two steps: opening moves boundaries, committing backs pages with memory. Each of these returns 0 or
  // the errno of the array that failed, the ones before it being done. undo_commit() with the same count
  // undoes either; add_committed() after all makes the pages free.
  void reserve_lists(int64_t num_pages);
  [[nodiscard]] int try_open(int64_t num_pages) noexcept;
  [[nodiscard]] int try_commit(int64_t num_pages) noexcept;
  void undo_commit(int64_t num_pages) noexcept;
  void add_committed(int64_t num_pages) noexcept;
  void set_capacity(int64_t num_pages) noexcept { capacity_ = num_pages; }

  // Give the memory of free pages back, and return of how many. cut_to: from the end, as far as no held page
  // lies behind them, down to the first num_pages. give_back: the highest ids first, at most `most`, and as
  // long as more than `keep` pages have memory; inside the extent only where nearly all bytes of a run of free
  // pages lie in OS pages of its own.
  int64_t cut_to(int64_t num_pages) noexcept;
  int64_t give_back(int64_t keep, int64_t most) noexcept;

  // Takes out.size() <= num_free() pages: the lowest ids first, so that the end stays empty; in an
  // order that `random` draws unless it is null.
  void take(std::span<PageId> out, uint64_t* random) noexcept;
  // As PagePool's calls of these names.
  void retain(std::span<const PageId> pages);
  void release(std::span<const PageId> pages);
  void keep(PageId page);
  void unkeep(PageId page);
  bool is_kept(PageId page) const noexcept {
    return page >= 0 && page < extent() && (flags_[page] & kKept) != 0;
  }
  std::vector<int32_t> page_map() const;
  int64_t count_shared() const noexcept;
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
  // The absent pages that a commit to num_pages restores, hole by hole: visit(hole, pages of it from its first).
  template <class Visit>
  void for_each_restored(int64_t num_pages, const Visit& visit) const noexcept;
  PageRange hole_with(PageRange run) const noexcept;
  int64_t free_run_start(int64_t last, int64_t most) const noexcept;
  bool try_give_back(PageRange run) noexcept;
  bool is_free(int64_t page) const noexcept {
    return free_.contains(page) || absent_.contains(page);
  }
  void resize(int64_t num_pages) noexcept;

  std::byte* add_array(int64_t page_bytes);
  PageArray make_array(PageFormat format, int head_dim, int num_kv_heads, int page_size);

  int sliding_window_ = 0;
  int64_t page_bytes_ = 0;
  int64_t capacity_ = 0;
  int64_t max_pages_ = 0;
  int64_t peak_held_ = 0;
  std::vector<PageMemory> arrays_;  // K, its scales, V, its scales, layer by layer
  std::vector<LayerPages> layers_;
  std::vector<int32_t> references_;  // of each page of the extent
  std::vector<uint8_t> flags_;       // of each: kKept, kZeroed (when it becomes free)
  PageSet free_;                     // with memory
  PageSet absent_;                   // free too, without
  int64_t num_cached_ = 0;
  PageKeeper* keeper_ = nullptr;
  int group_ = 0;
};

}  // namespace pagedkv
