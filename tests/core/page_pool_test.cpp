#include "pagedkv/core/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

#include "core/pool_testing.h"

namespace pagedkv {
namespace {

using testing::group;
using testing::layer;
using testing::options;
using testing::take;

// The text of the exception that `call` throws; empty when it throws none of this type.
template <class Error, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(PagePool, HandsOutFreshPagesInAscendingOrder) {
  PagePool pool(options(8));
  EXPECT_EQ(take(pool, 3), (std::vector<PageId>{0, 1, 2}));
  EXPECT_EQ(take(pool, 2), (std::vector<PageId>{3, 4}));
  EXPECT_EQ(pool.pages_free(0), 3);
  pool.verify();
}

TEST(PagePool, ReleasedPagesComeOutAgainInTheirOrder) {
  PagePool pool(options(8));
  const auto pages = take(pool, 5);
  pool.release(0, pages);
  EXPECT_EQ(take(pool, 5), pages);
}

TEST(PagePool, TakesAllOrNothing) {
  PagePoolOptions o = options(4);
  o.dynamic = false;
  PagePool pool(o);
  const auto pages = take(pool, 3);
  const PagePoolStats before = pool.stats();
  std::vector<PageId> out(2, -7);
  EXPECT_FALSE(pool.try_allocate(0, out));
  EXPECT_EQ(out, (std::vector<PageId>{-7, -7}));
  EXPECT_TRUE(testing::operator==(pool.stats(), before));
  EXPECT_EQ(pool.stats().refusals, 1);
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kCapacity);
  EXPECT_TRUE(contains(pool.refusal_text(), "needs 5 pages")) << pool.refusal_text();
  EXPECT_TRUE(contains(pool.refusal_text(), "growth is off and it has 4")) << pool.refusal_text();
  EXPECT_TRUE(pool.try_allocate(0, std::span(out).first(1)));
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kNone);
  pool.verify();
}

TEST(PagePool, AnAllocationOverGroupsIsAllOrNothing) {
  PagePoolOptions o = options(4);
  o.groups = {group(1, layer(1, 32)), group(2, layer(2, 64), 128)};
  o.dynamic = false;
  PagePool pool(o);
  std::vector<PageId> a(4), b(5);
  const PageRequest both[] = {{0, a, 0}, {1, b, 0}};
  EXPECT_FALSE(pool.try_allocate(both));
  EXPECT_EQ(pool.stats().pages_committed, 0);
  EXPECT_EQ(pool.stats().pages_held, 0);
  EXPECT_EQ(pool.bytes_resident(), 0);
  const PageRequest fits[] = {{0, a, 0}, {1, std::span(b).first(4), 0}};
  EXPECT_TRUE(pool.try_allocate(fits));
  EXPECT_EQ(pool.stats().pages_held, 8);
  EXPECT_EQ(pool.stats().commit_events, 1);
  pool.verify();
}

TEST(PagePool, EachGroupKnowsItsPeak) {
  PagePoolOptions o = options(8);
  o.groups.push_back(o.groups[0]);
  PagePool pool(o);
  const auto a = testing::take(pool, 5, 0), b = testing::take(pool, 2, 1);
  pool.release(0, a);
  (void)testing::take(pool, 3, 0);
  pool.release(1, b);
  EXPECT_EQ(pool.pages_peak(0), 5);
  EXPECT_EQ(pool.pages_peak(1), 2);
}

