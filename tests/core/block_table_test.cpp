#include "pagedkv/core/block_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>

#include "core/pool_testing.h"

namespace pagedkv {
namespace {

using testing::group;
using testing::layer;
using testing::options;

std::string refusal_of(BlockTable& table, int64_t num_tokens) {
  const int64_t length = table.length();
  const auto pages = std::vector<PageId>(table.pages(0).begin(), table.pages(0).end());
  EXPECT_FALSE(table.try_append(num_tokens));
  EXPECT_EQ(table.length(), length);
  EXPECT_TRUE(std::equal(pages.begin(), pages.end(), table.pages(0).begin(), table.pages(0).end()));
  return table.refusal_text();
}

TEST(BlockTable, TakesAPageWhenTheLastOneIsFull) {
  PagePool pool(options(8));
  BlockTable table(pool);
  EXPECT_EQ(table.capacity(), 0);
  ASSERT_TRUE(table.try_append(1));
  EXPECT_EQ(table.pages(0).size(), 1u);
  ASSERT_TRUE(table.try_append(15));
  EXPECT_EQ(table.pages(0).size(), 1u);
  EXPECT_EQ(table.capacity(), 16);
  ASSERT_TRUE(table.try_append(17));
  EXPECT_EQ(table.pages(0).size(), 3u);
  EXPECT_EQ(table.length(), 33);
  ASSERT_TRUE(table.try_append(0));
  EXPECT_EQ(table.length(), 33);
  EXPECT_THROW((void)table.try_append(-1), std::invalid_argument);
}

TEST(BlockTable, GivesItsPagesBackWhenDestroyed) {
  PagePool pool(options(8));
  {
    BlockTable table(pool);
    table.append(100);
    EXPECT_EQ(pool.stats().pages_held, 7);
  }
  EXPECT_EQ(pool.stats().pages_held, 0);
  pool.verify();
}

TEST(BlockTable, AForkSharesEveryPageUntilOneOfThemWrites) {
  PagePool pool(options(16));
  BlockTable parent(pool);
  parent.append(40);  // two full pages and half of a third
  std::memset(pool.layer_pages(0).keys.data + parent.pages(0)[2] * 16 * 64, 7, 16 * 64);
  BlockTable first = parent.fork(), second = first.fork();
  EXPECT_EQ(first.length(), 40);
  EXPECT_EQ(pool.stats().pages_held, 3);
  const PageId shared = parent.pages(0)[2];
  first.append(1);  // its own copy
  EXPECT_NE(first.pages(0)[2], shared);
  EXPECT_EQ(pool.stats().pages_held, 4);
  EXPECT_EQ(std::memcmp(pool.layer_pages(0).keys.data + first.pages(0)[2] * 16 * 64,
                        pool.layer_pages(0).keys.data + shared * 16 * 64, 8 * 64),
            0);
  parent.append(1);  // the page is second's alone then
  EXPECT_EQ(pool.references(0, shared), 1);
  second.append(8);
  EXPECT_EQ(second.pages(0)[2], shared);
  EXPECT_EQ(pool.stats().pages_held, 5);
  for (const BlockTable* table : {&parent, &first, &second})
    EXPECT_EQ(table->pages(0)[0], parent.pages(0)[0]);
  pool.verify();
  EXPECT_EQ(BlockTable(pool).fork().length(), 0);
}

TEST(BlockTable, BillionsOfPagesAreRefusedBeforeTheirListIsMade) {
  PagePoolOptions o = options(8, 1, testing::group(1, testing::layer(1, 2)));
  o.max_pages = std::numeric_limits<int32_t>::max() / 64;
  o.max_bytes = int64_t{1} << 20;
  PagePool pool(o);
  BlockTable table(pool);
  EXPECT_FALSE(table.try_append(int64_t{1} << 24));
  EXPECT_NE(table.refusal_text().find("1048576"), std::string::npos) << table.refusal_text();
  EXPECT_EQ(table.length(), 0);
  EXPECT_EQ(pool.stats().bytes_committed, 0);
  table.append(5);
  pool.verify();
}

TEST(BlockTable, MovesItsPagesOnce) {
  PagePool pool(options(8));
  BlockTable a(pool), b(pool);
  a.append(40);
  b.append(20);
  b = std::move(a);
  EXPECT_EQ(pool.stats().pages_held, 3);
  EXPECT_EQ(b.length(), 40);
  BlockTable c(std::move(b));
  EXPECT_EQ(c.length(), 40);
  EXPECT_EQ(c.pages(0).size(), 3u);
  EXPECT_EQ(pool.stats().pages_held, 3);
  pool.verify();
}

TEST(BlockTable, TheContextWindowIsALimitWithAName) {
  PagePool pool(options(8));
  BlockTable table(pool, 1000);
  table.append(1000);
  EXPECT_EQ(refusal_of(table, 1), "sequence needs 1001 tokens, the context window is 1000");
  try {
    table.append(5);
    FAIL() << "no error";
  } catch (const CapacityError& e) {
    EXPECT_STREQ(e.what(), "sequence needs 1005 tokens, the context window is 1000");
  }
  EXPECT_EQ(refusal_of(table, INT64_MAX),
            "sequence needs 1000 + 9223372036854775807 tokens, the context window is 1000");
  EXPECT_THROW(BlockTable(pool, -1), std::invalid_argument);
}

TEST(BlockTable, GrowthOffIsACapacityErrorThatChangesNothing) {
  PagePoolOptions o = options(4);
  o.dynamic = false;
  o.max_pages = 0;
  PagePool pool(o);
  BlockTable a(pool), b(pool);
  a.append(40);
  b.append(16);
  const PagePoolStats before = pool.stats();
  EXPECT_THROW(a.append(9), CapacityError);
  EXPECT_EQ(a.refusal_text(), "layer group 0 needs 5 pages, growth is off and it has 4");
  EXPECT_EQ(refusal_of(a, 25), "sequence needs 65 tokens, the pool holds at most 64");
  EXPECT_EQ(refusal_of(a, INT64_MAX),
            "sequence needs 40 + 9223372036854775807 tokens, the pool holds at most 64");
  EXPECT_TRUE(testing::operator==(pool.stats(), before));
  EXPECT_TRUE(a.try_append(8));
  pool.verify();
}

TEST(BlockTable, ABudgetThatIsUsedUpIsAMemoryError) {
  PagePoolOptions o = options(4);
  o.max_bytes = 8 * 16 * 2 * 2 * 32 * 2;
  PagePool pool(o);
  BlockTable table(pool);
  table.append(8 * 16);
  EXPECT_THROW(table.append(1), MemoryError);
  EXPECT_EQ(table.length(), 128);
  EXPECT_EQ(table.refusal_text(), pool.refusal_text());
}

TEST(BlockTable, AllGroupsGrowOrNone) {
  PagePoolOptions o = options(4);
  o.groups = {group(1, layer(1, 32)), group(1, layer(4, 64), 64)};
  o.max_bytes = 4 * 16 * (2 * 32 * 2 + 2 * 4 * 64 * 2);
  PagePool pool(o);
  BlockTable table(pool);
  table.append(64);
  const PagePoolStats before = pool.stats();
  EXPECT_FALSE(table.try_append(1));
  EXPECT_TRUE(testing::operator==(pool.stats(), before));
  EXPECT_EQ(table.pages(0).size(), 4u);
  EXPECT_EQ(table.pages(1).size(), 4u);
  EXPECT_EQ(table.length(), 64);
  pool.verify();
}

TEST(BlockTable, TrimGivesBackThePagesNoLongerNeeded) {
  PagePool pool(options(8));
  BlockTable table(pool);
  table.append(100);
  table.trim_to(33);
  EXPECT_EQ(table.pages(0).size(), 3u);
  table.trim_to(32);
  EXPECT_EQ(table.pages(0).size(), 2u);
  EXPECT_THROW(table.trim_to(33), std::invalid_argument);
  EXPECT_THROW(table.trim_to(-1), std::invalid_argument);
  table.trim_to(0);
  EXPECT_EQ(pool.stats().pages_held, 0);
  pool.verify();
}

TEST(BlockTable, SlotsFollowThePages) {
  PagePoolOptions o = options(8, 3);
  o.dynamic = false;
  o.shuffle_seed = 3;
  PagePool pool(o);
  BlockTable table(pool);
  table.append(8);
  std::vector<int64_t> slots(5);
  table.slot_mapping(0, 2, slots);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(slots[i], table.pages(0)[(2 + i) / 3] * 3 + (2 + i) % 3);
  EXPECT_THROW(table.slot_mapping(0, 4, slots), std::invalid_argument);
  EXPECT_THROW(table.slot_mapping(0, -1, slots), std::invalid_argument);
  EXPECT_NO_THROW(table.slot_mapping(0, 8, std::span(slots).first(0)));
}

TEST(BlockTable, ASharedPrefixIsTheSamePages) {
  PagePool pool(options(8));
  BlockTable table(pool, 500);
  table.append(40);
  BlockTable other = table.share_prefix(2);
  EXPECT_EQ(other.length(), 32);
  EXPECT_EQ(other.context_window(), 500);
  EXPECT_EQ(other.pages(0)[1], table.pages(0)[1]);
  EXPECT_EQ(pool.references(0, table.pages(0)[0]), 2);
  EXPECT_EQ(pool.references(0, table.pages(0)[2]), 1);
  EXPECT_EQ(pool.stats().pages_held, 3);
  EXPECT_THROW((void)table.share_prefix(3), std::invalid_argument);
  EXPECT_THROW((void)table.share_prefix(-1), std::invalid_argument);
  other.append(1);
  EXPECT_NE(other.pages(0)[2], table.pages(0)[2]);
  table.trim_to(0);
  EXPECT_EQ(pool.references(0, other.pages(0)[0]), 1);
  pool.verify();
}

TEST(BlockTable, ASharedPageIsCopiedBeforeItIsWritten) {
  PagePool pool(options(8));
  BlockTable table(pool, 48);
  table.append(32);
  BlockTable other = table.share_prefix(2);
  other.trim_to(20);
  const PageId shared = table.pages(0)[1];
  ASSERT_EQ(other.pages(0)[1], shared);
  const LayerPages l = pool.layer_pages(1);
  const int64_t page_bytes = 16 * 32 * 2;
  std::memset(l.values.data + shared * page_bytes, 9, page_bytes);
  other.append(1);
  const PageId own = other.pages(0)[1];
  EXPECT_NE(own, shared);
  EXPECT_EQ(table.pages(0)[1], shared);
  EXPECT_EQ(std::memcmp(l.values.data + own * page_bytes, l.values.data + shared * page_bytes,
                        page_bytes),
            0);
  EXPECT_EQ(pool.references(0, shared), 1);
  EXPECT_EQ(other.length(), 21);
  EXPECT_EQ(other.pages(0).size(), 2u);
  other.append(48 - 21);  // the window is still reached exactly
  EXPECT_EQ(other.pages(0).size(), 3u);
  pool.verify();
}

TEST(BlockTable, ACopyThatFindsNoPageChangesNothing) {
  PagePoolOptions o = options(2);
  o.dynamic = false;
  PagePool pool(o);
  BlockTable table(pool);
  table.append(32);
  BlockTable other = table.share_prefix(2);
  other.trim_to(20);
  EXPECT_FALSE(other.try_append(1));
  EXPECT_EQ(other.length(), 20);
  EXPECT_EQ(other.pages(0)[1], table.pages(0)[1]);
  EXPECT_EQ(pool.references(0, table.pages(0)[1]), 2);
  pool.verify();
}

// FC-10 through tables. The model holds each sequence's tokens; the pages hold them as bytes, so
// that two sequences that wrote to one page would show it.
class RandomTables : public ::testing::TestWithParam<int> {};

struct Sequence {
  BlockTable table;
  std::vector<uint8_t> tokens;
};

TEST_P(RandomTables, HoldTheirTokensWhateverHappens) {
  const int page_size = GetParam();
  PagePoolOptions o = options(64, page_size, group(1, {1, 1, 1, PageFormat::kQ8, PageFormat::kQ8}));
  o.groups.push_back(o.groups[0]);  // the second group's pages go with the first's
  o.dynamic = false;
  o.max_pages = 0;
  o.shuffle_seed = 7;
  PagePool pool(o);
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto bytes = [&](int g) {
    return reinterpret_cast<uint8_t*>(pool.layer_pages(g).keys.data);
  };
  std::vector<Sequence> sequences;

  const auto append = [&](Sequence& s) {
    const int count = below(3 * page_size + 1);
    if (!s.table.try_append(count)) return;
    const auto first = static_cast<int64_t>(s.tokens.size());
    for (int i = 0; i < count; ++i) s.tokens.push_back(static_cast<uint8_t>(random()));
    std::vector<int64_t> slots(static_cast<size_t>(count));
    for (int g = 0; g < 2; ++g) {
      s.table.slot_mapping(g, first, slots);
      for (int i = 0; i < count; ++i) bytes(g)[slots[i]] = s.tokens[first + i];
    }
  };

  for (int round = testing::scaled(100000) / 4; round > 0; --round) {
    const int what = sequences.empty() ? 0 : below(8);
    const int i = sequences.empty() ? 0 : below(static_cast<int>(sequences.size()));
    if (what == 0) {
      sequences.push_back({BlockTable(pool), {}});
    } else if (what < 4) {
      append(sequences[i]);
    } else if (what == 4) {
      const int64_t shared = below(static_cast<int>(sequences[i].table.length()) / page_size + 1);
      BlockTable fork = sequences[i].table.share_prefix(shared);
      std::vector<uint8_t> tokens(sequences[i].tokens.begin(),
                                  sequences[i].tokens.begin() + fork.length());
      sequences.push_back({std::move(fork), std::move(tokens)});
    } else if (what == 5) {
      const int length = below(static_cast<int>(sequences[i].table.length()) + 1);
      sequences[i].table.trim_to(length);
      sequences[i].tokens.resize(static_cast<size_t>(length));
    } else if (what == 6 && sequences.size() > 6) {
      std::swap(sequences[i], sequences.back());
      sequences.pop_back();
    }

    std::vector<std::vector<int32_t>> expected(2, std::vector<int32_t>(64, 0));
    for (const Sequence& s : sequences) {
      ASSERT_EQ(s.table.length(), static_cast<int64_t>(s.tokens.size()));
      for (int g = 0; g < 2; ++g) {
        ASSERT_EQ(static_cast<int64_t>(s.table.pages(g).size()),
                  (s.table.length() + page_size - 1) / page_size);
        for (PageId page : s.table.pages(g)) ++expected[g][page];
      }
    }
    ASSERT_NO_THROW(pool.verify(&expected));
    if (sequences.empty()) continue;
    const Sequence& seen = sequences[below(static_cast<int>(sequences.size()))];
    for (int g = 0; g < 2; ++g) {
      std::vector<int64_t> slots(seen.tokens.size());
      seen.table.slot_mapping(g, 0, slots);
      for (size_t t = 0; t < slots.size(); ++t)
        ASSERT_EQ(bytes(g)[slots[t]], seen.tokens[t]) << "token " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, RandomTables, ::testing::Values(1, 3, 16, 32));

}  // namespace
}  // namespace pagedkv
