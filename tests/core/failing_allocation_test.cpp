// Whichever allocation fails: nothing leaks, nothing is left half done, and the call succeeds when it is made again.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/cache_testing.h"
#include "core/failing_new.h"
#include "core/pool_testing.h"
#include "core/sharing_testing.h"
#include "pagedkv/base/executor.h"
#include "pagedkv/core/batch_tables.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/core/paged_kv_cache.h"
#include "pagedkv/kernels/attention.h"

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

int64_t hash(const Tensor& tensor) {  // FNV-1a
  uint64_t h = 14695981039346656037u;
  for (const auto byte : tensor.bytes) h = (h ^ static_cast<uint64_t>(byte)) * 1099511628211u;
  return static_cast<int64_t>(h);
}

State state_of(const PagedKVCache& cache) {
  const PagedKVCacheStats s = cache.stats();
  State state{s.capacity, s.updates, s.pages_in_use,
              static_cast<int64_t>(s.attention_calls.size())};
  for (const auto& calls : s.attention_calls) append(state, calls.by_phase);
  append(state, cache.block_table());
  for (int layer = 0; layer < cache.num_layers(); ++layer) {
    state.push_back(cache.offset(layer));
    const auto [keys, values] = cache.state(layer);
    state.push_back(hash(keys));
    state.push_back(hash(values));
  }
  return state;
}

PagedKVCacheOptions small_cache(const char* quant) {
  PagedKVCacheOptions o;
  o.block_size = 4;
  o.num_blocks = 2;
  o.num_layers = 2;
  o.max_bytes = 1 << 20;
  o.quant = PagedKVQuantConfig(quant);
  return o;
}

TEST(FailingAllocation, LeavesACacheAsItWas) {
  const Tensor first = rows(1, 2, 6, 32, DType::kF16), more = rows(2, 2, 40, 32, DType::kF16),
               one = rows(3, 2, 1, 32, DType::kF16), queries = rows(4, 4, 3, 32);
  for_each_failing_allocation([&](Attempts& attempts) {
    std::vector<PagedKVCache> caches;
    caches.reserve(4);
    attempts.watch([&] {
      State state;
      for (const PagedKVCache& cache : caches) append(state, state_of(cache));
      return state;
    });
    const auto add = [&](auto make) { attempts.make([&] { caches.push_back(make()); }); };
    const auto attend = [&] {
      Tensor out;
      attempts.make([&] { out = caches[0].attend(queries); });
      return hash(out);
    };

    add([&] { return PagedKVCache(small_cache("q8")); });
    for (const int layer : {0, 1}) attempts.make([&] { caches[0].update(first, first, layer); });
    const int64_t short_out = attend();
    for (const int layer : {1, 0}) attempts.make([&] { caches[0].update(more, more, layer); });
    EXPECT_NE(attend(), short_out);
    attempts.make([&] { caches[0].update_and_fetch(one, one); });
    attempts.make([&] { caches[0].trim(30); });
    EXPECT_NE(attend(), 0);
    attempts.make([&] { caches[0].grow_to_capacity(100); });
    add([&] { return PagedKVCache::from_cache(caches[0], small_cache("q8")); });
    add([&] { return PagedKVCache::from_cache(caches[0], small_cache("none")); });
    const PagedKVCache::Pair both[] = {{more, more}, {more, more}};
    attempts.make([&] { caches[1].set_state(both); });
    attempts.make([&] { caches[1].shrink_to_capacity(0); });
    attempts.make([&] { caches[1].reset(); });
    attempts.make([&] { caches[1].update(one, one); });
  });
}

TEST(FailingAllocation, LeavesAPlanWithoutWork) {
  PagePool pool(options(64));
  std::vector<BlockTable> tables;
  tables.emplace_back(pool).append(600);
  while (tables.size() < 4) tables.push_back(tables[0].fork());
  const BlockTable* const batch[] = {&tables[0], &tables[1], &tables[2], &tables[3]};
  const DenseTables dense = dense_tables(batch);
  const int32_t query_start[] = {0, 1, 2, 3, 4};
  AttentionArgs args;
  args.pages = pool.layer_pages(0);
  args.num_q_heads = 1;
  args.num_seqs = 4;
  args.query_start = query_start;
  args.seq_lens = dense.seq_lens.data();
  args.block_table = dense.block_table.data();
  args.block_table_stride = dense.stride;
  for_each_failing_allocation([&](Attempts& attempts) {
    AttentionPlan plan;
    attempts.watch([&] { return State{plan.num_items()}; });
    attempts.make([&] { plan.prepare(args, 2); });
  });
}

// What became known before memory ran out stays known; nothing else of a call that fails is left.
TEST(FailingAllocation, LeavesThePrefixIndexInOrder) {
  for_each_failing_allocation([](Attempts& attempts) {
    PageEventQueue events(64);
    PagePoolOptions o = options(12, 4, tiny_group());
    o.groups.push_back(tiny_group(6));
    o.dynamic = false;
    o.max_pages = 0;
    PagePool pool(o);
    PrefixIndex index(
        pool, {.ttl_ns = 1000, .min_hit_tokens = 1, .events = &events, .now = [] { return 5; }});
    std::vector<SharedSequence> all;
    all.reserve(4);
    attempts.watch([&] {
      State state;
      std::vector<std::vector<int32_t>> expected(2, std::vector<int32_t>(12));
      for (const SharedSequence& s : all) {
        state.push_back(s.table.length());
        state.push_back(s.first_wrong(pool));
        for (int g = 0; g < 2; ++g)
          for (const PageId page : s.table.pages(g))
            if (page != kNoPage) ++expected[g][page];
      }
      pool.verify(&expected);
      index.verify();
      state.push_back(static_cast<int64_t>(index.pins().size()));
      return state;
    });
    const auto serve = [&](std::vector<int32_t> tokens, const char* salt) {
      all.push_back({BlockTable(pool), {.salt = salt}, std::move(tokens)});
      SharedSequence& s = all.back();
      attempts.make([&] { s.table = index.acquire(s.scope, s.tokens, 0, &s.position); });
      attempts.make([&] {
        if (s.table.length() < static_cast<int64_t>(s.tokens.size())) s.compute_all(pool);
      });
      attempts.make([&] { index.insert(s.table, s.scope, s.tokens, true, &s.position); });
      s.table.release_passed();
    };
    serve(tokens_from(0, 18), "");
    serve(joined(tokens_from(0, 14), tokens_from(50, 5)), "");
    attempts.make([&] { (void)index.pin({}, tokens_from(0, 18)); });
    attempts.make([&] { (void)index.explain({}, tokens_from(0, 30)); });
    all.erase(all.begin());
    serve(tokens_from(70, 17), "a long salt that needs memory of its own");
    index.clear_salt("");
  });
}

TEST(FailingAllocation, LeavesNoThreadBehind) {
  for_each_failing_allocation([](Attempts& attempts) {
    std::unique_ptr<ThreadPool> threads;
    attempts.make([&] { threads = std::make_unique<ThreadPool>(4); });
    std::atomic<int> ran{0};
    threads->run(10, [&](int64_t, int) { ++ran; });
    EXPECT_EQ(ran, 10);
  });
}

}  // namespace
}  // namespace pagedkv::testing
