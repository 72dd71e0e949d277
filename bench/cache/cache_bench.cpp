// What PagedKVCache costs beyond its kernels, as JSON on stdout:
//   growth    from 8k to 16k tokens in one call, for small and large caches: moving boundaries, touching
//             the new pages, and the first write of as many bytes into a new cache (pairs, medians)
//   decode    update + attend of one token against the same kernel calls made directly: what
//             conversions, checks and counters add
//   counters  what one call pays for being counted: two clock readings and a look-up
// Usage: cache_bench [pairs = 9 [decode]]; "decode": the longest of the decode cases alone
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <string_view>
#include <vector>

#include "apps/measure.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/core/paged_kv_cache.h"
#include "pagedkv/kernels/attention.h"
#include "pagedkv/kernels/kernel_set.h"

namespace {

using namespace pagedkv;
using apps::median;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Shape {
  const char* name;
  int num_layers, num_q_heads, num_kv_heads, head_dim;
  const char* quant;
};

PagedKVCacheOptions options(const Shape& shape, int64_t tokens) {
  PagedKVCacheOptions o;
  o.num_blocks = static_cast<int32_t>(tokens / 16);
  o.num_layers = shape.num_layers;
  o.dtype = DType::kF16;
  o.quant = PagedKVQuantConfig(shape.quant);
  return o;
}

std::vector<float> rows(int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  apps::fill(x, 1);
  return x;
}

// The shapes are set by a write of one token; the memory by growing.
void begin(PagedKVCache& cache, const Shape& shape) {
  const auto x = rows(int64_t{shape.num_kv_heads} * shape.head_dim);
  const auto view =
      TensorView::tokens_first(x.data(), DType::kF32, 1, shape.num_kv_heads, shape.head_dim);
  for (int layer = 0; layer < shape.num_layers; ++layer) cache.update(view, view, layer);
}

void growth(const Shape& shape, int pairs) {
  constexpr int64_t kTokens = 8192;
  std::vector<double> commit, touch, first;
  int64_t held = 0, added = 0;
  for (int i = 0; i < pairs; ++i) {
    PagedKVCache cache(options(shape, kTokens));
    const auto start = cache.stats();
    begin(cache, shape);
    cache.grow_to_capacity(kTokens);
    const auto full = cache.stats();
    first.push_back(full.touch_seconds - start.touch_seconds);
    cache.grow_to_capacity(2 * kTokens);
    const auto grown = cache.stats();
    commit.push_back(grown.commit_seconds - full.commit_seconds);
    touch.push_back(grown.touch_seconds - full.touch_seconds);
    held = full.bytes_committed;
    added = grown.bytes_committed - full.bytes_committed;
  }
  std::printf(
      "{\"case\": \"%s\", \"bytes_held\": %lld, \"bytes_added\": %lld, \"pairs\": %d,\n   "
      "\"commit_ms\": %.3f, \"commit_ms_max\": %.3f, \"touch_ms\": %.2f, \"first_write_ms\": %.2f, "
      "\"touch_per_byte_ratio\": %.3f}",
      shape.name, static_cast<long long>(held), static_cast<long long>(added), pairs,
      1e3 * median(commit), 1e3 * *std::max_element(commit.begin(), commit.end()),
      1e3 * median(touch), 1e3 * median(first),
      median(touch) / static_cast<double>(added) / (median(first) / static_cast<double>(held)));
}

// One layer, one token a step at a depth: microseconds a step.
struct DecodeTimes {
  double cache_us, kernels_us;
};

DecodeTimes decode(const Shape& shape, int64_t depth, int pairs) {
  constexpr int kSteps = 64;
  Shape one = shape;
  one.num_layers = 1;
  PagedKVCache cache(options(one, depth + kSteps + 64));
  const auto x = rows((depth + 1) * shape.num_kv_heads * shape.head_dim);
  const auto q = rows(int64_t{shape.num_q_heads} * shape.head_dim);
  const auto prompt =
      TensorView::tokens_first(x.data(), DType::kF32, depth, shape.num_kv_heads, shape.head_dim);
  const auto token =
      TensorView::tokens_first(x.data(), DType::kF32, 1, shape.num_kv_heads, shape.head_dim);
  const auto query =
      TensorView::tokens_first(q.data(), DType::kF32, 1, shape.num_q_heads, shape.head_dim);
  cache.update(prompt, prompt);
  std::vector<float> out(q.size());
  MutableTensorView result{out.data(),
                           DType::kF32,
                           shape.num_q_heads,
                           1,
                           shape.head_dim,
                           shape.head_dim,
                           int64_t{shape.num_q_heads} * shape.head_dim};
  ThreadPool executor(1);
  AttentionPlan plan;
  std::vector<double> with, without;
  for (int i = 0; i < pairs; ++i) {
    auto start = Clock::now();
    for (int s = 0; s < kSteps; ++s) {
      cache.update(token, token);
      cache.attend(query, result);
    }
    with.push_back(seconds_since(start) / kSteps);
    start = Clock::now();
    for (int s = 0; s < kSteps; ++s) {  // the same calls at the same length, over the same pages
      const auto seq_len = static_cast<int32_t>(cache.offset() - kSteps + s + 1);
      const int32_t query_start[] = {0, 1};
      const int64_t slot =
          int64_t{cache.block_table()[(seq_len - 1) / 16]} * 16 + (seq_len - 1) % 16;
      StoreArgs store_args;
      store_args.keys = store_args.values = x.data();
      store_args.pages = cache.layer_pages();
      store_args.slot_mapping = &slot;
      store_args.num_tokens = 1;
      if (!store(store_args, executor)) std::abort();
      AttentionArgs args;
      args.queries = q.data();
      args.out = out.data();
      args.pages = cache.layer_pages();
      args.num_q_heads = shape.num_q_heads;
      args.num_seqs = 1;
      args.query_start = query_start;
      args.seq_lens = &seq_len;
      args.block_table = cache.block_table().data();
      args.block_table_stride = static_cast<int64_t>(cache.block_table().size());
      args.scale = 0.125f;
      plan.prepare(args, 1);
      attend(args, plan, executor);
    }
    without.push_back(seconds_since(start) / kSteps);
    cache.trim(kSteps);
  }
  return {1e6 * median(with), 1e6 * median(without)};
}

// Two clock readings and an addition, as each call of the cache makes.
double counting_ns() {
  constexpr int kCalls = 1000000;
  volatile double seconds = 0;
  const auto start = Clock::now();
  for (int i = 0; i < kCalls; ++i) {
    const auto call = Clock::now();
    seconds = seconds + seconds_since(call);
  }
  return 1e9 * seconds_since(start) / kCalls;
}

}  // namespace

