// Memory that grows in place: addresses, bytes, and how much the kernel really holds.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include "core/pool_testing.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv {
namespace {

using testing::group;
using testing::layer;
using testing::num_mappings;
using testing::options;
using testing::status_kib;
using testing::take;

std::vector<const void*> addresses(const PagePool& pool) {
  std::vector<const void*> all;
  for (int l = 0; l < pool.num_layers(); ++l) {
    const LayerPages p = pool.layer_pages(l);
    all.insert(all.end(), {p.keys.data, p.keys.scales, p.values.data, p.values.scales});
  }
  return all;
}

// Every byte of a page's keys is this value, in every layer.
bool is_filled(const PagePool& pool, PageId page, std::byte value) {
  for (int l = 0; l < pool.num_layers(); ++l) {
    const LayerPages p = pool.layer_pages(l);
    const int64_t bytes =
        int64_t{p.page_size} * p.num_kv_heads * row_bytes(p.keys.format, p.keys.head_dim);
    const std::byte* const begin = p.keys.data + page * bytes;
    if (std::any_of(begin, begin + bytes, [&](std::byte b) { return b != value; })) return false;
  }
  return true;
}

bool is_zero(const PagePool& pool, PageId page) { return is_filled(pool, page, std::byte{0}); }

// Marks the keys of a page, and tells whether the mark is there, in every layer.
std::byte mark_of(PageId page) { return static_cast<std::byte>(1 + page % 255); }

void mark(const PagePool& pool, PageId page) {
  for (int l = 0; l < pool.num_layers(); ++l) {
    const LayerPages p = pool.layer_pages(l);
    const int64_t bytes =
        int64_t{p.page_size} * p.num_kv_heads * row_bytes(p.keys.format, p.keys.head_dim);
    std::memset(p.keys.data + page * bytes, static_cast<int>(mark_of(page)),
                static_cast<size_t>(bytes));
  }
}

bool is_marked(const PagePool& pool, PageId page) { return is_filled(pool, page, mark_of(page)); }

class Growth : public ::testing::TestWithParam<PageFormat> {
 protected:
  PagePoolOptions small_model(int32_t num_pages) const {  // the shape of SmolLM2-135M
    return options(num_pages, 16, group(30, layer(3, 64, GetParam())));
  }
  int64_t rounding(const PagePool& pool) const {
    return testing::resident_rounding(num_arrays(), pool.stats().bytes_committed / num_arrays());
  }
  int64_t num_arrays() const { return 30 * (has_scales(GetParam()) ? 4 : 2); }
};

// FC-14.
TEST_P(Growth, FollowsTheSequenceUpToItsWindow) {
  PagePool pool(small_model(4));
  const int64_t token_bytes = pool.bytes_per_token();
  BlockTable table(pool, 1000);
  ASSERT_EQ(pool.capacity(0) * 16, 64);

  std::ofstream("/proc/self/clear_refs") << 5;  // the peak counts from here
  const int64_t rss_before = status_kib("VmRSS:");
  ASSERT_TRUE(table.try_append(1));
  EXPECT_EQ(pool.stats().bytes_committed, 64 * token_bytes);
  EXPECT_LE(pool.bytes_resident(), 64 * token_bytes + rounding(pool));

  const auto before = addresses(pool);
  mark(pool, table.pages(0)[0]);
  int64_t peak = 0;
  for (int length = 2; length <= 1000; ++length) {
    ASSERT_TRUE(table.try_append(1)) << table.refusal_text();
    ASSERT_LE(pool.capacity(0) * 16, 1008);
    ASSERT_LE(pool.stats().pages_committed, pool.capacity(0));
    if (length % 16 == 1) {
      mark(pool, table.pages(0).back());
      peak = std::max(peak, pool.bytes_resident());
    }
  }
  EXPECT_EQ(addresses(pool), before);
  for (PageId page : table.pages(0)) EXPECT_TRUE(is_marked(pool, page)) << page;
  EXPECT_EQ(pool.stats().bytes_moved, 0);
  const int64_t final_bytes = pool.bytes_resident();
  EXPECT_LE(final_bytes, 1008 * token_bytes + rounding(pool));
  EXPECT_LE(peak, final_bytes + final_bytes / 10);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const int64_t growth_kib = status_kib("VmHWM:") - rss_before;
  EXPECT_LE(growth_kib, (final_bytes + final_bytes / 10) / 1024 + 512);
#else
  (void)rss_before;
#endif

  const PagePoolStats stats = pool.stats();
  EXPECT_FALSE(table.try_append(1));
  EXPECT_EQ(table.refusal_text(), "sequence needs 1001 tokens, the context window is 1000");
  EXPECT_THROW(table.append(1), CapacityError);
  EXPECT_EQ(table.length(), 1000);
  EXPECT_TRUE(testing::operator==(pool.stats(), stats));
  EXPECT_EQ(pool.bytes_resident(), final_bytes);
  pool.verify();
}

TEST_P(Growth, From64SlotsTo8192MovesNothing) {
  PagePool pool(small_model(4));
  BlockTable table(pool);
  table.append(64);
  const auto before = addresses(pool);
  for (PageId page : table.pages(0)) mark(pool, page);
  while (table.length() < 8192) {
    table.append(32);
    const PagePoolStats s = pool.stats();
    ASSERT_GE(pool.bytes_resident(), s.bytes_in_use);
    ASSERT_GE(pool.bytes_resident(), s.bytes_committed);
    ASSERT_LE(pool.bytes_resident(), s.bytes_committed + rounding(pool));
    ASSERT_LE(s.bytes_committed, s.bytes_in_use * 3 / 2 + 16 * pool.bytes_per_token());
    ASSERT_GE(s.bytes_reserved, s.bytes_committed);
  }
  EXPECT_EQ(addresses(pool), before);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(is_marked(pool, table.pages(0)[i]));
  EXPECT_EQ(pool.stats().bytes_moved, 0);
  EXPECT_GT(pool.stats().grow_events, 5);
  EXPECT_LT(pool.stats().grow_events, 25);
  pool.verify();
}

TEST_P(Growth, AFirstWriteOf1024PagesIsOneCommit) {
  PagePool pool(small_model(1024));
  EXPECT_EQ(take(pool, 1024).size(), 1024u);
  EXPECT_EQ(pool.stats().commit_events, 1);
  EXPECT_EQ(pool.stats().grow_events, 0);
  EXPECT_GE(pool.bytes_resident(), 1024 * 16 * pool.bytes_per_token());
  mark(pool, 1023);
  EXPECT_TRUE(is_marked(pool, 1023));
  pool.verify();
}

TEST_P(Growth, AnArrayCostsTwoMappingsHoweverOftenItGrows) {
  const int64_t before = num_mappings();
  PagePool pool(small_model(4));
  for (int i = 0; i < 300; ++i) ASSERT_FALSE(take(pool, 3).empty());
  EXPECT_LE(num_mappings() - before, 2 * num_arrays() + 8);
}

TEST(Elastic, GrowsOnRequestWithItsMemory) {
  PagePoolOptions o = options(8);
  PagePool pool(o);
  ASSERT_TRUE(pool.try_grow(0, 100));
  EXPECT_EQ(pool.capacity(0), 100);
  PagePoolStats s = pool.stats();
  EXPECT_EQ(s.pages_committed, 100);
  EXPECT_EQ(s.grow_events, 1);
  EXPECT_GT(s.touch_seconds, 0);
  EXPECT_EQ(take(pool, 100).size(), 100u);
  EXPECT_EQ(pool.stats().commit_events, s.commit_events);  // it was there
  ASSERT_TRUE(pool.try_grow(0, 50));                       // nothing to do
  EXPECT_EQ(pool.capacity(0), 100);
  EXPECT_FALSE(pool.try_grow(0, pool.max_pages(0) + 1));
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kCapacity);
  EXPECT_EQ(pool.capacity(0), 100);
  ASSERT_TRUE(pool.try_grow(0, 101, 120));  // no further than the window
  EXPECT_EQ(pool.capacity(0), 120);
  pool.verify();

