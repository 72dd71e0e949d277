// Memory that is refused: by the budget, by the machine, at any commit; nothing is left behind.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <vector>

#include "core/pool_testing.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv {
namespace {

using testing::group;
using testing::kSanitized;
using testing::layer;
using testing::options;
using testing::status_kib;
using testing::take;

constexpr int64_t kPageBytes =
    2 * 2 * 16 * 32 * 2;  // of options(): 2 layers, K and V, 16 tokens of 32 f16

bool contains(const std::string& text, int64_t number) {
  return text.find(std::to_string(number)) != std::string::npos;
}

TEST(Budget, OfBytesIsExact) {
  PagePoolOptions o = options(4);
  o.max_bytes = 10 * kPageBytes + kPageBytes - 1;
  PagePool pool(o);
  EXPECT_EQ(take(pool, 10).size(), 10u);
  const PagePoolStats before = pool.stats();
  EXPECT_TRUE(take(pool, 1).empty());
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kBudget);
  EXPECT_TRUE(contains(pool.refusal_text(), kPageBytes)) << pool.refusal_text();
  EXPECT_TRUE(contains(pool.refusal_text(), o.max_bytes)) << pool.refusal_text();
  EXPECT_TRUE(testing::operator==(pool.stats(), before));
  EXPECT_EQ(pool.stats().bytes_limit, o.max_bytes);
  pool.verify();
}

TEST(Budget, ClampsGrowthToWhatItAllows) {
  PagePoolOptions o = options(8);
  o.max_bytes = 10 * kPageBytes;
  PagePool pool(o);
  EXPECT_EQ(take(pool, 9).size(), 9u);
  EXPECT_EQ(pool.capacity(0), 10);  // the formula says 12
  EXPECT_EQ(take(pool, 1).size(), 1u);
}

TEST(Budget, IsUsedToTheLastPageAndNotBeyond) {
  PagePoolOptions o = options(100);
  o.max_bytes = 30 * kPageBytes;
  PagePool pool(o);
  for (int held = 1; held <= 30; ++held) {
    ASSERT_EQ(take(pool, 1).size(), 1u) << pool.refusal_text();
    ASSERT_LE(pool.stats().bytes_committed, o.max_bytes);
  }
  EXPECT_TRUE(take(pool, 1).empty());
  EXPECT_EQ(pool.stats().pages_committed, 30);
}

TEST(Budget, OfTheMachineIsAskedAtEachCommitAndLeavesTheHeadroom) {
  int64_t available = 1000 * kPageBytes;
  PagePoolOptions o = options(4);
  o.headroom_bytes = 3 * kPageBytes;
  o.available_bytes = [&] { return available; };
  PagePool pool(o);
  EXPECT_EQ(take(pool, 4).size(), 4u);
  available = 4 * kPageBytes;  // one page and the headroom
  EXPECT_TRUE(take(pool, 2).empty());
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kBudget);
  EXPECT_TRUE(contains(pool.refusal_text(), 2 * kPageBytes)) << pool.refusal_text();
  EXPECT_TRUE(contains(pool.refusal_text(), 5 * kPageBytes)) << pool.refusal_text();
  EXPECT_TRUE(contains(pool.refusal_text(), 3 * kPageBytes)) << pool.refusal_text();
  EXPECT_EQ(take(pool, 1).size(), 1u);
  EXPECT_EQ(pool.stats().bytes_limit, 5 * kPageBytes);
  available = 0;
  EXPECT_TRUE(take(pool, 1).empty());
  available = 100 * kPageBytes;
  EXPECT_EQ(take(pool, 1).size(), 1u);
  pool.verify();
}

TEST(Budget, TooSmallForAFixedPoolIsSaidAtTheStartWithBothNumbers) {
  PagePoolOptions o = options(64);
  o.dynamic = false;
  o.max_bytes = 63 * kPageBytes;
  try {
    PagePool pool(o);
    FAIL() << "a pool larger than its budget was made";
  } catch (const MemoryError& e) {
    EXPECT_TRUE(contains(e.what(), 64 * kPageBytes)) << e.what();
    EXPECT_TRUE(contains(e.what(), 63 * kPageBytes)) << e.what();
  }
  o.max_bytes = 64 * kPageBytes;
  EXPECT_NO_THROW(PagePool{o});
}

