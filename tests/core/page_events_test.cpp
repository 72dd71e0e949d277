#include "pagedkv/core/page_events.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

namespace pagedkv {
namespace {

std::shared_ptr<const PageEvent> numbered(int number) {
  return std::make_shared<const PageEvent>(PageCopied{.num_tokens = number});
}

void push_numbered(PageEventQueue& queue, int count) {
  for (int i = 0; i < count; ++i) queue.push(numbered(i));
}

// Each event carries its own number.
void expect_numbers_from_first(const PageEventBatch& batch) {
  for (size_t i = 0; i < batch.events.size(); ++i)
    ASSERT_EQ(std::get<PageCopied>(*batch.events[i]).num_tokens,
              static_cast<int>(batch.first_sequence + i));
}

TEST(PageEventQueue, GivesEventsAsTheyCame) {
  const PagesStored stored{.block_hashes = {first_page_name(std::vector<int32_t>{7, 8}, {})},
                           .parent_block_hash = root_name(),
                           .token_ids = {7, 8},
                           .block_size = 2,
                           .medium = PageMedium::kStorage,
                           .extra_keys = {.salt = "tenant-a"},
                           .session_id = "s"};
  const PageEvent events[] = {
      stored, PagesRemoved{stored.block_hashes, PageMedium::kGpu, RemovalReason::kQuota},
      PageCopied{.group = 1, .from = 2, .to = 3, .num_tokens = 4}, AllPagesCleared{}};
  PageEventQueue queue(8);
  for (const PageEvent& event : events) queue.push(std::make_shared<const PageEvent>(event));
  const PageEventBatch batch = queue.poll(0, 100);
  EXPECT_EQ(batch.first_sequence, 0u);
  ASSERT_EQ(batch.events.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(*batch.events[i] == events[i]) << i;
}

TEST(PageEventQueue, EveryReaderFollowsAtItsOwnPace) {
  PageEventQueue queue(10);
  push_numbered(queue, 10);
  uint64_t next = 0;
  for (const size_t wanted : {4u, 4u, 2u, 0u}) {
    const PageEventBatch batch = queue.poll(next, 4);
    EXPECT_EQ(batch.first_sequence, next);
    EXPECT_EQ(batch.events.size(), wanted);
    expect_numbers_from_first(batch);
    next = batch.next_sequence();
  }
  EXPECT_EQ(next, 10u);
  EXPECT_EQ(queue.poll(0, 100).events.size(), 10u);  // another reader
}

TEST(PageEventQueue, AFullQueueDropsTheOldestAndCountsIt) {
  PageEventQueue queue(3);
  push_numbered(queue, 3);
  EXPECT_EQ(queue.dropped(), 0u);
  queue.push(numbered(3));
  EXPECT_EQ(queue.dropped(), 1u);
  EXPECT_EQ(queue.next_sequence(), 4u);
  const PageEventBatch batch = queue.poll(0, 100);
  EXPECT_EQ(batch.first_sequence, 1u);  // the gap that a late reader sees
  EXPECT_EQ(batch.next_sequence(), 4u);
  expect_numbers_from_first(batch);
}

TEST(PageEventQueue, AReaderAheadIsToldWhatComesNext) {
  PageEventQueue queue(3);
  push_numbered(queue, 2);
  for (const uint64_t from : {uint64_t{2}, uint64_t{50}, std::numeric_limits<uint64_t>::max()}) {
    const PageEventBatch batch = queue.poll(from, 100);
    EXPECT_TRUE(batch.events.empty());
    EXPECT_EQ(batch.next_sequence(), 2u);
  }
  for (const int64_t max : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()})
    EXPECT_EQ(queue.poll(0, max).next_sequence(), 0u);
  EXPECT_EQ(queue.poll(0, std::numeric_limits<int64_t>::max()).next_sequence(), 2u);
}

TEST(PageEventQueue, AnEventLivesAsLongAsAReaderHoldsIt) {
  PageEventQueue queue(1);
  const auto first = numbered(0);
  queue.push(first);
  const PageEventBatch batch = queue.poll(0, 1);
  EXPECT_EQ(first.use_count(), 3);
  queue.push(numbered(1));
  EXPECT_EQ(first.use_count(), 2);
  expect_numbers_from_first(batch);
}

TEST(PageEventQueue, RefusesACapacityOutsideItsLimits) {
  for (const int64_t capacity : {int64_t{-1}, int64_t{0}, (int64_t{1} << 24) + 1})
    EXPECT_THROW(PageEventQueue{capacity}, std::invalid_argument) << capacity;
}

// What each reader has read and what it has missed are all the events there were, in order.
TEST(PageEventQueue, ReadersBesideAProducerMissNothingUnseen) {
  constexpr int kEvents = 20000;
  PageEventQueue queue(64);
  const auto read_all = [&](int64_t max, uint64_t* read, uint64_t* missed) {
    for (uint64_t next = 0; next < kEvents;) {
      const PageEventBatch batch = queue.poll(next, max);
      ASSERT_GE(batch.first_sequence, next);
      expect_numbers_from_first(batch);
      *missed += batch.first_sequence - next;
      *read += batch.events.size();
      next = batch.next_sequence();
      if (batch.events.empty()) std::this_thread::yield();
    }
  };
  uint64_t read[3] = {}, missed[3] = {};
  std::thread readers[3];
  for (int i = 0; i < 3; ++i)
    readers[i] = std::thread(read_all, int64_t{1} << (4 * i), &read[i], &missed[i]);
  push_numbered(queue, kEvents);
  for (std::thread& reader : readers) reader.join();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(read[i] + missed[i], uint64_t{kEvents}) << i;
  EXPECT_EQ(queue.dropped(), uint64_t{kEvents} - 64);
}

}  // namespace
}  // namespace pagedkv
