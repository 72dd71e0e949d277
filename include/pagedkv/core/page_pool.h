// The pages of a model's keys and values, and who holds them.
//
// A pool has one or more layer groups: sets of layers whose tokens live equally long (all of them,
// or the last `sliding_window`). A group has its own page ids, valid in each of its layers; all
// groups share one byte budget. Every array reserves address space for the most pages it may ever
// have and commits memory by moving one boundary: growth neither moves nor copies a byte, and every
// pointer stays valid for the pool's life. Memory goes back on request (shrink_to) or after idle time
// (give_back_idle), from the end and from between held pages; a page without memory gets it again, zeroed,
// when it is taken, after the same questions as for growth.
//
// A page is free, held (references >= 1) or cached: nobody holds it, but a PageKeeper, such as a
// PrefixIndex, keeps its content until the room is needed. Not thread-safe: one thread, the step loop,
// calls it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/base/error.h"
#include "pagedkv/kernels/pages.h"

namespace [[gnu::visibility("default")]] pagedkv {

// What one layer stores for each token.
struct LayerSpec {
  int num_kv_heads = 0;
  int key_head_dim = 0;    // 1..512
  int value_head_dim = 0;  // 1..512
  PageFormat key_format = PageFormat::kF16;
  PageFormat value_format = PageFormat::kF16;
};

struct LayerGroupSpec {
  int sliding_window = 0;  // 0: full attention
  std::vector<LayerSpec> layers = {};
};

struct PagePoolOptions {
  std::vector<LayerGroupSpec> groups = {};
  int page_size = 16;        // tokens, 1..256
  int32_t num_pages = 1024;  // of each group before any growth; reserved at once, committed by the
                             // first allocation: all of them, or as needed when `dynamic`
  bool dynamic = true;       // grow beyond num_pages
  int64_t max_bytes = 0;     // over all groups, 0: what the machine and its cgroup allow
  int64_t headroom_bytes = int64_t{256} << 20;  // left to the rest of the machine
  int32_t max_pages = 0;  // of each group: the address space reserved; 0: from max_bytes or memory
  // What give_back_idle() gives back: the memory beyond `idle_keep` times the most that was in use during
  // the last `idle_seconds` (0: nothing ever), and beyond the floor.
  double idle_seconds = 0;       // 0..1e6
  double idle_keep = 1.25;       // 1..1000: load that varies less gives nothing back
  int64_t idle_floor_bytes = 0;  // over all groups, the same number of pages in each
  uint64_t shuffle_seed = 0;     // not 0: hand out page ids in a shuffled order (tests)
  // Asked before each commit with the bytes it adds; false refuses it as the machine would. For
  // tests of failure.
  std::function<bool(int64_t bytes)> commit_hook = nullptr;
  // What the machine can still give, in bytes; unset: the cgroup and /proc/meminfo. For tests.
  std::function<int64_t()> available_bytes = nullptr;
};

// Counters over all groups; bytes of pages and scales.
struct PagePoolStats {
  int64_t pages_capacity = 0;   // page ids that may be handed out without growth
  int64_t pages_committed = 0;  // that have memory
  int64_t pages_held = 0;
  int64_t pages_cached = 0;
  int64_t pages_peak = 0;      // most held at once
  int64_t bytes_reserved = 0;  // address space
  int64_t bytes_committed =
      0;  // of committed pages; the kernel rounds up to whole OS pages, array by array
  int64_t bytes_in_use = 0;  // of held pages
  int64_t bytes_cached = 0;  // of cached pages
  int64_t bytes_peak = 0;    // most in use at once
  int64_t bytes_limit = 0;   // most bytes the pool may commit, as last computed
  int64_t bytes_moved = 0;   // copied or moved by growth: always 0
  int64_t allocations = 0;   // successful calls
  int64_t grow_events = 0;
  int64_t shrink_events = 0;     // calls that gave memory back
  int64_t bytes_given_back = 0;  // in all
  int64_t commit_events = 0;
  int64_t refusals = 0;         // allocations that failed
  int64_t page_copies = 0;      // copy_page(): copies on write and of partly matching pages
  int64_t pages_reclaimed = 0;  // cached pages that gave way to an allocation
  double commit_seconds = 0;    // moving boundaries: what growth itself costs
  double touch_seconds = 0;     // the kernel supplying zeroed memory behind them
};

// The seed's growth formula: pages to have so that `required` fit, from `current`:
//   max(required, (3 * current + 1) / 2, current + 1), not beyond max(window_pages, current) where
//   window_pages > 0 and required <= window_pages.
int64_t grown_pages(int64_t current, int64_t required, int64_t window_pages) noexcept;

// One group's part of an allocation: fills `out` with pages. `room` is how many pages the asking
// sequence may take at most, this call included (0: unknown); growth leaves no more than that
// unused.
struct PageRequest {
  int group = 0;
  std::span<PageId> out;
  int64_t room = 0;
};

// Who keeps pages that nobody holds (PagePool::keep). The pool calls it from within its own calls: it must
// not call the pool back, except for unkeep() in reclaim().
class PageKeeper {
 public:
  virtual ~PageKeeper() = default;
  // The last reference to a kept page is gone; the first one to a cached page is there.
  virtual void on_cached(int group, PageId page) noexcept = 0;
  virtual void on_held(int group, PageId page) noexcept = 0;
  // copy_page() was called.
  virtual void on_copied(int group, PageId from, PageId to, int num_tokens) noexcept = 0;
  // Cached pages that may be taken.
  virtual int64_t reclaimable(int group) const noexcept = 0;
  // Stops keeping cached pages, those first that matter least, until at least `count` (at most
  // reclaimable()) of this group are free. Returns how many went, over all groups.
  virtual int64_t reclaim(int group, int64_t count) noexcept = 0;
};

class PagePool {
 public:
  // Throws std::invalid_argument (a value outside its limits, a PAGEDKV_KERNELS that names no usable
  // set), MemoryError (the first num_pages,
  // without growth, are more than the budget; address space refused).
  explicit PagePool(PagePoolOptions options);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  int num_groups() const noexcept;
  int num_layers() const noexcept;  // over all groups, group by group
  int page_size() const noexcept;
  int sliding_window(int group) const noexcept;
  int group_of_layer(int layer) const noexcept;
  LayerPages layer_pages(int layer) const noexcept;  // stays valid across growth

