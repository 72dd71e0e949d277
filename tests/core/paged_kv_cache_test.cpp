#include "pagedkv/core/paged_kv_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "base/page_codec.h"
#include "core/cache_testing.h"

namespace pagedkv {
namespace {

using testing::copy_of;
using testing::data;
using testing::error_of;
using testing::floats;
using testing::rows;
using testing::same;

constexpr PagedKVQuantMode kModes[] = {PagedKVQuantMode::kOff, PagedKVQuantMode::kQ8,
                                       PagedKVQuantMode::kQ6, PagedKVQuantMode::kQ4};
constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

PagedKVCacheOptions small(PagedKVQuantMode mode = PagedKVQuantMode::kOff, bool dynamic = true) {
  PagedKVCacheOptions o;
  o.block_size = 4;
  o.num_blocks = 2;
  o.dynamic = dynamic;
  o.quant = PagedKVQuantConfig(mode);
  return o;
}

// What a page of the format gives back for a row, rounded to the dtype it came in.
Tensor read_back(const Tensor& tensor, PagedKVQuantMode mode) {
  std::vector<float> values = floats(tensor);
  const auto dim = static_cast<int>(tensor.head_dim);
  with_page_format(page_format(mode, tensor.dtype), [&](auto format) {
    using Format = decltype(format);
    std::vector<std::byte> row(static_cast<size_t>(dim) * 4);
    for (size_t at = 0; at < values.size(); at += static_cast<size_t>(dim)) {
      float scale = 1.0f;
      ASSERT_TRUE(Format::store_row(values.data() + at, dim, row.data(), &scale));
      for (int e = 0; e < dim; ++e)
        values[at + e] =
            Format::kHasScales ? Format::load(row.data(), e) * scale : Format::load(row.data(), e);
    }
  });
  Tensor out(tensor.dtype, tensor.num_heads, tensor.num_tokens, tensor.head_dim);
  from_floats(values.data(), out.view());
  return out;
}

TEST(PagedKVCache, NothingIsAllocatedBeforeTheFirstWrite) {
  const PagedKVCache cache;
  EXPECT_EQ(cache.capacity(), 16384);
  EXPECT_EQ(cache.offset(), 0);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.size_bytes(), 0);
  EXPECT_TRUE(cache.block_table().empty());
  EXPECT_TRUE(cache.state().first.empty());
  EXPECT_EQ(cache.layer_pages().keys.data, nullptr);
  EXPECT_EQ(cache.meta_state(), (std::array<std::string, 3>{"16", "1024", "0"}));
}

TEST(PagedKVCache, ReadsBackWhatThePagesHoldInTheDtypeItCameIn) {
  for (const PagedKVQuantMode mode : kModes)
    for (const DType dtype : kDTypes) {
      PagedKVCache cache(small(mode));
      const Tensor k = rows(1, 2, 11, 8, dtype), v = rows(2, 2, 11, 12, dtype);
      cache.update(k.view().tokens(0, 3), v.view().tokens(0, 3));
      cache.update(k.view().tokens(3, 0), v.view().tokens(3, 0));
      const auto [keys, values] =
          cache.update_and_fetch(k.view().tokens(3, 8), v.view().tokens(3, 8));
      EXPECT_TRUE(same(keys, read_back(k, mode))) << quant_mode_name(mode) << dtype_name(dtype);
      EXPECT_TRUE(same(values, read_back(v, mode))) << quant_mode_name(mode) << dtype_name(dtype);
      EXPECT_TRUE(same(cache.keys(), keys));
      EXPECT_TRUE(same(cache.values(), values));
      EXPECT_EQ(cache.offset(), 11);
      EXPECT_EQ(cache.stats().updates, 3);
    }
}

TEST(PagedKVCache, TakesBothMemoryOrders) {
  PagedKVCache cache(small());
  const std::vector<float> x = data(5, 6 * 3 * 8);
  const auto view = TensorView::tokens_first(x.data(), DType::kF32, 6, 3, 8);
  cache.update(view, view);
  EXPECT_EQ(floats(cache.keys()), x);
}

TEST(PagedKVCache, AGivenDtypeConvertsWhateverComesIn) {
  PagedKVCacheOptions o = small();
  o.dtype = DType::kF16;
  PagedKVCache cache(o);
  cache.update(rows(1, 1, 2, 8, DType::kF32), rows(2, 1, 2, 8, DType::kBF16));
  cache.update(rows(3, 1, 2, 8, DType::kF16), rows(4, 1, 2, 8, DType::kF32));
  EXPECT_EQ(cache.keys().dtype, DType::kF16);
  EXPECT_EQ(cache.stats().key_format, "f16");
  const Tensor expected = copy_of(rows(1, 1, 2, 8));
  Tensor half(DType::kF16, 1, 2, 8);
  from_floats(floats(expected).data(), half.view());
  EXPECT_TRUE(same(copy_of(cache.keys().view().tokens(0, 2)), half));
}

TEST(PagedKVCache, KeysAndValuesMayDifferInFormatAndDtype) {
  PagedKVCacheOptions o = small();
  o.quant = PagedKVQuantConfig(PagedKVQuantMode::kOff, PagedKVQuantMode::kQ4);
  PagedKVCache cache(o);
  const Tensor k = rows(1, 2, 5, 8, DType::kF16), v = rows(2, 2, 5, 6, DType::kF32);
  cache.update(k, v);
  EXPECT_TRUE(same(cache.keys(), k));
  EXPECT_TRUE(same(cache.values(), read_back(v, PagedKVQuantMode::kQ4)));
  EXPECT_EQ(cache.stats().key_format, "f16");
  EXPECT_EQ(cache.stats().value_format, "q4");
}

// Attention over what the pages hold, in double.
std::vector<double> oracle(const std::vector<float>& q, const Tensor& keys, const Tensor& values,
                           int64_t num_queries, int64_t num_q_heads) {
  const std::vector<float> k = floats(keys), v = floats(values);
  const int64_t held = keys.num_tokens, dim = keys.head_dim, vdim = values.head_dim,
                heads = keys.num_heads;
  std::vector<double> out;
  for (int64_t r = 0; r < num_queries; ++r)
    for (int64_t h = 0; h < num_q_heads; ++h) {
      const int64_t kv = h / (num_q_heads / heads), seen = held - num_queries + r + 1;
      std::vector<double> p(static_cast<size_t>(seen));
      double top = -1e300, sum = 0;
      for (int64_t t = 0; t < seen; ++t) {
        for (int64_t d = 0; d < dim; ++d)
          p[t] += double{q[(r * num_q_heads + h) * dim + d]} * k[(t * heads + kv) * dim + d];
        p[t] /= std::sqrt(static_cast<double>(dim));
        top = std::max(top, p[t]);
      }
      for (double& x : p) sum += x = std::exp(x - top);
      for (int64_t d = 0; d < vdim; ++d) {
        double o = 0;
        for (int64_t t = 0; t < seen; ++t) o += p[t] * v[(t * heads + kv) * vdim + d];
        out.push_back(o / sum);
      }
    }
  return out;
}

TEST(PagedKVCache, AttendsOverWhatThePagesHold) {
  for (const PagedKVQuantMode mode : kModes)
    for (const int64_t queries : {1, 4}) {
      PagedKVCache cache(small(mode));
      cache.update(rows(1, 2, 37, 16), rows(2, 2, 37, 24));
      const Tensor q = rows(3, 6, queries, 16);
      const Tensor out = cache.attend(q);
      ASSERT_EQ(out.num_heads, 6);
      ASSERT_EQ(out.num_tokens, queries);
      ASSERT_EQ(out.head_dim, 24);
      const auto expected = oracle(floats(q), cache.keys(), cache.values(), queries, 6);
      const auto got = floats(out);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5);
    }
}