TEST(PagePool, ItsMapTellsWhatEachPageIs) {
  struct Keeper final : PageKeeper {
    void on_cached(int, PageId) noexcept override {}
    void on_held(int, PageId) noexcept override {}
    void on_copied(int, PageId, PageId, int) noexcept override {}
    int64_t reclaimable(int) const noexcept override { return 0; }
    int64_t reclaim(int, int64_t) noexcept override { return 0; }
  } keeper;
  PagePool pool(options(8));
  pool.set_keeper(&keeper);
  const auto pages = take(pool, 6);
  ASSERT_EQ(pages, (std::vector<PageId>{0, 1, 2, 3, 4, 5}));
  pool.keep(0, 2);
  pool.keep(0, 3);
  pool.retain(0, std::vector<PageId>{3, 4, 4});
  pool.release(0, std::vector<PageId>{1, 2});
  constexpr int32_t kFree = PagePool::kFreePage, kCached = PagePool::kCachedPage;
  EXPECT_EQ(pool.page_map(0), (std::vector<int32_t>{1, kFree, kCached, 2, 3, 1}));
  EXPECT_EQ(pool.pages_shared(0), 2);
  EXPECT_EQ(pool.pages_held(0), 4);
  EXPECT_EQ(pool.pages_cached(0), 1);
  pool.unkeep(0, 2);
  pool.set_keeper(nullptr);
}

TEST(PagePool, ASecondReleaseIsAnErrorThatChangesNothing) {
  PagePool pool(options(8));
  const auto pages = take(pool, 3);
  pool.retain(0, std::span(pages).first(1));
  pool.release(0, std::span(pages).subspan(2));
  std::vector<std::vector<int32_t>> references = {{2, 1, 0}};
  pool.verify(&references);
  const PagePoolStats before = pool.stats();
  for (const std::vector<PageId>& wrong : std::initializer_list<std::vector<PageId>>{
           {2}, {0, 2}, {2, 0, 1}, {1, 1}, {0, 1, 0, 0}, {-1}, {0, 4711}}) {
    EXPECT_THROW(pool.release(0, wrong), std::invalid_argument);
    pool.verify(&references);
    EXPECT_TRUE(testing::operator==(pool.stats(), before));
  }
  EXPECT_THROW(pool.retain(0, std::vector<PageId>{0, 2}), std::invalid_argument);
  pool.verify(&references);
  pool.release(0, std::vector<PageId>{0, 1, 0});  // as often as it is held
  EXPECT_EQ(pool.stats().pages_held, 0);
  pool.verify();
}

TEST(PagePool, CapacityIsThatOfNumPagesBeforeTheFirstPage) {
  PagePool pool(options(1024));
  EXPECT_EQ(pool.capacity(0), 1024);
  EXPECT_EQ(pool.pages_free(0), 1024);
  EXPECT_EQ(pool.stats().bytes_committed, 0);
  EXPECT_EQ(pool.bytes_resident(), 0);
  EXPECT_GT(pool.stats().bytes_reserved, 1024 * 16 * pool.bytes_per_token());
}

TEST(PagePool, AFixedPoolCommitsAllWithTheFirstPage) {
  PagePoolOptions o = options(1024);
  o.dynamic = false;
  o.max_pages = 0;
  PagePool pool(o);
  ASSERT_EQ(take(pool, 1).size(), 1u);
  EXPECT_EQ(pool.stats().pages_committed, 1024);
  EXPECT_EQ(pool.max_pages(0), 1024);
  EXPECT_GE(pool.bytes_resident(), 1024 * 16 * pool.bytes_per_token());
  EXPECT_EQ(take(pool, 1023).size(), 1023u);
  EXPECT_TRUE(take(pool, 1).empty());
  EXPECT_EQ(pool.stats().commit_events, 1);
  EXPECT_EQ(pool.stats().grow_events, 0);
  pool.verify();
}

TEST(PagePool, ADynamicPoolCommitsAsNeededAndGrowsByTheFormula) {
  PagePool pool(options(4));
  int64_t capacity = 4;
  int64_t grow_events = 0;
  for (int held = 1; held <= 300; ++held) {
    ASSERT_EQ(take(pool, 1).size(), 1u);
    if (held > capacity) {
      capacity = grown_pages(capacity, held, 0);
      ++grow_events;
    }
    EXPECT_EQ(pool.capacity(0), capacity);
    EXPECT_GE(pool.stats().pages_committed, held);
    EXPECT_LE(pool.stats().pages_committed, std::max(4, held + held / 2 + 1));
  }
  EXPECT_EQ(pool.stats().grow_events, grow_events);
  EXPECT_EQ(pool.stats().bytes_moved, 0);
  pool.verify();
}