  o.dynamic = false;
  PagePool fixed(o);
  EXPECT_FALSE(fixed.try_grow(0, 9));
  ASSERT_TRUE(fixed.try_grow(0, 3));
  EXPECT_EQ(fixed.stats().pages_committed, 8);  // all, as with the first page
}

TEST(Elastic, ShrinksDownToWhatIsHeld) {
  PagePool pool(options(4, 16, group(2, layer(4, 64))));
  const std::vector<PageId> pages = take(pool, 1000);
  for (PageId page : pages) mark(pool, page);
  const int64_t full = pool.bytes_resident();
  const auto kept = std::span(pages).first(10);
  pool.release(0, std::span(pages).subspan(10));
  pool.retain(0, std::vector<PageId>{3});
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.capacity(0), 10);
  EXPECT_EQ(pool.stats().pages_committed, 10);
  EXPECT_EQ(pool.stats().shrink_events, 1);
  EXPECT_LT(pool.bytes_resident(), full / 20);
  for (PageId page : kept) EXPECT_TRUE(is_marked(pool, page));
  pool.verify();
  pool.shrink_to(0, 500);  // never raises it
  EXPECT_EQ(pool.capacity(0), 10);
  EXPECT_EQ(pool.stats().shrink_events, 1);
  pool.release(0, kept.first(9));  // page 3 has another holder, page 9 is the last
  pool.shrink_to(0, 1);
  EXPECT_EQ(pool.capacity(0), 10);
  EXPECT_EQ(pool.extent(0), 10);
  EXPECT_EQ(pool.stats().pages_committed, 2);
  EXPECT_EQ(pool.stats().shrink_events, 2);
  EXPECT_TRUE(is_marked(pool, 3));
  EXPECT_TRUE(is_marked(pool, 9));
  pool.verify();
  const std::vector<PageId> again = take(pool, 100);
  ASSERT_EQ(again.size(), 100u);
  for (PageId page : again) EXPECT_TRUE(is_zero(pool, page)) << page;
  EXPECT_THROW(pool.shrink_to(0, 0), std::invalid_argument);
  pool.verify();
}

