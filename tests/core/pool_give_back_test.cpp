// Memory that goes back while requests run, and comes again.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/pool_testing.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv {
namespace {

using testing::group;
using testing::kSanitized;
using testing::layer;
using testing::num_mappings;
using testing::options;
using testing::scaled;
using testing::take;
using namespace std::chrono_literals;
using Time = std::chrono::steady_clock::time_point;

constexpr int64_t kMiB = int64_t{1} << 20;

// Pages of 4 arrays, 32 KiB in each.
PagePoolOptions large_pages(int32_t num_pages = 1) {
  PagePoolOptions o = options(num_pages, 16, group(2, layer(8, 128)));
  o.max_pages = 20000;
  return o;
}
constexpr int64_t kPageBytes = 4 * 32 << 10;

// Of the whole process; /proc/self/status would be off by what each processor has not counted yet.
int64_t anonymous_bytes() {
  return testing::kib_in("/proc/self/smaps_rollup", "Anonymous:") * 1024;
}

void fill(const PagePool& pool, PageId page, int value) {
  for (int l = 0; l < pool.num_layers(); ++l)
    for (const PageArray& array : {pool.layer_pages(l).keys, pool.layer_pages(l).values})
      std::memset(array.data + int64_t{page} * (32 << 10), value, 32 << 10);
}

bool is_filled(const PagePool& pool, PageId page, int value) {
  for (int l = 0; l < pool.num_layers(); ++l)
    for (const PageArray& array : {pool.layer_pages(l).keys, pool.layer_pages(l).values}) {
      const std::byte* const begin = array.data + int64_t{page} * (32 << 10);
      if (std::any_of(begin, begin + (32 << 10),
                      [&](std::byte b) { return b != static_cast<std::byte>(value); }))
        return false;
    }
  return true;
}

// ---- inside the extent

TEST(GiveBack, OneHeldPageAtTheEndPinsOnlyItself) {
  PagePool pool(large_pages());
  std::vector<PageId> pages = take(pool, 800);
  const PageId last = pages.back();
  ASSERT_EQ(last, 799);
  for (PageId page : pages) fill(pool, page, 7);
  const std::byte* const address = pool.layer_pages(0).keys.data;
  pages.pop_back();
  pool.release(0, pages);
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.stats().bytes_committed, kPageBytes);
  EXPECT_EQ(pool.committed(0), 1);
  EXPECT_EQ(pool.extent(0), 800);
  EXPECT_EQ(pool.stats().bytes_given_back, 799 * kPageBytes);
  EXPECT_GE(pool.bytes_resident(), kPageBytes);
  EXPECT_LE(pool.bytes_resident(), kPageBytes + testing::resident_rounding(4, 0));
  EXPECT_TRUE(is_filled(pool, last, 7));
  EXPECT_EQ(pool.layer_pages(0).keys.data, address);
  pool.verify();

  const std::vector<PageId> again = take(pool, 799);  // the lowest first, zeroed
  EXPECT_EQ(again, pages);
  for (PageId page : again) ASSERT_TRUE(is_filled(pool, page, 0)) << page;
  EXPECT_TRUE(is_filled(pool, last, 7));
  EXPECT_EQ(pool.capacity(0), 800);
  EXPECT_GE(pool.bytes_resident(), 800 * kPageBytes);
  pool.verify();
  pool.release(0, again);
  pool.release(0, {&last, 1});
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.extent(0), 1);
  pool.verify();
}

TEST(GiveBack, HolesCostNoMapping) {
  PagePool pool(large_pages());
  std::vector<PageId> pages = take(pool, 1000);
  const int64_t before = num_mappings();
  std::erase_if(pages, [](PageId page) { return page % 10 == 9; });
  pool.release(0, pages);
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.committed(0), 100);
  EXPECT_LE(num_mappings(), before + 8);
  pool.verify();
}

TEST(GiveBack, PagesThatShareOsPagesWithHeldOnesStay) {
  PagePool pool(options(64));  // 1 KiB in each of 4 arrays
  const std::vector<PageId> pages = take(pool, 64);
  std::vector<PageId> even;
  for (PageId page : pages)
    if (page % 2 == 0) even.push_back(page);
  pool.release(0, even);
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.stats().pages_committed, 64);
  EXPECT_EQ(pool.stats().bytes_given_back, 0);
  EXPECT_EQ(pool.stats().shrink_events, 0);
  pool.verify();
}

