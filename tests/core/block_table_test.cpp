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

// A pool of one group with full attention and one with a window.
PagePoolOptions window_options(int32_t num_pages, int page_size, int window) {
  PagePoolOptions o = options(num_pages, page_size, group(1, layer(1, 32)));
  o.groups.push_back(group(1, layer(1, 32), window));
  return o;
}

TEST(BlockTable, AWindowGivesBackExactlyThePagesThatItHasPassed) {
  for (const int page_size : {1, 3, 16, 32})
    for (const int window : {1, 15, 16, 17, 32, 33}) {
      PagePool pool(window_options(64, page_size, window));
      BlockTable table(pool);
      std::mt19937 random(7);
      while (table.length() < 300) {
        table.append(random() % 4 == 0 ? random() % 40 : 1);
        const int64_t passed_before = table.num_passed(1), passed = table.release_passed();
        EXPECT_EQ(table.num_passed(1), passed_before + passed);
        EXPECT_EQ(table.release_passed(), 0);
        const auto pages = table.pages(1);
        for (int64_t i = 0; i < static_cast<int64_t>(pages.size()); ++i) {
          const int64_t last_token = (i + 1) * page_size - 1;
          ASSERT_EQ(pages[i] == kNoPage, last_token < table.length() + 1 - window)
              << "page " << i << " of " << table.length() << " tokens, window " << window;
        }
        const auto all = static_cast<int64_t>(pages.size());
        ASSERT_LE(all - table.num_passed(1), most_pages_held(table.length(), 1, page_size, window));
        ASSERT_EQ(pool.stats().pages_held, 2 * all - table.num_passed(1));
        ASSERT_EQ(std::ranges::count(table.pages(0), kNoPage), 0);
      }
      const BlockTable moved = std::move(table);
      EXPECT_GT(moved.num_passed(1), 0);
      pool.verify();
    }
}

TEST(BlockTable, TheMostPagesHeldAreNeededAndEnough) {
  for (const int page_size : {1, 3, 16})
    for (const int window : {0, 1, 2, 16, 17, 33})
      for (const int step : {1, 5, 16, 40}) {
        PagePool pool(options(256, page_size, group(1, layer(1, 32), window)));
        int64_t most = 0;
        for (int lead = 0; lead < page_size; ++lead) {  // wherever pages begin
          BlockTable table(pool);
          for (table.append(lead); table.length() + step <= 200; table.release_passed()) {
            table.append(step);
            most = std::max(most, pool.stats().pages_held);
          }
          table.append(200 - table.length());
          most = std::max(most, pool.stats().pages_held);
        }
        EXPECT_EQ(most, most_pages_held(200, step, page_size, window))
            << page_size << ' ' << window << ' ' << step;
      }
  EXPECT_EQ(most_pages_held(20, 512, 16, 512), 2);
  EXPECT_EQ(most_pages_held(0, 512, 16, 512), 0);
}

TEST(BlockTable, IsTrimmedAsFarAsTheWindowIsThere) {
  for (const int page_size : {1, 4, 16})
    for (const int window : {1, 3, 16, 18})
      for (const int64_t length : {31, 32, 33, 50}) {
        PagePool pool(window_options(64, page_size, window));
        BlockTable table(pool);
        table.append(length);
        table.release_passed();
        for (int64_t to = -1; to <= length + 1; ++to) {
          bool possible = to >= 0 && to <= length;
          for (int64_t t = std::max<int64_t>(0, to + 1 - window); t < to && possible; ++t)
            possible = table.pages(1)[t / page_size] != kNoPage;
          if (possible && to % page_size != 0) possible = table.pages(1)[to / page_size] != kNoPage;
          ASSERT_EQ(table.can_trim_to(to), possible)
              << length << " to " << to << " window " << window << " pages of " << page_size;
          BlockTable fork = table.fork();
          if (possible) {
            fork.trim_to(to);
            EXPECT_EQ(fork.length(), to);
            fork.append(60);  // as far as it likes
            EXPECT_EQ(std::ranges::count(fork.pages(1).subspan(fork.num_passed(1)), kNoPage), 0);
          } else {
            EXPECT_THROW(fork.trim_to(to), std::invalid_argument);
            EXPECT_EQ(fork.length(), length);
            EXPECT_EQ(fork.num_passed(1), table.num_passed(1));
          }
          if (to >= 0 && to <= length && to % page_size == 0) {
            if (possible) {
              EXPECT_EQ(table.share_prefix(to / page_size).length(), to);
            } else {
              EXPECT_THROW((void)table.share_prefix(to / page_size), std::invalid_argument);
            }
          }
        }
        table.trim_to(0);
        EXPECT_EQ(pool.stats().pages_held, 0);
        pool.verify();
      }
}

TEST(BlockTable, WhatAWindowHasPassedIsNamed) {
  PagePool pool(window_options(64, 16, 32));
  BlockTable table(pool);
  table.append(100);
  EXPECT_EQ(table.release_passed(), 4);  // the next token sees 69..100
  try {
    table.trim_to(90);
    FAIL() << "no error";
  } catch (const std::invalid_argument& e) {
    EXPECT_STREQ(e.what(),
                 "length 90: the window of layer group 1 begins at token 59, and tokens before 64 "
                 "were given back");
  }
  std::vector<int64_t> slots(37);
  EXPECT_THROW(table.slot_mapping(1, 63, slots), std::invalid_argument);
  EXPECT_NO_THROW(table.slot_mapping(1, 64, std::span(slots).first(36)));
  EXPECT_NO_THROW(table.slot_mapping(0, 63, slots));
}