TEST(PagedKVCache, QueriesAndResultsShareADtype) {
  PagedKVCache cache(small());
  cache.update(rows(1, 1, 9, 16), rows(2, 1, 9, 16));
  for (const DType dtype : kDTypes) {
    const Tensor q = rows(3, 2, 2, 16, dtype);
    const Tensor out = cache.attend(q);
    EXPECT_EQ(out.dtype, dtype);
    const Tensor exact = cache.attend(copy_of([&] {
      Tensor f(DType::kF32, 2, 2, 16);
      from_floats(floats(q).data(), f.view());
      return f;
    }()));
    Tensor rounded(dtype, 2, 2, 16);
    from_floats(floats(exact).data(), rounded.view());
    EXPECT_TRUE(same(out, rounded));
  }
}

TEST(PagedKVCache, ChunksAndPagesLeaveEveryBitAsItIs) {
  for (const PagedKVQuantMode mode : kModes) {
    const Tensor k = rows(1, 2, 700, 32), v = rows(2, 2, 700, 32), q = rows(3, 4, 3, 32);
    Tensor first;
    for (const int block_size : {1, 3, 16, 256})
      for (const int64_t chunk : {1, 13, 700}) {
        PagedKVCacheOptions o = small(mode);
        o.block_size = block_size;
        PagedKVCache cache(o);
        for (int64_t t = 0; t < 700; t += chunk) {
          const int64_t n = std::min<int64_t>(chunk, 700 - t);
          cache.update(k.view().tokens(t, n), v.view().tokens(t, n));
        }
        const Tensor out = cache.attend(q);
        if (first.empty()) first = out;
        EXPECT_TRUE(same(out, first)) << quant_mode_name(mode) << " " << block_size << " " << chunk;
      }
  }
}