TEST(GiveBack, AFixedPoolGivesBackFromTheEndAlone) {
  PagePoolOptions o = large_pages(100);
  o.dynamic = false;
  o.max_pages = 0;
  o.idle_seconds = 1;
  PagePool pool(o);
  std::vector<PageId> pages = take(pool, 100);
  const PageId held = pages[60];
  pages.erase(pages.begin() + 60);
  pool.release(0, pages);
  for (int s = 0; s < 10; ++s) EXPECT_EQ(pool.give_back_idle(Time(s * 1s)), 0);
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.capacity(0), 61);
  EXPECT_EQ(pool.committed(0), 61);
  EXPECT_EQ(take(pool, 60).size(), 60u);
  EXPECT_TRUE(take(pool, 1).empty());
  pool.release(0, {&held, 1});
  pool.verify();
}

TEST(GiveBack, LockedMemoryStaysAndStaysCounted) {
  PagePool pool(large_pages());
  std::vector<PageId> pages = take(pool, 40);
  const void* const keys = pool.layer_pages(0).keys.data;
  if (mlock(keys, 40 * 32 << 10) != 0) GTEST_SKIP() << "mlock: " << std::strerror(errno);
  pool.release(0, std::span(pages).first(39));
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.stats().pages_committed, 40);
  EXPECT_GE(pool.bytes_resident(), 40 * kPageBytes);
  pool.verify();
  munlock(keys, 40 * 32 << 10);
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.stats().pages_committed, 1);
}

TEST(GiveBack, ARefusedCommitOfPagesThatWereGivenBackChangesNothing) {
  bool refuse = false;
  int64_t asked = 0;
  PagePoolOptions o = large_pages();
  o.commit_hook = [&](int64_t bytes) {
    asked = bytes;
    return !refuse;
  };
  PagePool pool(o);
  const std::vector<PageId> pages = take(pool, 100);
  fill(pool, 99, 3);
  pool.release(0, std::span(pages).first(99));
  pool.shrink_to(0, 1);
  refuse = true;
  const PagePoolStats before = pool.stats();
  const int64_t resident = pool.bytes_resident();
  std::vector<PageId> out(50, -7);
  EXPECT_FALSE(pool.try_allocate(0, out));
  EXPECT_EQ(asked, 50 * kPageBytes);  // no page is free with its memory
  EXPECT_FALSE(pool.try_grow(0, 100));
  EXPECT_EQ(out, std::vector<PageId>(50, -7));
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kBudget);
  EXPECT_TRUE(testing::operator==(pool.stats(), before));
  EXPECT_EQ(pool.bytes_resident(), resident);
  EXPECT_TRUE(is_filled(pool, 99, 3));
  pool.verify();
  refuse = false;
  EXPECT_TRUE(pool.try_allocate(0, out));
  pool.verify();
}

TEST(GiveBack, TheBudgetIsAskedForPagesThatWereGivenBack) {
  PagePoolOptions o = large_pages();
  int64_t available = 1000 * kPageBytes;
  o.headroom_bytes = 0;
  o.available_bytes = [&] { return available; };
  PagePool pool(o);
  const std::vector<PageId> pages = take(pool, 100);
  pool.release(0, std::span(pages).first(99));
  pool.shrink_to(0, 1);
  available = 10 * kPageBytes;
  EXPECT_TRUE(take(pool, 11).empty());
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kBudget);
  EXPECT_EQ(take(pool, 10).size(), 10u);
  EXPECT_EQ(pool.committed(0), 11);
  pool.verify();
}

// ---- after idle time

class Idle : public ::testing::Test {
 protected:
  static PagePoolOptions idle_options() {
    PagePoolOptions o = large_pages();
    o.idle_seconds = 10;
    o.idle_keep = 1.5;
    o.idle_floor_bytes = 20 * kPageBytes;
    return o;
  }
  // Calls until nothing more goes.
  static int64_t give_back(PagePool& pool, Time now) {
    int64_t sum = 0;
    while (const int64_t bytes = pool.give_back_idle(now)) sum += bytes;
    return sum;
  }
};

TEST_F(Idle, MemoryGoesDownToTheFloorAfterAWholePeriodWithoutUse) {
  PagePool pool(idle_options());
  pool.release(0, take(pool, 1000));
  EXPECT_EQ(give_back(pool, Time(0s)), 0);
  EXPECT_EQ(give_back(pool, Time(9999ms)), 0);
  EXPECT_EQ(give_back(pool, Time(10s)), 980 * kPageBytes);
  EXPECT_EQ(pool.committed(0), 20);
  EXPECT_GE(pool.capacity(0), 1000);  // ids are there, memory is not
  EXPECT_EQ(give_back(pool, Time(1000s)), 0);
  EXPECT_EQ(pool.committed(0), 20);
  pool.verify();
}