  // Takes the pages of every request, each with one reference: all or nothing over all requests,
  // which name different groups. Grows by grown_pages() where that is needed and allowed; where it is
  // not, cached pages make room. False: nothing has changed, and refusal() and refusal_text() say why.
  [[nodiscard]] bool try_allocate(std::span<const PageRequest> requests);
  [[nodiscard]] bool try_allocate(int group, std::span<PageId> out, int64_t room = 0);

  // Raises a group's capacity by grown_pages() to at least num_pages, and has as many pages with memory
  // now, free and held together: to reserve n pages ahead, ask for capacity() - pages_free() + n. Refuses
  // as try_allocate does. Nothing to do where the capacity and the memory are there.
  [[nodiscard]] bool try_grow(int group, int64_t num_pages, int64_t room = 0);
  // Lowers the group's capacity to the larger of num_pages and the page behind the last held one (never
  // raises it), and gives back the memory of free pages: of those beyond, then, the highest ids first, of
  // others while more than num_pages have memory. Runs between held pages that hardly fill an OS page in
  // each array stay. A pool that may not grow gives back from the end alone: the capacity it has left
  // cannot be refused.
  void shrink_to(int group, int64_t num_pages);
  // Gives back what idle_seconds, idle_keep and the floor leave over; the capacity stays. For the step
  // loop to call at every step and while it waits: about 10 ns when nothing is to do. A period ends with
  // the first call after idle_seconds, so memory goes between one and two periods after its last use, at
  // most 64 MiB or one page of a group a call, so that no step waits long. What try_grow() asked for counts
  // as used then. Nothing is given back by a pool that may not grow. Returns bytes. `now` must not decrease.
  int64_t give_back_idle(
      std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now());

  // One more reference to each page. The pages must be held or cached.
  void retain(int group, std::span<const PageId> pages);
  // One reference less; pages without any become free. Throws std::invalid_argument, having changed
  // nothing, when a page is not held (as often as listed).
  void release(int group, std::span<const PageId> pages);
  int32_t references(int group, PageId page) const noexcept;  // 0: not held
  // Copies the bytes of a page in every layer of the group, scales included. Both must be held. A keeper hears that
  // the first num_tokens of them are what it is done for (0: all).
  void copy_page(int group, PageId from, PageId to, int num_tokens = 0);
  // Whether somebody beside the one who asks, and who holds it, counts on the page's content.
  bool is_shared(int group, PageId page) const noexcept;
  // The bytes of these pages, which must be held, become zeros when they become free, and so do those of copies that
  // are made of them from now on.
  void zero_when_freed(int group, std::span<const PageId> pages);

  // ---- cached pages; at most one keeper, which must end before the pool and unkeep its pages first

  void set_keeper(PageKeeper* keeper);  // null: none any more
  // A held page will not be free but cached when its last reference goes, until unkeep(), which
  // frees a cached page. Throw std::invalid_argument where the page is not held, or not kept.
  void keep(int group, PageId page);
  void unkeep(int group, PageId page);
  bool is_kept(int group, PageId page) const noexcept;

  int64_t capacity(int group) const noexcept;   // pages usable without growth
  int64_t committed(int group) const noexcept;  // pages that have memory
  int64_t extent(int group) const noexcept;  // ids below it may be read; all that have memory are
  int64_t max_pages(int group) const noexcept;   // the most there is address space for
  int64_t pages_free(int group) const noexcept;  // of capacity
  int64_t pages_held(int group) const noexcept;
  int64_t pages_cached(int group) const noexcept;
  int64_t pages_peak(int group) const noexcept;  // most held at once
  int64_t bytes_per_token() const noexcept;      // over all layers, scales included
  int64_t page_bytes(int group) const noexcept;  // over the group's layers, scales included

  // Why the last try_allocate refused; the text names pages or bytes and the limit.
  enum class Refusal { kNone, kCapacity, kBudget };
  Refusal refusal() const noexcept;
  const std::string& refusal_text() const noexcept;

  PagePoolStats stats() const noexcept;
  // What each id below extent(group) is: how many hold it, or one of these. A pass over all ids, as is pages_shared().
  static constexpr int32_t kFreePage = 0, kCachedPage = -1, kPageWithoutMemory = -2;
  std::vector<int32_t> page_map(int group) const;
  int64_t pages_shared(int group) const noexcept;  // that more than one holds
  // Bytes of the committed arrays that the kernel really holds (mincore). Slow: for reports and
  // tests.
  int64_t bytes_resident() const;

  // Recounts everything: each page held, cached, free with its memory or free without, references equal to
  // `expected` (per group, per page) where given. Throws std::logic_error naming the first fault.
  void verify(const std::vector<std::vector<int32_t>>* expected = nullptr) const;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