TEST(PagedKVCache, MasksAndBiasesHide) {
  PagedKVCache cache(small());
  cache.update(rows(1, 1, 6, 16), rows(2, 1, 6, 16));
  const Tensor q = rows(3, 1, 1, 16);
  const std::vector<uint8_t> mask{0, 0, 1, 1, 1, 1};
  std::vector<float> bias(6, 0.0f);
  bias[0] = bias[1] = -std::numeric_limits<float>::infinity();
  AttendOptions masked, biased, windowed;
  masked.mask = mask;
  biased.bias = bias;
  windowed.sliding_window = 4;
  const Tensor out = cache.attend(q, masked);
  EXPECT_TRUE(same(out, cache.attend(q, biased)));
  EXPECT_TRUE(same(out, cache.attend(q, windowed)));
  EXPECT_FALSE(same(out, cache.attend(q)));
  PagedKVCacheOptions o = small();
  o.sliding_window = 4;  // the cache's own wins over the call's
  PagedKVCache window(o);
  window.update(rows(1, 1, 6, 16), rows(2, 1, 6, 16));
  windowed.sliding_window = 2;
  EXPECT_TRUE(same(out, window.attend(q, windowed)));
}

// Everything that can be seen without a side effect.
std::string picture(const PagedKVCache& cache) {
  PagedKVCacheStats s = cache.stats();
  s.reads = s.dequant_reads = s.dequant_tokens = 0;
  s.write_seconds = s.read_seconds = s.attention_seconds = 0;
  std::string text = to_json(s);
  for (int layer = 0; layer < cache.num_layers(); ++layer) {
    const auto [k, v] = cache.state(layer);
    for (const Tensor* t : {&k, &v})
      text.append(reinterpret_cast<const char*>(t->bytes.data()), t->bytes.size());
  }
  return text;
}

TEST(PagedKVCache, EveryRefusalNamesWhatIsWrongAndChangesNothing) {
  PagedKVCache cache(small(PagedKVQuantMode::kQ8, false));  // 8 tokens
  cache.update(rows(1, 2, 5, 8), rows(2, 2, 5, 6));
  const std::string before = picture(cache);
  const auto refused = [&](auto call, std::initializer_list<const char*> parts) {
    const std::string text = error_of<std::exception>(call);
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(picture(cache), before) << text;
  };
  const Tensor k = rows(3, 2, 2, 8), v = rows(4, 2, 2, 6);
  refused([&] { cache.update(rows(1, 2, 4, 8), rows(2, 2, 4, 6)); }, {"9 > 8", "growth is off"});
  refused([&] { cache.grow_to_capacity(9); }, {"8", "9", "growth is off"});
  refused([&] { cache.update(rows(1, 3, 2, 8), rows(2, 3, 2, 6)); },
          {"shape", "2 kv heads", "3 kv heads"});
  refused([&] { cache.update(rows(1, 2, 2, 4), v); }, {"shape", "head_dim 8", "head_dim 4"});
  refused([&] { cache.update(k, rows(2, 2, 2, 8)); }, {"shape", "6 (V)", "8 (V)"});
  refused([&] { cache.update(rows(1, 2, 2, 8, DType::kF16), v); }, {"dtype", "float32", "float16"});
  refused([&] { cache.update(k, rows(2, 1, 2, 6)); }, {"values have 1 heads, keys have 2"});
  refused([&] { cache.update(k, rows(2, 2, 1, 6)); }, {"values have 1 tokens, keys have 2"});
  refused([&] { cache.update(k, v, 1); }, {"layer 1", "0..0"});
  refused([&] { cache.update(k, v, -1); }, {"layer -1"});
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(), std::nanf("")}) {
    Tensor rotten = v;
    const size_t last = rotten.bytes.size() - sizeof(float);
    std::memcpy(rotten.bytes.data() + last, &bad, sizeof bad);
    refused([&] { cache.update(k, rotten); }, {"infinity", "q8"});
    refused([&] { cache.set_state(k, rotten); }, {"infinity", "q8"});
  }
  refused([&] { cache.set_state(rows(1, 2, 9, 8), rows(2, 2, 9, 6)); }, {"9 > 8"});
  refused([&] { cache.set_keys(rows(1, 2, 6, 8)); }, {"6 tokens", "values of 5"});
  refused([&] { cache.set_values(rows(1, 2, 6, 6)); }, {"6 tokens", "keys of 5"});
  refused([&] { cache.trim(-1); }, {"-1"});
  refused([&] { cache.set_meta_state(std::vector<std::string>{"4", "2", "9"}); },
          {"restored offset 9", "capacity 8"});
  refused([&] { cache.set_meta_state(std::vector<std::string>{"4", "2", "6"}); },
          {"offset 6", "5 tokens"});
  refused([&] { cache.set_meta_state(std::vector<std::string>{"4", "2", "-1"}); }, {"offset -1"});
  refused([&] { cache.set_meta_state(std::vector<std::string>{"4", "x", "5"}); }, {"\"x\""});
  refused([&] { cache.set_meta_state(std::vector<std::string>{"4", "2"}); }, {"2 entries"});
  refused([&] { cache.attend(rows(1, 2, 6, 8)); }, {"6 queries", "5 tokens"});
  refused([&] { cache.attend(rows(1, 3, 1, 8)); }, {"3 query heads", "2 kv heads"});
  refused([&] { cache.attend(rows(1, 2, 1, 16)); }, {"head_dim 16", "8"});
  AttendOptions o;
  const std::vector<uint8_t> mask(4, 1);
  o.mask = mask;
  refused([&] { cache.attend(rows(1, 2, 1, 8), o); }, {"mask has 4", "5"});
  refused([&] { cache.make_mask(-1); }, {"-1"});
}