TEST_F(Idle, LoadThatComesAndGoesWithinAPeriodGivesNothingBack) {
  PagePool pool(idle_options());
  for (int second = 0; second < 100; ++second) {
    std::vector<PageId> pages;
    if (second % 9 == 0) {
      pages = take(pool, 1000);
      ASSERT_EQ(pages.size(), 1000u);
    }
    EXPECT_EQ(pool.give_back_idle(Time(second * 1s)), 0) << second;
    pool.release(0, pages);
    EXPECT_EQ(pool.give_back_idle(Time(second * 1s + 500ms)), 0) << second;
  }
  EXPECT_EQ(pool.stats().pages_committed, 1000);
  EXPECT_EQ(pool.stats().shrink_events, 0);
}

TEST_F(Idle, KeepsAShareMoreThanThePeakOfUse) {
  PagePool pool(idle_options());
  pool.release(0, take(pool, 1000));
  for (int second = 0; second < 30; ++second) {
    const std::vector<PageId> pages = take(pool, second % 5 == 2 ? 101 : 30);
    give_back(pool, Time(second * 1s));
    pool.release(0, pages);
  }
  EXPECT_EQ(pool.committed(0), 152);  // 101 * 1.5
  pool.verify();
}

TEST_F(Idle, OneCallGivesALimitedAmountAndUseEndsIt) {
  PagePool pool(idle_options());
  pool.release(0, take(pool, 2000));
  EXPECT_EQ(pool.give_back_idle(Time(0s)), 0);
  EXPECT_EQ(pool.give_back_idle(Time(10s)), 64 * kMiB);
  EXPECT_EQ(pool.give_back_idle(Time(10s)), 64 * kMiB);
  const std::vector<PageId> pages = take(pool, 900);  // of the 976 that are left
  EXPECT_EQ(pool.give_back_idle(Time(10s)), 0);
  EXPECT_EQ(pool.committed(0), 2000 - 1024);
  pool.verify();
}

TEST_F(Idle, WhatWasReservedStaysAPeriodLong) {
  PagePool pool(idle_options());
  EXPECT_EQ(pool.give_back_idle(Time(0s)), 0);
  ASSERT_TRUE(pool.try_grow(0, 500));
  EXPECT_EQ(pool.give_back_idle(Time(10s)), 0);
  EXPECT_EQ(pool.committed(0), 500);
  EXPECT_GT(give_back(pool, Time(20s)), 0);
  EXPECT_EQ(pool.committed(0), 20);
}

TEST_F(Idle, WithoutAPeriodNothingGoesBack) {
  PagePoolOptions o = idle_options();
  o.idle_seconds = 0;
  PagePool pool(o);
  pool.release(0, take(pool, 1000));
  for (int second = 0; second < 100; ++second) EXPECT_EQ(pool.give_back_idle(Time(second * 1s)), 0);
  EXPECT_EQ(pool.committed(0), 1000);
}

TEST_F(Idle, EveryGroupKeepsTheFloorsTokens) {
  PagePoolOptions o = idle_options();
  o.groups = {group(1, layer(8, 128)), group(1, layer(8, 128), 64)};
  o.idle_floor_bytes = 10 * kPageBytes + 1;
  PagePool pool(o);
  for (int g = 0; g < 2; ++g) pool.release(g, take(pool, 100, g));
  for (int second = 0; second <= 30; second += 10) give_back(pool, Time(second * 1s));
  EXPECT_EQ(pool.committed(0), 11);
  EXPECT_EQ(pool.committed(1), 11);
  EXPECT_GE(pool.stats().bytes_committed, o.idle_floor_bytes);
  pool.verify();
}

// ---- while decoding

// A sequence of random keys and values in the pages given, and attention of its newest token over it.
class Sequence {
 public:
  Sequence(PagePool& pool, std::vector<PageId> pages)
      : pool_(&pool), pages_(std::move(pages)), query_(32 * 128) {
    const auto tokens = static_cast<int32_t>(pages_.size()) * 16;
    std::normal_distribution<float> normal;
    std::mt19937 random(5);
    const auto draw = [&](std::vector<float>& values) {
      for (float& v : values) v = normal(random);
    };
    std::vector<float> keys(static_cast<size_t>(tokens) * 8 * 128), values(keys.size());
    std::vector<int64_t> slots(static_cast<size_t>(tokens));
    for (size_t t = 0; t < slots.size(); ++t) slots[t] = pages_[t / 16] * 16 + t % 16;
    draw(query_);
    for (int l = 0; l < pool.num_layers(); ++l) {
      draw(keys);
      draw(values);
      const StoreArgs args{keys.data(), values.data(), pool.layer_pages(l), slots.data(), tokens};
      EXPECT_TRUE(store(args, executor_));
    }
  }