TEST(PagePool, GrowthLeavesNoMoreUnusedThanTheSequenceMayTake) {
  PagePool pool(options(4));
  ASSERT_EQ(take(pool, 4).size(), 4u);
  ASSERT_EQ(take(pool, 1, 0, 1).size(), 1u);
  EXPECT_EQ(pool.capacity(0), 5);
  EXPECT_EQ(pool.stats().pages_committed, 5);
}

TEST(PagePool, CommitsNoMoreThanTheSequenceMayTake) {
  PagePool pool(options(1024));
  ASSERT_EQ(take(pool, 20, 0, 21).size(), 20u);
  ASSERT_EQ(take(pool, 1, 0, 1).size(), 1u);
  EXPECT_EQ(pool.stats().pages_committed, 21);
  EXPECT_EQ(pool.capacity(0), 1024);
}

TEST(PagePool, RefusesMoreThanItHasAddressSpaceFor) {
  PagePoolOptions o = options(4);
  o.max_pages = 10;
  PagePool pool(o);
  EXPECT_EQ(take(pool, 10).size(), 10u);
  EXPECT_TRUE(take(pool, 1).empty());
  EXPECT_EQ(pool.refusal(), PagePool::Refusal::kCapacity);
  EXPECT_TRUE(contains(pool.refusal_text(), "address space for 10")) << pool.refusal_text();
}

TEST(PagePool, RefusesCountsWhoseBytesNoIntegerHolds) {
  for (const int64_t pages : {int64_t{1} << 62, std::numeric_limits<int64_t>::max()}) {
    PagePoolOptions o = options(4);
    o.max_pages = 0;  // the address space is sized by the budget
    PagePool pool(o);
    EXPECT_FALSE(pool.try_grow(0, pages));
    EXPECT_EQ(pool.refusal(), PagePool::Refusal::kBudget);
    EXPECT_TRUE(contains(pool.refusal_text(), "9223372036854775807 bytes more"))
        << pool.refusal_text();
    std::vector<PageId> page(1);
    const PageRequest request{0, page, pages};
    EXPECT_TRUE(pool.try_allocate({&request, 1}));  // the room that it announces is only a hint
    pool.verify();
  }
}

TEST(PagePool, ShuffledIdsAreAPermutationThatTheSeedDecides) {
  PagePoolOptions o = options(64);
  o.dynamic = false;
  o.shuffle_seed = 5;
  PagePool a(o), b(o);
  o.shuffle_seed = 6;
  PagePool c(o);
  const auto pages = take(a, 64);
  EXPECT_EQ(take(b, 64), pages);
  EXPECT_NE(take(c, 64), pages);
  EXPECT_FALSE(std::is_sorted(pages.begin(), pages.end()));
  EXPECT_EQ(std::set<PageId>(pages.begin(), pages.end()).size(), 64u);
  EXPECT_EQ(*std::max_element(pages.begin(), pages.end()), 63);
  a.verify();
}

TEST(PagePool, CopyPageCopiesEveryLayerAndTheScales) {
  PagePoolOptions o = options(4);
  o.groups = {group(1, {2, 24, 40, PageFormat::kQ8, PageFormat::kF32})};
  PagePool pool(o);
  const auto pages = take(pool, 2);
  const LayerPages l = pool.layer_pages(0);
  ASSERT_NE(l.keys.scales, nullptr);
  ASSERT_EQ(l.values.scales, nullptr);
  std::memset(l.keys.data, 3, 16 * 2 * 24);
  std::memset(l.values.data, 5, 16 * 2 * 40 * 4);
  std::fill_n(l.keys.scales, 16 * 2, 0.5f);
  pool.copy_page(0, pages[0], pages[1]);
  EXPECT_EQ(std::memcmp(l.keys.data, l.keys.data + 16 * 2 * 24, 16 * 2 * 24), 0);
  EXPECT_EQ(std::memcmp(l.values.data, l.values.data + 16 * 2 * 40 * 4, 16 * 2 * 40 * 4), 0);
  EXPECT_EQ(l.keys.scales[2 * 16 * 2 - 1], 0.5f);
  EXPECT_THROW(pool.copy_page(0, pages[0], 2), std::invalid_argument);
}