TEST(PagedKVCache, AFirstWriteThatIsRefusedLeavesAnEmptyCache) {
  struct Case {
    PagedKVQuantMode mode;
    int64_t tokens, key_dim, value_dim;
    const char* part;
  };
  for (const Case& c : std::vector<Case>{{PagedKVQuantMode::kOff, 9, 8, 8, "9 > 8"},
                                         {PagedKVQuantMode::kQ4, 2, 7, 8, "head_dim 7"},
                                         {PagedKVQuantMode::kQ4, 2, 8, 7, "head_dim 7"},
                                         {PagedKVQuantMode::kQ6, 2, 6, 8, "head_dim 6"},
                                         {PagedKVQuantMode::kOff, 2, 513, 8, "head_dim 513"}}) {
    PagedKVCache cache(small(c.mode, false));
    const std::string before = picture(cache);
    const std::string text = error_of<std::exception>(
        [&] { cache.update(rows(1, 1, c.tokens, c.key_dim), rows(2, 1, c.tokens, c.value_dim)); });
    EXPECT_NE(text.find(c.part), std::string::npos) << text;
    EXPECT_EQ(picture(cache), before);
    cache.update(rows(1, 1, 8, 16), rows(2, 1, 8, 16));  // any other shape is welcome
    EXPECT_EQ(cache.offset(), 8);
  }
}

TEST(PagedKVCache, CapacityErrorsAndMemoryErrorsHaveTheirTypes) {
  PagedKVCache cache(small(PagedKVQuantMode::kOff, false));
  EXPECT_THROW(cache.update(rows(1, 1, 9, 8), rows(2, 1, 9, 8)), CapacityError);
  PagedKVCacheOptions o = small();
  o.max_bytes = 4 * 1024;  // a page of 4 tokens x 512 f32, K and V, is 16 KiB
  PagedKVCache poor(o);
  EXPECT_THROW(poor.update(rows(1, 1, 1, 512), rows(2, 1, 1, 512)), MemoryError);
  EXPECT_EQ(poor.size_bytes(), 0);
  o.max_bytes = 3 * 16 * 1024;  // three pages
  PagedKVCache three(o);
  three.update(rows(1, 1, 12, 512), rows(2, 1, 12, 512));
  const std::string text =
      error_of<MemoryError>([&] { three.update(rows(1, 1, 1, 512), rows(2, 1, 1, 512)); });
  EXPECT_NE(text.find("byte budget is 49152"), std::string::npos) << text;
  EXPECT_EQ(three.offset(), 12);
}