TEST(BlockTable, AForkOfAWindowSharesWhatIsThere) {
  PagePool pool(window_options(64, 16, 32));
  BlockTable table(pool);
  table.append(100);
  table.release_passed();
  BlockTable fork = table.fork();
  EXPECT_TRUE(std::ranges::equal(fork.pages(1), table.pages(1)));
  EXPECT_EQ(pool.references(1, table.pages(1)[4]), 2);
  EXPECT_EQ(fork.release_passed(), 0);
  fork.append(28);  // its own copy of the last page
  EXPECT_EQ(fork.release_passed(), 2);
  EXPECT_EQ(pool.references(1, table.pages(1)[4]), 1);
  EXPECT_EQ(table.num_passed(1), 4);
  pool.verify();
}

TEST(BlockTable, ASequenceMayOutgrowAWindowsPages) {
  PagePoolOptions o = options(4, 16, group(1, layer(1, 32), 32));
  o.dynamic = false;
  o.max_pages = 0;
  PagePool pool(o);
  BlockTable table(pool);
  for (int i = 0; i < 1000; ++i) {
    table.append(1);
    table.release_passed();
  }
  EXPECT_EQ(table.length(), 1000);
  EXPECT_LE(pool.stats().pages_peak, 4);
  EXPECT_EQ(refusal_of(table, 65),
            "sequence needs 1065 tokens, the pool holds at most 1024 (960 of them given back)");
  EXPECT_TRUE(table.try_append(24));
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
  o.groups.push_back(o.groups[0]);
  o.groups[1].sliding_window = 20;
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

  // The window's pages are there from the token on that a query at the end sees.
  const auto seen_from = [&](const Sequence& s, int g) {
    return g == 0 ? 0 : s.table.num_passed(g) * page_size;
  };
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
    const int what = sequences.empty() ? 0 : below(9);
    const int i = sequences.empty() ? 0 : below(static_cast<int>(sequences.size()));
    if (what == 0) {
      sequences.push_back({BlockTable(pool), {}});
    } else if (what < 4) {
      append(sequences[i]);
    } else if (what == 4) {
      const int64_t shared = below(static_cast<int>(sequences[i].table.length()) / page_size + 1);
      if (!sequences[i].table.can_trim_to(shared * page_size)) {
        EXPECT_THROW((void)sequences[i].table.share_prefix(shared), std::invalid_argument);
        continue;
      }
      BlockTable fork = sequences[i].table.share_prefix(shared);
      std::vector<uint8_t> tokens(sequences[i].tokens.begin(),
                                  sequences[i].tokens.begin() + fork.length());
      sequences.push_back({std::move(fork), std::move(tokens)});
    } else if (what == 5) {
      const int length = below(static_cast<int>(sequences[i].table.length()) + 1);
      if (!sequences[i].table.can_trim_to(length)) {
        EXPECT_THROW(sequences[i].table.trim_to(length), std::invalid_argument);
        continue;
      }
      sequences[i].table.trim_to(length);
      sequences[i].tokens.resize(static_cast<size_t>(length));
    } else if (what == 6 && sequences.size() > 6) {
      std::swap(sequences[i], sequences.back());
      sequences.pop_back();
    } else if (what == 7) {
      sequences[i].table.release_passed();
      ASSERT_LE(seen_from(sequences[i], 1), std::max<int64_t>(0, sequences[i].table.length() - 19));
      ASSERT_TRUE(sequences[i].table.can_trim_to(sequences[i].table.length()));
    } else if (what == 8 && sequences.size() < 7) {
      sequences.push_back({sequences[i].table.fork(), sequences[i].tokens});
    }

    std::vector<std::vector<int32_t>> expected(2, std::vector<int32_t>(64, 0));
    for (const Sequence& s : sequences) {
      ASSERT_EQ(s.table.length(), static_cast<int64_t>(s.tokens.size()));
      for (int g = 0; g < 2; ++g) {
        ASSERT_EQ(static_cast<int64_t>(s.table.pages(g).size()),
                  (s.table.length() + page_size - 1) / page_size);
        for (PageId page : s.table.pages(g).subspan(s.table.num_passed(g))) ++expected[g][page];
      }
    }
    ASSERT_NO_THROW(pool.verify(&expected));
    if (sequences.empty()) continue;
    const Sequence& seen = sequences[below(static_cast<int>(sequences.size()))];
    for (int g = 0; g < 2; ++g) {
      const int64_t from = seen_from(seen, g), length = seen.table.length();
      std::vector<int64_t> slots(static_cast<size_t>(std::max<int64_t>(0, length - from)));
      seen.table.slot_mapping(g, std::min(from, length), slots);
      for (size_t t = 0; t < slots.size(); ++t)
        ASSERT_EQ(bytes(g)[slots[t]], seen.tokens[from + t]) << "token " << from + t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, RandomTables, ::testing::Values(1, 3, 16, 32));

}  // namespace
}  // namespace pagedkv
