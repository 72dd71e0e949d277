// What happens to named pages, for whoever follows a cache from outside: routers, dashboards, other servers.
//
// The fields have vLLM's names, where a block is our page, so that the first three events go on its wire as they are;
// what it does not tell, why a page was removed and that one was copied, is ours.
//
// Source: vLLM 0.32, distributed/kv_events.py.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "pagedkv/core/page_name.h"
#include "pagedkv/core/prefix_scope.h"
#include "pagedkv/kernels/pages.h"

namespace [[gnu::visibility("default")]] pagedkv {

enum class PageMedium { kGpu, kCpu, kStorage };  // vLLM's "GPU", "CPU", "STORAGE"

// Full pages, one after the other in one sequence, can be found from now on. vLLM's BlockStored; its lora_id and
// lora_name are none.
struct PagesStored {
  std::vector<PageName> block_hashes;         // [num_pages]
  std::optional<PageName> parent_block_hash;  // none: they begin the sequence
  std::vector<int32_t> token_ids;             // [num_pages * block_size]
  int block_size = 0;                         // tokens
  PageMedium medium = PageMedium::kCpu;
  PrefixScope extra_keys = {};  // that entered the name of a first page; else empty
  std::string session_id = {};  // of the request that stored them; empty: none

  bool operator==(const PagesStored&) const = default;
};

// kRequested: someone asked for it. The others are evictions.
enum class RemovalReason { kRoomNeeded, kTtl, kQuota, kRequested };

// Pages cannot be found any more on this medium. vLLM's BlockRemoved and, beyond it, the reason.
struct PagesRemoved {
  std::vector<PageName> block_hashes;
  PageMedium medium = PageMedium::kCpu;
  RemovalReason reason = RemovalReason::kRoomNeeded;

  bool operator==(const PagesRemoved&) const = default;
};

// No page can be found any more. vLLM's AllBlocksCleared.
struct AllPagesCleared {
  bool operator==(const AllPagesCleared&) const = default;
};

// The first tokens of a page were copied into a page of the sequence that goes on alone from there: it wrote into a
// shared page, or began in the middle of a cached one. Ours.
struct PageCopied {
  int group = 0;  // the layer group that both ids belong to
  PageId from = 0;
  PageId to = 0;
  int num_tokens = 0;  // 1..page_size

  bool operator==(const PageCopied&) const = default;
};

using PageEvent = std::variant<PagesStored, PagesRemoved, AllPagesCleared, PageCopied>;

struct PageEventBatch {
  uint64_t first_sequence = 0;                           // number of events[0]
  std::vector<std::shared_ptr<const PageEvent>> events;  // their numbers ascend by one
  uint64_t next_sequence() const noexcept { return first_sequence + events.size(); }
};

// The last `capacity` events, numbered from 0 in the order in which they were pushed; no number comes twice. A full
// queue drops its oldest event for a new one. Readers take nothing out: each keeps the number that it reads next, and
// learns from the answer what it was too late for. Any thread may call any of it; the lock is held for the copies of
// pointers, never for those of events.
//   const PageEventBatch batch = queue.poll(next, 100);
//   if (batch.first_sequence > next) …  // the events between the two were dropped unread
//   next = batch.next_sequence();
class PageEventQueue {
 public:
  // Throws std::invalid_argument for a capacity outside 1..2^24.
  explicit PageEventQueue(int64_t capacity);

  // For the step loop: neither throws nor allocates, since the event is made before. Null is not an event.
  void push(std::shared_ptr<const PageEvent> event) noexcept;

  // The events from number from_sequence on, or from the oldest that is still there, `max` at most. None when they are
  // all read; first_sequence is then the number of the next event to come, also for a reader that is ahead of it
  // (because it began with another queue).
  PageEventBatch poll(uint64_t from_sequence, int64_t max) const;

  uint64_t next_sequence() const noexcept;  // as many events as were pushed
  uint64_t dropped()
      const noexcept;  // of these, the ones that are no longer there, whether read or not

 private:
  uint64_t oldest() const noexcept;

  mutable std::mutex mutex_;
  uint64_t next_ = 0;
  std::vector<std::shared_ptr<const PageEvent>>
      ring_;  // [capacity]; event n stands at n % capacity
};

}  // namespace pagedkv