TEST(PagedKVCache, GrowthMovesNothingAndFollowsTheFormula) {
  PagedKVCache cache(small());  // 2 blocks of 4
  cache.update(rows(1, 1, 8, 8), rows(2, 1, 8, 8));
  const void* const keys = cache.layer_pages().keys.data;
  EXPECT_EQ(cache.capacity(), 8);
  cache.update(rows(3, 1, 1, 8), rows(4, 1, 1, 8));
  EXPECT_EQ(cache.capacity(), 12);  // max(3, (3 * 2 + 1) / 2, 3) blocks
  cache.update(rows(3, 1, 4, 8), rows(4, 1, 4, 8));
  EXPECT_EQ(cache.capacity(), 20);  // (3 * 3 + 1) / 2
  cache.update(rows(3, 1, 87, 8), rows(4, 1, 87, 8));
  EXPECT_EQ(cache.capacity(), 100);
  EXPECT_EQ(cache.layer_pages().keys.data, keys);
  const auto s = cache.stats();
  EXPECT_EQ(s.grow_events, 3);
  EXPECT_EQ(s.bytes_moved, 0);
  EXPECT_EQ(s.num_blocks, 25);
}

TEST(PagedKVCache, TheContextWindowHoldsGrowthBackUnlessMoreIsNeeded) {
  PagedKVCacheOptions o = small();
  o.num_blocks = 10;
  o.context_window = 44;
  PagedKVCache cache(o);
  cache.update(rows(1, 1, 40, 8), rows(2, 1, 40, 8));
  cache.update(rows(1, 1, 1, 8), rows(2, 1, 1, 8));
  EXPECT_EQ(cache.capacity(), 44);  // 15 blocks without the window
  cache.update(rows(1, 1, 4, 8), rows(2, 1, 4, 8));
  EXPECT_EQ(cache.capacity(), 68);  // 45 tokens do not fit the window: (3 * 11 + 1) / 2 blocks
}

TEST(PagedKVCache, GrowthOnRequestTakesAWindowOfItsOwn) {
  PagedKVCacheOptions o = small();
  o.num_blocks = 10;
  PagedKVCache cache(o);
  cache.grow_to_capacity(41, 44);  // 15 blocks without the window
  EXPECT_EQ(cache.capacity(), 44);
  cache.update(rows(1, 1, 41, 8), rows(2, 1, 41, 8));
  cache.grow_to_capacity(48, 52);
  EXPECT_EQ(cache.capacity(), 52);
  EXPECT_EQ(cache.committed_blocks(), 13);
  EXPECT_THROW(cache.grow_to_capacity(60, -1), std::invalid_argument);
}

TEST(PagedKVCache, PagesOutliveResetWhileTheirOwnerIsHeld) {
  PagedKVCache cache(small());
  EXPECT_EQ(cache.pages_owner(), nullptr);
  const Tensor k = rows(1, 1, 4, 8);
  cache.update(k, rows(2, 1, 4, 8));
  const std::shared_ptr<const void> owner = cache.pages_owner();
  const LayerPages pages = cache.layer_pages();
  cache.set_state(rows(3, 1, 4, 8), rows(4, 1, 4, 8));
  cache.reset();
  EXPECT_EQ(std::memcmp(pages.keys.data, k.bytes.data(), k.bytes.size()), 0);
  EXPECT_EQ(cache.pages_owner(), nullptr);
}

TEST(PagedKVCache, GrowsAheadOfTheWrites) {
  PagedKVCache cache(small());
  cache.grow_to_capacity(100);  // before the pages exist: the first write makes them
  EXPECT_EQ(cache.capacity(), 100);
  EXPECT_EQ(cache.size_bytes(), 0);
  cache.update(rows(1, 1, 3, 8), rows(2, 1, 3, 8));
  EXPECT_EQ(cache.capacity(), 100);
  cache.grow_to_capacity(200);
  EXPECT_GE(cache.capacity(), 200);
  const int64_t bytes = cache.size_bytes();
  EXPECT_GE(bytes, 200 * 2 * 8 * 4);
  const auto commits = cache.stats();
  cache.update(rows(1, 1, 197, 8), rows(2, 1, 197, 8));
  EXPECT_EQ(cache.size_bytes(), bytes);  // the memory was there
  EXPECT_EQ(cache.stats().touch_seconds, commits.touch_seconds);
}

TEST(PagedKVCache, ShrinksToWhatIsInUse) {
  PagedKVCache cache(small());
  cache.update(rows(1, 1, 4000, 64), rows(2, 1, 4000, 64));
  const Tensor kept = copy_of(cache.keys().view().tokens(0, 100));
  const int64_t full = cache.stats().bytes_resident;
  cache.trim(3900);
  EXPECT_EQ(cache.stats().pages_in_use, 25);
  EXPECT_EQ(cache.shrink_to_capacity(0), 100);
  EXPECT_EQ(cache.capacity(), 100);
  EXPECT_LT(cache.stats().bytes_resident, full / 20);
  EXPECT_EQ(cache.stats().shrink_events, 1);
  EXPECT_TRUE(same(cache.keys(), kept));
  cache.update(rows(5, 1, 4000, 64), rows(6, 1, 4000, 64));  // and grows again
  EXPECT_EQ(cache.offset(), 4100);
}