  std::vector<float> attend() {
    std::vector<float> out;
    for (int l = 0; l < pool_->num_layers(); ++l) {
      const int32_t query_start[] = {0, 1};
      const int32_t seq_len[] = {static_cast<int32_t>(pages_.size()) * 16};
      std::vector<float> row(query_.size());
      AttentionArgs args;
      args.queries = query_.data();
      args.out = row.data();
      args.pages = pool_->layer_pages(l);
      args.num_q_heads = 32;
      args.num_seqs = 1;
      args.query_start = query_start;
      args.seq_lens = seq_len;
      args.block_table = pages_.data();
      args.block_table_stride = static_cast<int64_t>(pages_.size());
      args.scale = 0.088f;
      AttentionPlan plan;
      plan.prepare(args, executor_.num_workers());
      pagedkv::attend(args, plan, executor_);
      out.insert(out.end(), row.begin(), row.end());
    }
    return out;
  }

 private:
  PagePool* pool_;
  std::vector<PageId> pages_;
  std::vector<float> query_;
  ThreadPool executor_{1};
};

// From `low` to `high` bytes and back, again and again: 64 MiB and 1 GiB, 100 times, at PAGEDKV_TEST_SCALE=10.
TEST_F(Idle, MemoryComesAndGoesWhileASequenceKeepsItsBits) {
  const bool full = scaled(10) >= 100;
  const int cycles = full ? 100 : scaled(4);
  const int64_t low = (full ? 64 : 16) * kMiB, high = full ? 1024 * kMiB : 8 * low;
  PagePoolOptions o = large_pages();
  o.idle_seconds = 10;
  o.idle_keep = 1;
  o.idle_floor_bytes = low;
  PagePool pool(o);
  // The sequence: pages from everywhere, the last two among them.
  std::vector<PageId> all = take(pool, high / kPageBytes);
  std::mt19937 random(1);
  std::shuffle(all.begin(), all.end() - 2, random);
  const auto held = std::span(all).last(static_cast<size_t>(low / kPageBytes / 8));
  Sequence sequence(pool, {held.begin(), held.end()});
  const std::vector<float> bits = sequence.attend();
  const int64_t others = anonymous_bytes() - pool.bytes_resident();
  const std::byte* const address = pool.layer_pages(1).values.data;
  std::vector<PageId> rest(all.begin(), all.end() - static_cast<std::ptrdiff_t>(held.size()));

  Time now(0s);
  double worst = 0, longest_ms = 0;
  for (int cycle = 0; cycle < cycles; ++cycle) {
    for (PageId page : rest) fill(pool, page, cycle + 1);
    ASSERT_EQ(sequence.attend(), bits);
    pool.release(0, rest);
    give_back(pool, now += 10s);
    now += 10s;
    for (int64_t given = 1; given > 0;) {
      const auto start = std::chrono::steady_clock::now();
      given = pool.give_back_idle(now);
      longest_ms = std::max(longest_ms, std::chrono::duration<double, std::milli>(
                                            std::chrono::steady_clock::now() - start)
                                            .count());
    }
    ASSERT_EQ(pool.stats().bytes_committed, low) << "cycle " << cycle;
    const auto beyond = [&](int64_t bytes) {
      return static_cast<double>(bytes) / static_cast<double>(low) - 1;
    };
    const double pool_beyond = beyond(pool.bytes_resident());
    const double rss_beyond = beyond(anonymous_bytes() - others);
    ASSERT_GE(pool_beyond, 0);
    ASSERT_LE(pool_beyond, 0.05) << "cycle " << cycle;
    if (!kSanitized) {
      // Of the process as a whole: what else it allocates weighs more where little is held.
      ASSERT_LE(std::abs(rss_beyond), full ? 0.05 : 0.125) << "cycle " << cycle;
    }
    worst = std::max({worst, pool_beyond, rss_beyond});
    ASSERT_EQ(sequence.attend(), bits);
    ASSERT_EQ(pool.layer_pages(1).values.data, address);
    ASSERT_NO_THROW(pool.verify());
    ASSERT_TRUE(pool.try_allocate(0, rest)) << pool.refusal_text();
    ASSERT_GE(pool.bytes_resident(), high);
  }
  std::printf(
      "%d cycles, %lld MiB <-> %lld MiB: resident at most %.2f %% more, longest call %.1f ms\n",
      cycles, static_cast<long long>(low / kMiB), static_cast<long long>(high / kMiB), 100 * worst,
      longest_ms);
  EXPECT_EQ(pool.stats().bytes_moved, 0);
}