int main(int argc, char** argv) try {
  const int pairs = argc > 1 ? std::max(1, std::atoi(argv[1])) : 9;
  const Shape small{"30 layers 9/3 x 64 f16", 30, 9, 3, 64, "off"},
      small_q4{"30 layers 9/3 x 64 q4", 30, 9, 3, 64, "q4"},
      large{"32 layers 32/8 x 128 f16", 32, 32, 8, 128, "off"};
  if (argc > 2 && std::string_view(argv[2]) == "decode") {
    const DecodeTimes t = decode(small, 8192, pairs);
    std::printf(
        "{\"kernel_set\": \"%s\", \"threads\": 1, \"cache_us\": %.2f, \"kernels_us\": %.2f}\n",
        kernels().name, t.cache_us, t.kernels_us);
    return 0;
  }
  std::printf("{\"kernel_set\": \"%s\", \"threads\": 1,\n \"growth\": [\n  ", kernels().name);
  const Shape* const shapes[] = {&small_q4, &small, &large};
  for (const Shape* shape : shapes) {
    growth(*shape, shape == &large ? std::min(pairs, 5) : pairs);
    std::printf(shape == &large ? "],\n \"decode\": [\n  " : ",\n  ");
  }
  const double counting = counting_ns();
  const int64_t depths[] = {16, 1024, 8192};
  for (int64_t depth : depths) {
    const DecodeTimes t = decode(small, depth, pairs * 3);
    std::printf(
        "{\"case\": \"9/3 x 64 f16, one layer at %lld tokens\", \"cache_us\": %.2f, "
        "\"kernels_us\": "
        "%.2f, \"ratio\": %.3f, \"counting_share\": %.5f}%s",
        static_cast<long long>(depth), t.cache_us, t.kernels_us, t.cache_us / t.kernels_us,
        2e-3 * counting / t.cache_us, depth == depths[2] ? "],\n " : ",\n  ");
  }
  std::printf("\"counting_ns_per_call\": %.1f}\n", counting);
} catch (const std::exception& e) {
  std::fprintf(stderr, "cache_bench: %s\n", e.what());
  return 1;
}