TEST(PagePool, LayersAreNumberedGroupByGroup) {
  PagePoolOptions o = options(4);
  o.groups = {group(2, layer(1, 32)), group(3, layer(2, 64, PageFormat::kQ8), 512)};
  PagePool pool(o);
  EXPECT_EQ(pool.num_groups(), 2);
  EXPECT_EQ(pool.num_layers(), 5);
  EXPECT_EQ(pool.group_of_layer(1), 0);
  EXPECT_EQ(pool.group_of_layer(2), 1);
  EXPECT_EQ(pool.sliding_window(1), 512);
  EXPECT_EQ(pool.layer_pages(4).num_kv_heads, 2);
  EXPECT_EQ(pool.layer_pages(4).keys.format, PageFormat::kQ8);
  EXPECT_EQ(pool.bytes_per_token(), 2 * 2 * 32 * 2 + 3 * 2 * 2 * (64 + 4));
}

TEST(PagePool, CountsTheMostBytesInUseOverGroupsOfDifferentPages) {
  PagePoolOptions o = options(8);
  o.groups = {group(2, layer(1, 32)), group(3, layer(2, 64, PageFormat::kQ8), 512)};
  PagePool pool(o);
  const auto a = take(pool, 3, 0), b = take(pool, 3, 1);
  pool.release(0, a);
  pool.release(1, b);
  EXPECT_EQ(pool.stats().bytes_in_use, 0);
  EXPECT_EQ(pool.stats().bytes_peak, 3 * 16 * pool.bytes_per_token());
  take(pool, 5, 0);  // more pages, fewer bytes
  EXPECT_EQ(pool.stats().bytes_peak, 3 * 16 * pool.bytes_per_token());
}

TEST(PagePool, OptionsOutsideTheirLimitsAreNamed) {
  const auto text = [](auto change) {
    PagePoolOptions o = options(4);
    o.max_pages = 0;
    change(o);
    return error_of<std::invalid_argument>([&] { PagePool pool(o); });
  };
  const auto expect = [&](const char* part, auto change) {
    const std::string got = text(change);
    EXPECT_TRUE(contains(got, part)) << "wanted: " << part << "\ngot: " << got;
  };
  expect("page_size 0: must be in 1..256", [](auto& o) { o.page_size = 0; });
  expect("page_size 257", [](auto& o) { o.page_size = 257; });
  expect("head_dim 0", [](auto& o) { o.groups[0].layers[1].key_head_dim = 0; });
  expect("head_dim 513", [](auto& o) { o.groups[0].layers[1].value_head_dim = 513; });
  expect("num_kv_heads 0", [](auto& o) { o.groups[0].layers[0].num_kv_heads = 0; });
  expect("num_kv_heads -1", [](auto& o) { o.groups[0].layers[0].num_kv_heads = -1; });
  expect("num_pages 0", [](auto& o) { o.num_pages = 0; });
  expect("num_pages -5", [](auto& o) { o.num_pages = -5; });
  expect("max_pages 3: must be 0", [](auto& o) { o.max_pages = 3; });
  expect("max_bytes -1", [](auto& o) { o.max_bytes = -1; });
  expect("headroom_bytes -1", [](auto& o) { o.headroom_bytes = -1; });
  expect("idle_seconds -1.0", [](auto& o) { o.idle_seconds = -1; });
  expect("idle_seconds nan", [](auto& o) { o.idle_seconds = std::nan(""); });
  expect("idle_keep 0.5", [](auto& o) { o.idle_keep = 0.5; });
  expect("idle_floor_bytes -1", [](auto& o) { o.idle_floor_bytes = -1; });
  expect("sliding_window -1", [](auto& o) { o.groups[0].sliding_window = -1; });
  expect("layer group", [](auto& o) { o.groups.clear(); });
  expect("layer group", [](auto& o) { o.groups[0].layers.clear(); });
  expect("2147483647 pages of 34359738368 bytes: must be at most 140737488355328", [](auto& o) {
    o.num_pages = 2147483647;
    o.page_size = 256;
    o.groups[0].layers = {{32768, 512, 512, PageFormat::kF32, PageFormat::kF32}};
  });
}

