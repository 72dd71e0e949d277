// Whichever allocation fails: nothing leaks, nothing is left half done, and the call succeeds when it is made again.
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/cache_testing.h"
#include "core/failing_new.h"
#include "core/pool_testing.h"
#include "pagedkv/core/batch_tables.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv::testing {
namespace {

using State = Attempts::State;

template <class Range>
void append(State& state, const Range& values) {
  state.insert(state.end(), values.begin(), values.end());
}

// A pool and its tables, as far as a caller sees them; verifies the pool on the way.
State state_of(const PagePool& pool, std::span<const BlockTable> tables) {
  const PagePoolStats s = pool.stats();
  State state{s.pages_capacity, s.pages_committed, s.pages_held,   s.pages_peak,
              s.allocations,    s.grow_events,     s.commit_events};
  std::vector<std::vector<int32_t>> expected;
  for (int g = 0; g < pool.num_groups(); ++g) {
    auto& references = expected.emplace_back(pool.committed(g));
    for (const BlockTable& table : tables) {
      append(state, table.pages(g));
      for (const PageId page : table.pages(g)) ++references.at(page);
    }
  }
  for (const BlockTable& table : tables) state.push_back(table.length());
  pool.verify(&expected);
  return state;
}

TEST(FailingAllocation, LeavesPoolAndTablesAsTheyWere) {
  for_each_failing_allocation([](Attempts& attempts) {
    std::unique_ptr<PagePool> pool;
    PagePoolOptions two_groups = options(4, 4);
    two_groups.groups.push_back(group(1, layer(2, 8, PageFormat::kQ8), 64));
    attempts.make([&] { pool = std::make_unique<PagePool>(two_groups); });
    std::vector<BlockTable> tables;
    tables.reserve(8);
    attempts.watch([&] { return state_of(*pool, tables); });
    const auto add = [&](auto make) { attempts.make([&] { tables.push_back(make()); }); };

    add([&] { return BlockTable(*pool); });
    attempts.make([&] { tables[0].append(10); });   // the first commit
    attempts.make([&] { tables[0].append(100); });  // beyond the capacity
    add([&] { return tables[0].fork(); });          // shares a last page that is partly filled
    attempts.make([&] { tables[1].append(1); });    // and copies it
    add([&] { return tables[0].share_prefix(20); });
    attempts.make([&] { tables[2].append(30); });
    attempts.make([&] { tables[0].trim_to(50); });
    attempts.make([&] { ASSERT_TRUE(pool->try_grow(0, 200)); });
    attempts.make([&] { tables[0].append(300); });
    const BlockTable* const batch[] = {&tables[0], &tables[1], &tables[2]};
    for (const int g : {0, 1}) {
      attempts.make([&] { EXPECT_EQ(csr_tables(batch, g).indptr.size(), 4u); });
      attempts.make([&] { EXPECT_EQ(dense_tables(batch, g).seq_lens.size(), 3u); });
    }
    attempts.make([&] { tables.pop_back(); });
    attempts.make([&] { pool->shrink_to(0, 1); });
  });
}

TEST(FailingAllocation, LeavesARefusalARefusal) {
  for_each_failing_allocation([](Attempts& attempts) {
    PagePoolOptions small = options(8, 4);
    small.dynamic = false;
    PagePool pool(small);
    std::vector<BlockTable> tables;
    tables.emplace_back(pool).append(20);
    tables.emplace_back(tables[0].fork());
    attempts.watch([&] { return state_of(pool, tables); });
    attempts.make([&] { EXPECT_FALSE(tables[0].try_append(13)); });
    attempts.make([&] {
      const auto text = error_of<CapacityError>([&] { tables[1].append(1000); });
      EXPECT_NE(text.find("needs 255 pages"), std::string::npos) << text;
    });
    attempts.make([&] { EXPECT_FALSE(pool.try_grow(0, 9)); });
  });
}

}  // namespace
}  // namespace pagedkv::testing
