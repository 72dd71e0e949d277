#include "pagedkv/core/page_events.h"

#include <algorithm>
#include <cassert>
#include <stdexcept>

namespace pagedkv {
namespace {

constexpr int64_t kMostEvents = int64_t{1} << 24;

size_t checked(int64_t capacity) {
  if (capacity < 1 || capacity > kMostEvents)
    throw std::invalid_argument("a queue of " + std::to_string(capacity) +
                                " page events: it may hold 1.." + std::to_string(kMostEvents));
  return static_cast<size_t>(capacity);
}

}  // namespace

PageEventQueue::PageEventQueue(int64_t capacity) : ring_(checked(capacity)) {}

void PageEventQueue::push(std::shared_ptr<const PageEvent> event) noexcept {
  assert(event != nullptr);
  const std::lock_guard lock(mutex_);
  ring_[next_ % ring_.size()].swap(event);  // the dropped one dies with the argument, unlocked
  ++next_;
}

PageEventBatch PageEventQueue::poll(uint64_t from_sequence, int64_t max) const {
  const auto most =
      static_cast<uint64_t>(std::clamp<int64_t>(max, 0, static_cast<int64_t>(ring_.size())));
  PageEventBatch batch;
  batch.events.reserve(most);  // here, so that nothing is allocated under the lock
  const std::lock_guard lock(mutex_);
  batch.first_sequence = std::clamp(from_sequence, oldest(), next_);
  const uint64_t end = batch.first_sequence + std::min(most, next_ - batch.first_sequence);
  for (uint64_t n = batch.first_sequence; n < end; ++n)
    batch.events.push_back(ring_[n % ring_.size()]);
  return batch;
}

uint64_t PageEventQueue::next_sequence() const noexcept {
  const std::lock_guard lock(mutex_);
  return next_;
}

uint64_t PageEventQueue::dropped() const noexcept {
  const std::lock_guard lock(mutex_);
  return oldest();
}

uint64_t PageEventQueue::oldest() const noexcept {
  return next_ - std::min<uint64_t>(next_, ring_.size());
}

}  // namespace pagedkv