TEST(PagedKVCache, TrimForgetsTheNewestTokens) {
  PagedKVCache cache(small());
  const Tensor k = rows(1, 2, 10, 8), v = rows(2, 2, 10, 8);
  cache.update(k, v);
  EXPECT_EQ(cache.trim(3), 3);
  EXPECT_TRUE(same(cache.keys(), copy_of(k.view().tokens(0, 7))));
  cache.update(k.view().tokens(7, 3), v.view().tokens(7, 3));
  EXPECT_TRUE(same(cache.keys(), k));
  EXPECT_EQ(cache.trim(99), 10);
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.trim(1), 0);
}

TEST(PagedKVCache, LayersShareABlockTableAndAHalfDoneStepCanBeUndone) {
  PagedKVCacheOptions o = small(PagedKVQuantMode::kQ8);
  o.num_layers = 3;
  PagedKVCache cache(o);
  for (int layer = 0; layer < 3; ++layer)
    cache.update(rows(10 + layer, 1, 6, 8), rows(20 + layer, 1, 6, 8), layer);
  for (int layer = 0; layer < 2; ++layer)
    cache.update(rows(30 + layer, 1, 5, 8), rows(40 + layer, 1, 5, 8), layer);
  EXPECT_EQ(cache.offset(), 6);
  EXPECT_EQ(cache.offset(1), 11);
  EXPECT_EQ(cache.offset(2), 6);
  EXPECT_EQ(cache.block_table().size(), 3u);
  EXPECT_TRUE(same(cache.keys(2), read_back(rows(12, 1, 6, 8), PagedKVQuantMode::kQ8)));
  AttendOptions second;
  second.layer = 1;
  EXPECT_EQ(cache.attend(rows(1, 2, 5, 8), second).num_tokens, 5);
  EXPECT_EQ(cache.trim(0), 0);
  for (int layer = 0; layer < 3; ++layer) EXPECT_EQ(cache.offset(layer), 6);
  EXPECT_EQ(cache.block_table().size(), 2u);
  EXPECT_TRUE(same(cache.keys(1), read_back(rows(11, 1, 6, 8), PagedKVQuantMode::kQ8)));
}

struct Entry {  // as a framework's own cache has them
  Tensor keys, values;
  int64_t offset;
};

TEST(PagedKVCache, LoadsFromAnythingWithKeysValuesAndAnOffset) {
  const Entry entry{rows(1, 2, 20, 8), rows(2, 2, 20, 8), 13};
  const PagedKVCache cache = PagedKVCache::from_cache(entry, small());
  EXPECT_EQ(cache.offset(), 13);
  EXPECT_EQ(cache.capacity(), 16);
  EXPECT_TRUE(same(cache.keys(), copy_of(entry.keys.view().tokens(0, 13))));
  EXPECT_EQ(cache.stats().updates, 1);
  for (const int64_t nothing : {int64_t{0}, int64_t{-3}})
    EXPECT_TRUE(
        PagedKVCache::from_cache(Entry{entry.keys, entry.values, nothing}, small()).empty());
  EXPECT_TRUE(PagedKVCache::from_cache(Entry{{}, {}, 5}, small()).empty());
  EXPECT_EQ(PagedKVCache::from_cache(Entry{entry.keys, entry.values, 99}, small()).offset(), 20);
  EXPECT_THROW(PagedKVCache::from_cache(Entry{entry.keys, rows(2, 2, 5, 8), 13}, small()),
               std::invalid_argument);
  EXPECT_THROW(PagedKVCache::from_cache(entry, small(PagedKVQuantMode::kOff, false)),
               CapacityError);
}

TEST(PagedKVCache, ACopyInTheSameFormatHasTheSameBytesAndNoOtherTie) {
  for (const PagedKVQuantMode mode : kModes) {
    PagedKVCache source(small(mode));
    source.update(rows(1, 2, 300, 8, DType::kF16), rows(2, 2, 300, 8, DType::kF16));
    PagedKVCacheOptions o = small(mode);
    o.block_size = 16;
    PagedKVCache copy = PagedKVCache::from_cache(source, o);
    EXPECT_TRUE(same(copy.keys(), source.keys()));
    EXPECT_TRUE(same(copy.attend(rows(3, 2, 1, 8)), source.attend(rows(3, 2, 1, 8))));
    const Tensor before = source.keys();
    copy.trim(100);
    copy.update(rows(8, 2, 50, 8, DType::kF16), rows(9, 2, 50, 8, DType::kF16));
    EXPECT_TRUE(same(source.keys(), before));
  }
}