TEST(GrownPages, IsTheSeedsFormula) {
  std::ifstream file(PAGEDKV_TEST_DATA "/grown_pages.txt");
  std::string line;
  int cases = 0;
  while (std::getline(file, line)) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    int64_t current, tokens, block_size, window, wanted;
    ASSERT_TRUE(words >> current >> tokens >> block_size >> window >> wanted) << line;
    block_size = std::max<int64_t>(1, block_size);
    const auto pages = [&](int64_t n) { return n <= 0 ? 0 : (n + block_size - 1) / block_size; };
    EXPECT_EQ(grown_pages(current, pages(tokens), pages(window)), wanted) << line;
    ++cases;
  }
  EXPECT_EQ(cases, 103);
}

// FC-10. The model: how often each page is held, and how many pages there are.
class RandomPool : public ::testing::TestWithParam<int> {};

TEST_P(RandomPool, KeepsItsAccountsInEveryOrder) {
  PagePoolOptions o = options(64, GetParam());
  o.dynamic = false;
  o.shuffle_seed = 7;
  PagePool pool(o);
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<std::vector<int32_t>> count(1, std::vector<int32_t>(64, 0));
  std::vector<std::vector<PageId>> holders;  // each entry holds its pages once
  for (int round = testing::scaled(100000); round > 0; --round) {
    const auto held = std::count_if(count[0].begin(), count[0].end(), [](int c) { return c > 0; });
    const int what = below(10);
    if (what < 4) {  // allocate
      std::vector<PageId> pages(static_cast<size_t>(below(9)), -1);
      const bool fits = static_cast<int64_t>(pages.size()) <= 64 - held;
      ASSERT_EQ(pool.try_allocate(0, pages), fits);
      if (!fits) continue;
      for (PageId page : pages) {
        ASSERT_EQ(count[0][page], 0) << "page " << page << " was handed out while held";
        ++count[0][page];
      }
      holders.push_back(pages);
    } else if (what < 6 && !holders.empty()) {  // share a beginning
      std::vector<PageId> pages = holders[below(static_cast<int>(holders.size()))];
      pages.resize(static_cast<size_t>(below(static_cast<int>(pages.size()) + 1)));
      pool.retain(0, pages);
      for (PageId page : pages) ++count[0][page];
      holders.push_back(pages);
    } else if (what < 9 && !holders.empty()) {  // give back an end, or all
      const int i = below(static_cast<int>(holders.size()));
      const int kept = what == 6 ? below(static_cast<int>(holders[i].size()) + 1) : 0;
      const auto given = std::span(holders[i]).subspan(kept);
      pool.release(0, given);
      for (PageId page : given) --count[0][page];
      holders[i].resize(kept);
      if (kept == 0) holders.erase(holders.begin() + i);
    } else {  // free again
      PageId page = below(70) - 3;
      if (page >= 0 && page < 64 && count[0][page] > 0) continue;
      ASSERT_THROW(pool.release(0, {&page, 1}), std::invalid_argument);
    }
    ASSERT_NO_THROW(pool.verify(pool.stats().pages_committed > 0 ? &count : nullptr));
    ASSERT_EQ(pool.pages_free(0) + pool.stats().pages_held, 64);
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, RandomPool, ::testing::Values(1, 3, 16, 32));

}  // namespace
}  // namespace pagedkv