// ---- random

// The model: which pages are held and how many have memory.
class RandomGiveBack : public ::testing::TestWithParam<int> {};  // page_size: 2 to 64 KiB an array

TEST_P(RandomGiveBack, KeepsItsAccountsAndWhatIsHeld) {
  PagePoolOptions o = options(3, GetParam(), group(1, layer(4, 256)));
  o.max_pages = 300;
  o.idle_seconds = 5;
  o.idle_floor_bytes = 10 * 2 * GetParam() * 2048;
  bool refuse = false;
  o.commit_hook = [&](int64_t) { return !refuse; };
  PagePool pool(o);
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const int64_t row = 4 * 256 * 2 * GetParam();
  const auto first_word = [&](PageId page) {
    return reinterpret_cast<int32_t*>(pool.layer_pages(0).keys.data + page * row);
  };
  const auto last_word = [&](PageId page) {
    return reinterpret_cast<int32_t*>(pool.layer_pages(0).values.data + (page + 1) * row) - 1;
  };
  std::vector<PageId> held;
  Time now(0s);
  for (int round = scaled(3000); round > 0; --round) {
    const PagePoolStats before = pool.stats();
    refuse = below(10) == 0;
    switch (below(6)) {
      case 0:
      case 1: {
        const int64_t count = below(40);
        const auto pages = take(pool, count);
        if (static_cast<int64_t>(held.size()) + count > 300) {
          ASSERT_TRUE(pages.empty());
        } else if (count > before.pages_committed - before.pages_held && refuse) {
          ASSERT_TRUE(pages.empty());
          ASSERT_TRUE(testing::operator==(pool.stats(), before));
        } else {
          ASSERT_EQ(static_cast<int64_t>(pages.size()), count);
        }
        for (PageId page : pages) *first_word(page) = *last_word(page) = page + 1;
        held.insert(held.end(), pages.begin(), pages.end());
        break;
      }
      case 2:
      case 3: {
        std::shuffle(held.begin(), held.end(), random);
        const auto kept = static_cast<size_t>(below(static_cast<int64_t>(held.size()) + 1));
        pool.release(0, std::span(held).subspan(kept));
        held.resize(kept);
        break;
      }
      case 4: {
        const int64_t pages = 1 + below(310), capacity = pool.capacity(0);
        pool.shrink_to(0, pages);
        const int64_t end = held.empty() ? 0 : *std::max_element(held.begin(), held.end()) + 1;
        ASSERT_EQ(pool.capacity(0), std::min(capacity, std::max(pages, end)));
        ASSERT_LE(pool.committed(0), before.pages_committed);
        break;
      }
      default: {
        const int64_t given = pool.give_back_idle(now += below(4) * 1s);
        ASSERT_EQ(before.bytes_committed - pool.stats().bytes_committed, given);
        ASSERT_GE(pool.stats().bytes_committed,
                  std::min(before.bytes_committed, o.idle_floor_bytes));
      }
    }
    ASSERT_NO_THROW(pool.verify());
    const PagePoolStats s = pool.stats();
    ASSERT_EQ(s.pages_held, static_cast<int64_t>(held.size()));
    ASSERT_EQ(pool.pages_free(0), pool.capacity(0) - s.pages_held);
    ASSERT_GE(s.pages_committed, s.pages_held);
    ASSERT_GE(s.bytes_reserved, s.bytes_committed);
    if (round % 10 != 0) continue;
    ASSERT_GE(pool.bytes_resident(), s.bytes_committed);
    ASSERT_LE(pool.bytes_resident(),  // 1 byte in 8 of what is given back may stay
              s.bytes_committed + testing::resident_rounding(2, 0) +
                  (pool.extent(0) - s.pages_committed) * 2 * row / 8);
    for (PageId page : held) {
      ASSERT_EQ(*first_word(page), page + 1);
      ASSERT_EQ(*last_word(page), page + 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, RandomGiveBack, ::testing::Values(1, 3, 16, 32));

}  // namespace
}  // namespace pagedkv
