#include "core/page_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "pagedkv/base/error.h"

namespace pagedkv {
namespace {

const int64_t kOsPage = sysconf(_SC_PAGESIZE);

int64_t in_os_pages(int64_t bytes) { return (bytes + kOsPage - 1) / kOsPage * kOsPage; }

TEST(PageMemory, ReservesWithoutHolding) {
  PageMemory memory(6000, 1000);
  EXPECT_GE(memory.reserved_bytes(), 6000 * 1000 + PageMemory::kSlackBytes);
  EXPECT_EQ(memory.resident_bytes(), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 64, 0u);
}

TEST(PageMemory, HugePagesBackNothingThatIsNotCommitted) {
  for (const int64_t kib : {1900, 2000, 2048, 2100, 4000, 4090, 6143}) {
    PageMemory memory(1024, 10000);
    ASSERT_EQ(memory.try_commit(kib), 0);
    EXPECT_EQ(memory.resident_bytes(), in_os_pages(kib * 1024 + PageMemory::kSlackBytes)) << kib;
    ASSERT_EQ(memory.try_commit(kib + 3000), 0);
    EXPECT_EQ(memory.resident_bytes(), in_os_pages((kib + 3000) * 1024 + PageMemory::kSlackBytes))
        << kib;
  }
}

TEST(PageMemory, HoldsTheCommittedPagesAndTheirSlackAlone) {
  PageMemory memory(6000, 300);  // below 2 MiB: no huge page fits, whatever the system's setting
  for (int64_t pages : {1, 2, 3, 50, 51, 299, 300}) {
    ASSERT_EQ(memory.try_commit(pages), 0);
    EXPECT_EQ(memory.pages(), pages);
    EXPECT_EQ(memory.resident_bytes(), in_os_pages(pages * 6000 + PageMemory::kSlackBytes));
  }
}

TEST(PageMemory, GrowthKeepsAddressesAndBytes) {
  PageMemory memory(4096, 5000);
  std::byte* const data = memory.data();
  ASSERT_EQ(memory.try_commit(3), 0);
  std::memset(data, 0x5a, 3 * 4096);
  for (int64_t pages = 4; pages <= 5000; pages = pages * 3 / 2)
    ASSERT_EQ(memory.try_commit(pages), 0);
  EXPECT_EQ(memory.data(), data);
  for (int i = 0; i < 3 * 4096; ++i) ASSERT_EQ(data[i], std::byte{0x5a});
  EXPECT_EQ(data[3 * 4096], std::byte{0});
}

TEST(PageMemory, TheSlackBehindTheLastPageCanBeRead) {
  for (int64_t page_bytes : {1, 63, 4032, 4096, 262144}) {
    PageMemory memory(page_bytes, 3);
    ASSERT_EQ(memory.try_commit(3), 0);
    const std::byte* slack = memory.data() + 3 * page_bytes;
    for (int i = 0; i < PageMemory::kSlackBytes; ++i) EXPECT_EQ(slack[i], std::byte{0});
  }
}

TEST(PageMemory, GivesBackFromTheEndAndComesBackZeroed) {
  PageMemory memory(6000, 1000);
  ASSERT_EQ(memory.try_commit(500), 0);
  std::memset(memory.data(), 1, 500 * 6000);
  memory.decommit_to(7);
  EXPECT_EQ(memory.pages(), 7);
  EXPECT_EQ(memory.resident_bytes(), in_os_pages(7 * 6000 + PageMemory::kSlackBytes));
  EXPECT_EQ(memory.data()[7 * 6000 - 1], std::byte{1});
  ASSERT_EQ(memory.try_commit(500), 0);
  EXPECT_TRUE(std::all_of(memory.data() + 7 * 6000, memory.data() + 500 * 6000,
                          [](std::byte b) { return b == std::byte{0}; }));
  memory.decommit_to(0);
  EXPECT_EQ(memory.resident_bytes(), 0);
}

TEST(PageMemory, AHoleComesBackZeroedAndKeepsItsNeighbours) {
  for (const int64_t page_bytes : {192, 4096, 6000, 32768}) {
    PageMemory memory(page_bytes, 1001);
    ASSERT_EQ(memory.try_commit(1000), 0);
    memory.use_huge_pages(false);
    std::memset(memory.data(), 1, static_cast<size_t>(1000 * page_bytes));
    const int64_t full = memory.resident_bytes();
    const auto is = [&](PageRange pages, int value) {
      const std::byte* const data = memory.data();
      return std::all_of(data + pages.first * page_bytes, data + pages.last * page_bytes,
                         [&](std::byte b) { return b == static_cast<std::byte>(value); });
    };
    ASSERT_TRUE(memory.try_give_back({500, 700}, {500, 700}));
    EXPECT_EQ(memory.resident_bytes(), full - memory.hole_bytes({500, 700}));
    ASSERT_TRUE(memory.try_give_back({100, 500}, {100, 700}));  // the two join
    EXPECT_EQ(memory.resident_bytes(), full - memory.hole_bytes({100, 700}));
    EXPECT_GT(memory.hole_bytes({100, 700}), 600 * page_bytes - 3 * kOsPage);
    EXPECT_TRUE(is({0, 100}, 1) && is({700, 1000}, 1)) << page_bytes;

    ASSERT_EQ(memory.try_restore({100, 700}, 333), 0);
    EXPECT_EQ(memory.resident_bytes(), full - memory.hole_bytes({433, 700})) << page_bytes;
    EXPECT_TRUE(is({100, 433}, 0)) << page_bytes;
    ASSERT_EQ(memory.try_restore({433, 700}, 267), 0);
    EXPECT_EQ(memory.resident_bytes(), full);
    EXPECT_TRUE(is({0, 100}, 1) && is({100, 700}, 0) && is({700, 1000}, 1)) << page_bytes;
  }
}

TEST(PageMemory, ARestoreIsUndone) {
  PageMemory memory(6000, 1001);
  ASSERT_EQ(memory.try_commit(1000), 0);
  ASSERT_TRUE(memory.try_give_back({0, 900}, {0, 900}));
  const int64_t resident = memory.resident_bytes();
  ASSERT_EQ(memory.try_restore({0, 900}, 77), 0);
  EXPECT_GT(memory.resident_bytes(), resident);
  ASSERT_TRUE(memory.try_give_back({0, 77}, {0, 900}));
  EXPECT_EQ(memory.resident_bytes(), resident);
}

TEST(PageMemory, MovesWithItsAddress) {
  PageMemory a(6000, 10);
  ASSERT_EQ(a.try_commit(2), 0);
  std::byte* const data = a.data();
  data[0] = std::byte{4};
  PageMemory b(std::move(a));
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.data()[0], std::byte{4});
  EXPECT_EQ(b.pages(), 2);
}

TEST(PageMemory, RefusedAddressSpaceIsAMemoryErrorThatNamesIt) {
  try {
    PageMemory memory(int64_t{1} << 36, int64_t{1} << 24);  // 2^60 bytes
    FAIL() << "2^60 bytes of address space were granted";
  } catch (const MemoryError& e) {
    EXPECT_NE(std::string(e.what()).find("16777216 pages"), std::string::npos) << e.what();
  }
}

TEST(PageMemoryDeathTest, WritingBeyondTheLastPageOfTheArrayFaults) {
  PageMemory memory(4096, 64);
  ASSERT_EQ(memory.try_commit(64), 0);
  volatile std::byte* const data = memory.data();
  EXPECT_DEATH(data[memory.reserved_bytes() - 1] = std::byte{1}, "");
}

}  // namespace
}  // namespace pagedkv