TEST(PagedKVCache, ACopyInAnotherFormatEncodesWhatTheSourceReads) {
  PagedKVCache source(small());
  source.update(rows(1, 2, 30, 8), rows(2, 2, 30, 8));
  const PagedKVCache q4 = PagedKVCache::from_cache(source, small(PagedKVQuantMode::kQ4));
  EXPECT_TRUE(same(q4.keys(), read_back(source.keys(), PagedKVQuantMode::kQ4)));
  EXPECT_EQ(source.stats().dequant_reads, 0);
  const PagedKVCache back = PagedKVCache::from_cache(q4, small());
  EXPECT_TRUE(same(back.keys(), q4.keys()));
  EXPECT_EQ(back.stats().key_format, "f32");
}

TEST(PagedKVCache, StateGoesOutAndComesBack) {
  PagedKVCache cache(small());
  cache.update(rows(1, 1, 7, 8), rows(2, 1, 7, 8));
  cache.set_state(rows(3, 2, 4, 16, DType::kF16), rows(4, 2, 4, 16, DType::kF16));
  EXPECT_EQ(cache.offset(), 4);
  EXPECT_TRUE(same(cache.keys(), rows(3, 2, 4, 16, DType::kF16)));
  cache.set_keys(rows(5, 2, 3, 16, DType::kF16));
  EXPECT_EQ(cache.offset(), 3);
  EXPECT_TRUE(same(cache.values(), copy_of(rows(4, 2, 4, 16, DType::kF16).view().tokens(0, 3))));
  cache.set_values(rows(6, 2, 2, 16, DType::kF16));
  EXPECT_EQ(cache.offset(), 2);
  cache.set_values(TensorView());
  EXPECT_TRUE(cache.empty());
  EXPECT_EQ(cache.size_bytes(), 0);
  cache.update(rows(1, 1, 7, 8), rows(2, 1, 7, 8));
  cache.set_state(TensorView(), TensorView());
  EXPECT_TRUE(cache.empty());
}

TEST(PagedKVCache, AGrownCapacitySurvivesReset) {
  PagedKVCache cache(small());
  cache.update(rows(1, 1, 50, 8), rows(2, 1, 50, 8));
  const int64_t capacity = cache.capacity();
  cache.reset();
  EXPECT_EQ(cache.capacity(), capacity);
  EXPECT_EQ(cache.size_bytes(), 0);
  EXPECT_EQ(cache.stats().grow_events, 1);  // counters go on
  cache.update(rows(1, 3, 1, 4, DType::kBF16), rows(2, 3, 1, 4, DType::kBF16));
  EXPECT_EQ(cache.capacity(), capacity);
}

TEST(PagedKVCache, MetaStateGivesAnEmptyCacheItsGeometry) {
  PagedKVCache cache(small());
  cache.set_meta_state(std::vector<std::string>{"8", "5", "0"});
  EXPECT_EQ(cache.block_size(), 8);
  EXPECT_EQ(cache.capacity(), 40);
  EXPECT_THROW(cache.set_meta_state(std::vector<std::string>{"8", "5", "3"}),
               std::invalid_argument);  // rows that nobody wrote
  cache.set_meta_state({});
  cache.update(rows(1, 1, 9, 8), rows(2, 1, 9, 8));
  cache.set_meta_state(std::vector<std::string>{"4", "1", "6"});
  EXPECT_EQ(cache.block_size(), 8);  // pages keep theirs
  EXPECT_EQ(cache.offset(), 6);
}