TEST(Budget, TooSmallForOnePageIsSaidAtTheStart) {
  PagePoolOptions o = options(64);
  o.headroom_bytes = 1000000;
  o.available_bytes = [] { return int64_t{1000000 + kPageBytes - 1}; };
  EXPECT_THROW(PagePool{o}, MemoryError);
}

TEST(Budget, IsSharedByTheGroups) {
  PagePoolOptions o = options(4);
  o.groups = {group(1, layer(1, 32)), group(1, layer(2, 32))};  // 2048 and 4096 bytes a page
  o.max_bytes = 10 * 2048 + 5 * 4096;
  PagePool pool(o);
  EXPECT_EQ(take(pool, 5, 1).size(), 5u);
  EXPECT_EQ(take(pool, 10, 0).size(), 10u);
  EXPECT_TRUE(take(pool, 1, 0).empty());
  EXPECT_TRUE(take(pool, 1, 1).empty());
  EXPECT_EQ(pool.stats().bytes_committed, o.max_bytes);
  pool.verify();
}

TEST(Budget, SizesTheAddressSpace) {
  PagePoolOptions o = options(4);
  o.max_pages = 0;
  o.max_bytes = 1000 * kPageBytes;
  EXPECT_EQ(PagePool(o).max_pages(0), 1000);
  o.max_bytes = 0;
  o.available_bytes = [] { return 500 * kPageBytes; };
  o.headroom_bytes = 0;
  EXPECT_EQ(PagePool(o).max_pages(0), 1000);  // twice what is left
  o.num_pages = 2000;
  EXPECT_EQ(PagePool(o).max_pages(0), 2000);
  o.num_pages = 4;
  o.available_bytes = {};
  PagePool real(o);
  EXPECT_GE(real.max_pages(0), 4);
  EXPECT_LE(real.stats().bytes_reserved,
            3 * int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

// The n-th commit fails, for every n that a long sequence meets; then the run goes on.
TEST(Refusal, OfAnyCommitLeavesNothingBehind) {
  int64_t commits = 0;
  int64_t fails_at = -1;
  PagePoolOptions o = options(4);
  o.groups = {group(2, layer(1, 32, PageFormat::kQ8)), group(1, layer(3, 64), 64)};
  o.commit_hook = [&](int64_t bytes) {
    EXPECT_GT(bytes, 0);
    return commits++ != fails_at;
  };
  const auto run = [&] {
    commits = 0;
    PagePool pool(o);
    BlockTable table(pool, 3000);
    int64_t refusals = 0;
    while (table.length() < 3000) {
      const PagePoolStats before = pool.stats();
      const int64_t resident = pool.bytes_resident();
      const int64_t length = table.length();
      if (table.try_append(8)) continue;
      ++refusals;
      EXPECT_TRUE(testing::operator==(pool.stats(), before));
      EXPECT_EQ(pool.bytes_resident(), resident);
      EXPECT_EQ(table.length(), length);
      EXPECT_EQ(pool.refusal(), PagePool::Refusal::kBudget);
      EXPECT_EQ(table.refusal_text(), pool.refusal_text());
      EXPECT_NE(table.refusal_text().find("was refused (hook)"), std::string::npos);
      pool.verify();
      EXPECT_THROW((fails_at = commits, table.append(8)), MemoryError);
    }
    pool.verify();
    return refusals;
  };
  EXPECT_EQ(run(), 0);
  const int64_t all = commits;
  ASSERT_GT(all, 8);
  for (int64_t n = 0; n < all; ++n) {
    fails_at = n;
    EXPECT_EQ(run(), 1) << "commit " << n;
  }
}

constexpr const char* kNeedsMemory =
    "a sanitizer maps memory of its own, which the limit would refuse";
constexpr const char* kDoesNotCount = "this kernel does not count RLIMIT_DATA";

// Runs `body` in a child of its own, since it takes the process's limits away; it returns what is
// wrong.
void expect_in_child(const std::function<std::string()>& body) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::string fault = body();
    const ssize_t written = write(pipe_ends[1], fault.data(), fault.size());
    _exit(fault.empty() && written == 0 ? 0 : 1);
  }
  close(pipe_ends[1]);
  char text[2000] = "";
  ssize_t got = 0;
  for (ssize_t n;
       (n = read(pipe_ends[0], text + got, sizeof text - 1 - static_cast<size_t>(got))) > 0;)
    got += n;
  close(pipe_ends[0]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (std::string(text) == kDoesNotCount) GTEST_SKIP() << text;
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status << ": " << text;
}

// The kernel's own refusal: RLIMIT_DATA counts what mprotect makes writable, array by array, so
// that `spare` bytes decide which array of a commit is struck.
std::string grow_into_data_limit(int64_t spare) {
  PagePoolOptions o = options(4, 16, group(4, layer(4, 128)));
  o.max_pages = 100000;
  PagePool pool(o);
  BlockTable table(pool);
  table.append(64);
  const rlim_t data = static_cast<rlim_t>(status_kib("VmData:") * 1024 + spare);
  const rlimit limit = {data, data};
  if (setrlimit(RLIMIT_DATA, &limit) != 0) return "setrlimit failed";
  int64_t resident = 0;
  int64_t writable = 0;
  PagePoolStats before;
  do {
    before = pool.stats();
    resident = pool.bytes_resident();
    writable = status_kib("VmData:");
    if (before.bytes_committed > spare + (int64_t{16} << 20)) return kDoesNotCount;
  } while (table.try_append(16));
  if (pool.refusal() != PagePool::Refusal::kBudget) return "refusal is not of the budget";
  if (pool.refusal_text().find("the machine refused") == std::string::npos ||
      pool.refusal_text().find("Cannot allocate memory") == std::string::npos)
    return "text: " + pool.refusal_text();
  if (!testing::operator==(pool.stats(), before)) return "statistics changed";
  if (pool.bytes_resident() != resident)
    return "resident " + std::to_string(pool.bytes_resident()) + ", was " +
           std::to_string(resident);
  if (status_kib("VmData:") > writable + 64)  // the lists of pages may have grown
    return "writable KiB " + std::to_string(status_kib("VmData:")) + ", were " +
           std::to_string(writable);
  pool.verify();
  table.trim_to(0);  // the pages that there are still serve
  if (!table.try_append(64)) return "the pool does not go on: " + table.refusal_text();
  pool.verify();
  return "";
}

TEST(Refusal, ByTheKernelInTheMiddleOfACommitIsUndone) {
  if (kSanitized) GTEST_SKIP() << kNeedsMemory;
  for (int64_t boundaries = 1; boundaries <= 24; ++boundaries) {
    const int64_t spare = (int64_t{4} << 20) + (boundaries << 18);
    expect_in_child([&] { return grow_into_data_limit(spare); });
    if (HasFailure() || IsSkipped()) return;
  }
}

// Our own guess at the address space is made smaller; a number that the caller gave is not.
std::string start_under_address_limit() {
  const rlim_t size = static_cast<rlim_t>(status_kib("VmSize:")) * 1024;
  const rlimit limit = {size + (rlim_t{64} << 20), size + (rlim_t{64} << 20)};
  if (setrlimit(RLIMIT_AS, &limit) != 0) return "setrlimit failed";
  PagePoolOptions o = options(4);
  o.available_bytes = [] { return int64_t{1} << 40; };
  o.max_pages = 0;
  PagePool pool(o);
  if (pool.max_pages(0) < 1000) return "max_pages " + std::to_string(pool.max_pages(0));
  if (pool.stats().bytes_reserved > int64_t{64} << 20) return "more address space than allowed";
  if (take(pool, 100).empty()) return pool.refusal_text();
  o.max_pages = 100000000;
  try {
    PagePool larger(o);
    return "a reservation beyond the limit was granted";
  } catch (const MemoryError&) {
    return "";
  }
}

TEST(Refusal, OfAddressSpaceMakesOurOwnGuessSmaller) {
  if (kSanitized) GTEST_SKIP() << kNeedsMemory;
  expect_in_child(start_under_address_limit);
}

}  // namespace
}  // namespace pagedkv