TEST(Elastic, KeepsItsAccountsInEveryOrder) {
  PagePoolOptions o = options(3);
  o.max_pages = 300;
  PagePool pool(o);
  std::mt19937 random(11);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  std::vector<PageId> held;
  for (int round = testing::scaled(20000); round > 0; --round) {
    const int64_t capacity = pool.capacity(0);
    switch (below(4)) {
      case 0: {
        const int64_t count = below(20);
        const bool fits = count <= 300 - static_cast<int64_t>(held.size());
        const auto pages = take(pool, count);
        ASSERT_EQ(pages.size(), fits ? static_cast<size_t>(count) : 0);
        held.insert(held.end(), pages.begin(), pages.end());
        break;
      }
      case 1: {
        const auto count = static_cast<size_t>(below(static_cast<int64_t>(held.size()) + 1));
        std::shuffle(held.begin(), held.end(), random);
        pool.release(0, std::span(held).subspan(held.size() - count));
        held.resize(held.size() - count);
        break;
      }
      case 2: {
        const int64_t pages = 1 + below(310);
        ASSERT_EQ(pool.try_grow(0, pages), pages <= 300);
        if (pages <= 300) {
          ASSERT_GE(pool.stats().pages_committed, pages);
        }
        ASSERT_GE(pool.capacity(0), capacity);
        break;
      }
      default: {
        const int64_t pages = 1 + below(310);
        pool.shrink_to(0, pages);
        const int64_t last = held.empty() ? 0 : *std::max_element(held.begin(), held.end()) + 1;
        ASSERT_LE(pool.capacity(0), capacity);
        ASSERT_EQ(pool.capacity(0), std::min(capacity, std::max(pages, last)));
      }
    }
    ASSERT_NO_THROW(pool.verify());
    ASSERT_EQ(pool.stats().pages_held, static_cast<int64_t>(held.size()));
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Growth,
                         ::testing::Values(PageFormat::kF32, PageFormat::kF16, PageFormat::kQ8),
                         [](const auto& info) {
                           return std::string(page_format_name(info.param));
                         });

}  // namespace
}  // namespace pagedkv
