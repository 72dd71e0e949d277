#include "pagedkv/base/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

namespace pagedkv {
namespace {

TEST(ThreadPool, RunsEachItemOnceOnAWorkerOfItsOwn) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.num_workers(), threads);
    for (int items : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> times(items), busy(threads);
      std::vector<int64_t> last(threads, -1);
      std::atomic<bool> shared{false}, fell{false};
      pool.run(items, [&](int64_t item, int worker) {
        if (busy[worker].fetch_add(1) != 0) shared = true;
        if (item <= last[worker]) fell = true;
        last[worker] = item;
        ++times[item];
        --busy[worker];
      });
      EXPECT_FALSE(shared) << "two calls on one worker at once";
      EXPECT_FALSE(fell) << "items must rise on each worker";
      for (auto& n : times) ASSERT_EQ(n, 1);
    }
  }
}

TEST(ThreadPool, ManyShortRunsFollowEachOther) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int i = 0; i < 5000; ++i) pool.run(3, [&](int64_t item, int) { sum += item; });
  EXPECT_EQ(sum, 5000 * 3);
}

TEST(ThreadPool, LimitsThreads) {
  EXPECT_THROW(ThreadPool(0), std::invalid_argument);
  EXPECT_THROW(ThreadPool(1025), std::invalid_argument);
}

}  // namespace
}  // namespace pagedkv
