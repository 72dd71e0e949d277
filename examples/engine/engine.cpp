// A small engine on the paged KV cache: two requests share the pages of their common prefix, which a prefix index finds,
// decode in one batch, and one of them branches. The "model" is made up of hashes; what matters is what an engine does around it.
//
// Prints the tokens and the pages, and checks that sharing and batching changed nothing: the second request alone, in
// pages of its own and of another size, gives the same tokens.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <utility>
#include <vector>

#include "pagedkv/base/executor.h"
#include "pagedkv/core/batch_tables.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/core/page_pool.h"
#include "pagedkv/core/prefix_index.h"
#include "pagedkv/kernels/attention.h"

namespace {

using namespace pagedkv;

constexpr int kLayers = 2, kQHeads = 8, kKvHeads = 2, kHeadDim = 64, kVocabulary = 1000;

// Row `what` of a token in a layer: numbers in [-1, 1) that depend on nothing else.
void fill(std::span<float> row, uint64_t token, uint64_t layer, uint64_t what) {
  uint64_t state = (token * 31 + layer) * 31 + what;
  for (float& x : row) {
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    x = static_cast<float>((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f;
  }
}

struct Sequence {
  explicit Sequence(PagePool& pool) : table(pool) {}
  explicit Sequence(BlockTable shared) : table(std::move(shared)) {}
  Sequence fork() const {
    Sequence branch(table.fork());
    branch.tokens = tokens;
    return branch;
  }
  // How many tokens have no keys and values yet.
  int64_t num_new() const { return static_cast<int64_t>(tokens.size()) - table.length(); }

  BlockTable table;
  std::vector<int> tokens;
};

// One step for all sequences at once, prefill and decode mixed: stores the keys and values of their new tokens, attends,
// and appends to each the token that its newest row asks for.
void step(PagePool& pool, std::span<Sequence* const> batch, Executor& threads) {
  std::vector<const BlockTable*> tables;
  std::vector<int32_t> query_start{0};
  std::vector<int> tokens;
  std::vector<int64_t> slots;
  for (Sequence* s : batch) {
    const int64_t first = s->table.length(), count = s->num_new();
    tokens.insert(tokens.end(), s->tokens.begin() + first, s->tokens.end());
    s->table.append(count);  // throws when there is no room; a scheduler asks try_append()
    slots.resize(slots.size() + static_cast<size_t>(count));
    s->table.slot_mapping(0, first, std::span(slots).last(static_cast<size_t>(count)));
    query_start.push_back(query_start.back() + static_cast<int32_t>(count));
    tables.push_back(&s->table);
  }
  const DenseTables dense = dense_tables(tables);
  const size_t num_tokens = tokens.size();
  std::vector<float> queries(num_tokens * kQHeads * kHeadDim), out(queries.size());
  std::vector<float> keys(num_tokens * kKvHeads * kHeadDim), values(keys.size());

  AttentionArgs args;
  args.queries = queries.data();
  args.out = out.data();
  args.num_q_heads = kQHeads;
  args.num_seqs = static_cast<int>(batch.size());
  args.query_start = query_start.data();
  args.seq_lens = dense.seq_lens.data();
  args.block_table = dense.block_table.data();
  args.block_table_stride = dense.stride;
  args.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  AttentionPlan plan;
  for (int layer = 0; layer < kLayers; ++layer) {
    args.pages = pool.layer_pages(layer);
    for (size_t t = 0; t < num_tokens; ++t) {
      const auto token = static_cast<uint64_t>(tokens[t]), l = static_cast<uint64_t>(layer);
      fill(std::span(queries).subspan(t * kQHeads * kHeadDim, kQHeads * kHeadDim), token, l, 0);
      fill(std::span(keys).subspan(t * kKvHeads * kHeadDim, kKvHeads * kHeadDim), token, l, 1);
      fill(std::span(values).subspan(t * kKvHeads * kHeadDim, kKvHeads * kHeadDim), token, l, 2);
    }
    StoreArgs store_args;
    store_args.keys = keys.data();
    store_args.values = values.data();
    store_args.pages = args.pages;
    store_args.slot_mapping = slots.data();
    store_args.num_tokens = static_cast<int>(num_tokens);
    if (!store(store_args, threads)) throw std::runtime_error("a row cannot be quantised");
    if (layer == 0) plan.prepare(args, threads.num_workers());  // serves every layer of the step
    attend(args, plan, threads);
  }
  for (size_t s = 0; s < batch.size(); ++s) {
    double sum = 0;
    for (int i = 0; i < kQHeads * kHeadDim; ++i)
      sum += (i % 7 + 1) * double{out[(query_start[s + 1] - 1) * kQHeads * kHeadDim + i]};
    batch[s]->tokens.push_back(static_cast<int>(std::fabs(sum) * 1e4) % kVocabulary);
  }
}

PagePoolOptions pool_options(int page_size) {
  const LayerSpec layer{kKvHeads, kHeadDim, kHeadDim, PageFormat::kQ8, PageFormat::kQ8};
  PagePoolOptions options;
  options.groups = {{0, std::vector<LayerSpec>(kLayers, layer)}};
  options.page_size = page_size;
  options.num_pages = 64;
  return options;
}

void print(const char* name, const Sequence& s, size_t first) {
  std::printf("%-18s", name);
  for (size_t i = first; i < s.tokens.size(); ++i) std::printf(" %3d", s.tokens[i]);
  std::puts("");
}

}  // namespace

int main() {
  ThreadPool threads(2);
  std::vector<int> prefix;
  for (int i = 0; i < 100; ++i) prefix.push_back(i * 37 % kVocabulary);
  const auto prompt = [&](int last) {
    std::vector<int> tokens = prefix;
    tokens.push_back(last);
    return tokens;
  };

  PagePool pool(pool_options(16));
  PrefixIndex index(pool);
  const PrefixScope scope{.model = "hashes", .kv_format = "q8"};
  Sequence a(pool);
  a.tokens = prompt(11);
  Sequence* alone[] = {&a};
  step(pool, alone, threads);
  index.insert(a.table, scope, a.tokens, false);
  Sequence b(index.acquire(scope, prompt(22)));
  b.tokens = prompt(22);  // only what lies behind the shared pages is computed
  std::printf("the second request computes %lld of %zu tokens\n",
              static_cast<long long>(b.num_new()), b.tokens.size());

  Sequence* both[] = {&a, &b};
  for (int i = 0; i < 4; ++i) step(pool, both, threads);
  Sequence branch = a.fork();
  branch.tokens.back() = (a.tokens.back() + 1) % kVocabulary;  // another choice than a's
  Sequence* all[] = {&a, &b, &branch};
  for (int i = 0; i < 4; ++i) step(pool, all, threads);

  print("first request:", a, prefix.size());
  print("its branch:", branch, prefix.size());
  print("second request:", b, prefix.size());
  size_t apart = 0;
  for (const Sequence* s : all) apart += s->table.pages(0).size();
  std::printf("pages held: %lld, without sharing: %zu\n",
              static_cast<long long>(pool.stats().pages_held), apart);

  PagePool other(pool_options(7));
  Sequence cold(other);
  cold.tokens = prompt(22);
  Sequence* only[] = {&cold};
  while (cold.tokens.size() < b.tokens.size()) step(other, only, threads);
  const bool same = cold.tokens == b.tokens;
  std::printf("the second request alone, from the start: %s\n",
              same ? "the same tokens" : "OTHER TOKENS");
  return same ? 0 : 1;
}
