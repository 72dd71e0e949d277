// What a prefix index costs on one core, as JSON on stdout; pages of 16 tokens, sequences of 64 pages:
//   insert_tokens_per_s  full pages made known, with the pool's part of it
//   match_tokens_per_s   the same prompts looked up, in random order
//   acquire_ns_per_page  the same, held and given back
//   evict_ns             one page that makes room, of all that are known and of 1 % of them (O(1): alike)
//   bytes_per_page       that the index takes beside the pages' content
// Medians over rounds. Usage: prefix_bench [pages = 1,000,000] [rounds = 5]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "pagedkv/core/prefix_index.h"

namespace {

using namespace pagedkv;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPageSize = 16, kPagesOfOne = 64, kTokensOfOne = kPageSize * kPagesOfOne;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Costs {
  std::vector<double> insert, match, acquire, evict, bytes;
};

// Pages of 128 bytes, since bookkeeping alone is timed.
void round(int64_t num_pages, Costs& costs) {
  PagePoolOptions options;
  options.groups = {{0, {{1, 1, 1, PageFormat::kF32, PageFormat::kF32}}}};
  options.num_pages = static_cast<int32_t>(num_pages);
  options.dynamic = false;
  PagePool pool(options);
  PrefixIndex index(pool);
  const int64_t num_prompts = num_pages / kPagesOfOne;
  std::vector<int32_t> tokens(static_cast<size_t>(num_prompts * kTokensOfOne));
  std::mt19937 random(1);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 128000);
  const auto prompt = [&](int64_t i) {
    return std::span(tokens).subspan(static_cast<size_t>(i * kTokensOfOne), kTokensOfOne);
  };
  const double all = static_cast<double>(num_prompts * kTokensOfOne);

  std::vector<BlockTable> tables;
  for (int64_t i = 0; i < num_prompts; ++i) tables.emplace_back(pool).append(kTokensOfOne);
  auto start = Clock::now();
  for (int64_t i = 0; i < num_prompts; ++i) index.insert(tables[i], {}, prompt(i), false);
  costs.insert.push_back(all / seconds_since(start));
  tables.clear();
  const PrefixIndexStats stats = index.stats();
  costs.bytes.push_back(static_cast<double>(stats.index_bytes) / static_cast<double>(stats.pages));

  std::vector<int64_t> order(static_cast<size_t>(num_prompts));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  start = Clock::now();
  for (const int64_t i : order)
    if (index.match({}, prompt(i)) != kTokensOfOne)
      throw std::runtime_error("a prompt is not found");
  costs.match.push_back(all / seconds_since(start));
  start = Clock::now();
  for (const int64_t i : order)
    if (index.acquire({}, prompt(i)).length() != kTokensOfOne) throw std::runtime_error("lost");
  costs.acquire.push_back(1e9 * seconds_since(start) / static_cast<double>(stats.pages));

  start = Clock::now();
  const int64_t evicted = index.evict(0, stats.pages / 2);
  costs.evict.push_back(1e9 * seconds_since(start) / static_cast<double>(evicted));
}

}  // namespace

int main(int argc, char** argv) try {
  const int64_t pages = argc > 1 ? std::atoll(argv[1]) : 1'000'000;
  const int rounds = argc > 2 ? std::max(1, std::atoi(argv[2])) : 5;
  Costs many, few;
  for (int i = 0; i < rounds; ++i) {
    round(pages, many);
    round(std::max<int64_t>(kPagesOfOne, pages / 100), few);
  }
  std::printf(
      "{\"pages\": %lld, \"rounds\": %d,\n \"insert_tokens_per_s\": %.4g, \"match_tokens_per_s\": "
      "%.4g,\n "
      "\"acquire_ns_per_page\": %.1f, \"evict_ns\": {\"of_all\": %.1f, \"of_1_percent\": %.1f},\n "
      "\"bytes_per_page\": %.1f}\n",
      static_cast<long long>(pages), rounds, median(many.insert), median(many.match),
      median(many.acquire), median(many.evict), median(few.evict), median(many.bytes));
} catch (const std::exception& e) {
  std::fprintf(stderr, "prefix_bench: %s\n", e.what());
  return 1;
}