// FC-13: what was saved goes on as if it had never been.
TEST(PagedKVCache, ARestoredSessionTakesALongAppend) {
  for (const PagedKVQuantMode mode : kModes)
    for (const int64_t saved : {1024, 1030}) {
      PagedKVCacheOptions o;
      o.block_size = 16;
      o.num_blocks = 64;
      o.quant = PagedKVQuantConfig(mode);
      const Tensor k = rows(1, 2, saved + 192, 64), v = rows(2, 2, saved + 192, 64);
      const auto append = [&](PagedKVCache& cache, int64_t first, int64_t count) {
        cache.update(k.view().tokens(first, count), v.view().tokens(first, count));
        EXPECT_GE(cache.capacity(), cache.offset());
      };
      PagedKVCache never(o);
      append(never, 0, saved);
      PagedKVCache restored(o);
      const auto [keys, values] = never.state();
      restored.set_state(keys, values);
      restored.set_meta_state(never.meta_state());
      for (PagedKVCache* cache : {&never, &restored}) {
        append(*cache, saved, 187);
        for (int64_t t = saved + 187; t < saved + 192; ++t) append(*cache, t, 1);
      }
      EXPECT_EQ(restored.capacity(), never.capacity());
      EXPECT_TRUE(same(restored.keys(), never.keys())) << quant_mode_name(mode);
      const LayerPages a = never.layer_pages(), b = restored.layer_pages();
      for (size_t page = 0; page < never.block_table().size(); ++page) {
        const int64_t bytes = 16 * 2 * row_bytes(a.keys.format, 64);
        const int64_t from = never.block_table()[page] * bytes,
                      to = restored.block_table()[page] * bytes;
        const int64_t used = page + 1 < never.block_table().size()
                                 ? bytes
                                 : (saved + 192 - 16 * static_cast<int64_t>(page)) * bytes / 16;
        EXPECT_EQ(std::memcmp(a.keys.data + from, b.keys.data + to, static_cast<size_t>(used)), 0);
        EXPECT_EQ(std::memcmp(a.values.data + from, b.values.data + to, static_cast<size_t>(used)),
                  0);
      }
    }
}

TEST(PagedKVCache, MasksAreThoseOfMlxLm) {
  PagedKVCache cache(small());
  cache.update(rows(1, 1, 3, 8), rows(2, 1, 3, 8));
  EXPECT_EQ(cache.make_mask(1).kind, CacheMask::Kind::kNone);
  EXPECT_EQ(cache.make_mask(1, true).kind, CacheMask::Kind::kNone);
  EXPECT_EQ(cache.make_mask(2).kind, CacheMask::Kind::kCausal);
  const CacheMask causal = cache.make_mask(2, true);
  EXPECT_EQ(causal.kind, CacheMask::Kind::kArray);
  EXPECT_EQ(causal.array, (std::vector<uint8_t>{1, 1, 1, 1, 0, 1, 1, 1, 1, 1}));
  const CacheMask band = cache.make_mask(2, false, 2);
  EXPECT_EQ(band.rows, 2);
  EXPECT_EQ(band.columns, 5);
  EXPECT_EQ(band.array, (std::vector<uint8_t>{0, 0, 1, 1, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(cache.make_mask(1, false, 2).array, (std::vector<uint8_t>{0, 0, 1, 1}));
}

int64_t resident_bytes_of_process() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// DESIGN 8: bytes per token against f16, as the kernel counts them, before and after attention.
TEST(PagedKVCache, QuantisedPagesTakeTheirShareOfMemoryAndNoMirror) {
  constexpr int64_t kTokens = 16384;
  for (const int64_t dim : {64, 128}) {
    const Tensor k = rows(1, 2, kTokens, dim, DType::kF16), q = rows(3, 2, 1, dim, DType::kF16);
    const auto resident = [&](PagedKVQuantMode mode) {
      PagedKVCacheOptions o;
      o.num_blocks = kTokens / 16;
      o.quant = PagedKVQuantConfig(mode);
      PagedKVCache cache(o);
      cache.update(k, k);
      cache.attend(q);  // scratch exists from here on
      const int64_t before = resident_bytes_of_process(), pages = cache.stats().bytes_resident;
      for (int i = 0; i < 8; ++i) cache.attend(q);
      EXPECT_EQ(cache.stats().bytes_resident, pages);
      EXPECT_LT(resident_bytes_of_process() - before, int64_t{1} << 20) << quant_mode_name(mode);
      return static_cast<double>(pages);
    };
    const double f16 = resident(PagedKVQuantMode::kOff);
    const double q8 = resident(PagedKVQuantMode::kQ8) / f16,
                 q6 = resident(PagedKVQuantMode::kQ6) / f16,
                 q4 = resident(PagedKVQuantMode::kQ4) / f16;
    const double scale = 2.0 / static_cast<double>(dim);
    EXPECT_NEAR(q8, 0.5 + scale, 0.005);  // 0.531 at 64, 0.516 at 128
    EXPECT_NEAR(q6, 0.375 + scale, 0.005);
    EXPECT_NEAR(q4, 0.25 + scale, 0.005);  // 0.281, 0.266
    RecordProperty("q8_of_f16_at_" + std::to_string(dim), std::to_string(q8));
    RecordProperty("q4_of_f16_at_" + std::to_string(dim), std::to_string(q4));
  }
}

}  // namespace
}  // namespace pagedkv
