// The seed's attention on recorded keys, values and queries (tests/data/golden/attention.txt), through
// PagedKVCache on every kernel set: within the tolerance of the seed's own error, and within rounding of
// a softmax in double precision over what the pages hold. Differences of meaning are listed deviations, each
// of which must occur.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "core/golden_data.h"
#include "core/golden_deviations.h"
#include "pagedkv/core/paged_kv_cache.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::testing {
namespace {

// Which keys a query row sees, and what is added to its scores.
struct Visibility {
  int64_t rows = 0, tokens = 0;
  std::vector<uint8_t> visible;  // [rows, tokens]
  std::vector<float> bias;       // [rows, tokens], or empty
};

struct Case {
  explicit Case(const GoldenLine& line)
      : line(line), k(line.array("k")), v(line.array("v")), q(line.array("q")) {}

  const GoldenLine& line;
  GoldenArray k, v, q;
  int64_t context = line.integer("context"), rows = line.integer("q_len");
  int64_t window = line.integer("sliding_window");
  double scale = line.number("scale");
  bool array_mask = line.fields().at("mask").front() == '@';
  bool declined = line.is_null("out");
  // What the seed computed; for what it declined, what was asked.
  std::string semantics = !declined ? line.text("semantics") : array_mask ? "array_mask" : "causal";
};

// As the seed sees it: position max(0, context - rows) + i for row i; a window of the context's end.
Visibility visibility(const Case& c) {
  Visibility out;
  out.rows = c.rows;
  out.tokens = c.context;
  out.visible.assign(static_cast<size_t>(c.rows * c.context), 1);
  for (int64_t i = 0; i < c.rows; ++i)
    for (int64_t t = 0; t < c.context; ++t) {
      const int64_t position = std::max<int64_t>(0, c.context - c.rows) + i;
      if ((c.semantics == "causal" && t > position) || (c.window > 0 && t < c.context - c.window))
        out.visible[i * c.context + t] = 0;
    }
  if (!c.array_mask) return out;
  const GoldenArray mask = c.line.array("mask");
  if (mask.dtype == "bool")
    for (int64_t i = 0; i < mask.size(); ++i) out.visible[i] &= static_cast<uint8_t>(mask.bytes[i]);
  else
    out.bias = mask.floats();
  return out;
}

// Double precision, over `keys` and `values` [num_kv_heads, tokens, head_dim] as floats; a row without a
// token gives zeros. [num_q_heads, rows, value_dim]
std::vector<double> oracle(const Case& c, const Visibility& see, const std::vector<float>& keys,
                           const std::vector<float>& values) {
  const TensorView k = c.k.view(), v = c.v.view(), q = c.q.view();
  const std::vector<float> queries = c.q.floats();
  std::vector<double> out(static_cast<size_t>(q.num_heads * c.rows * v.head_dim), 0.0);
  std::vector<double> p(static_cast<size_t>(c.context));
  for (int64_t h = 0; h < q.num_heads; ++h) {
    const int64_t kv = h / (q.num_heads / k.num_heads);
    for (int64_t i = 0; i < c.rows; ++i) {
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int64_t t = 0; t < c.context; ++t) {
        double dot = 0;
        for (int64_t e = 0; e < k.head_dim; ++e)
          dot += double{queries[(h * c.rows + i) * k.head_dim + e]} *
                 keys[(kv * c.context + t) * k.head_dim + e];
        p[t] = dot * c.scale + (see.bias.empty() ? 0.0 : double{see.bias[i * c.context + t]});
        if (see.visible[i * c.context + t] == 0) p[t] = -std::numeric_limits<double>::infinity();
        most = std::max(most, p[t]);
      }
      if (std::isinf(most)) continue;
      for (int64_t t = 0; t < c.context; ++t) sum += p[t] = std::exp(p[t] - most);
      double* row = &out[(h * c.rows + i) * v.head_dim];
      for (int64_t t = 0; t < c.context; ++t)
        for (int64_t e = 0; e < v.head_dim; ++e)
          row[e] += p[t] / sum * values[(kv * c.context + t) * v.head_dim + e];
    }
  }
  return out;
}

// What the pages hold, without a rounding to the source dtype: a cache whose dtype is float32 reads it so.
std::vector<float> held(const Case& c, bool keys) {
  PagedKVCacheOptions options;
  options.block_size = 16;
  options.quant = PagedKVQuantConfig(c.line.text("quant"));
  options.dtype = DType::kF32;
  PagedKVCache cache(options);
  cache.update(c.k.view(), c.v.view());
  return floats(keys ? cache.keys() : cache.values());
}

PagedKVCache written(const Case& c) {
  GoldenEnvironment environment;
  environment.set_all(c.line);
  PagedKVCacheOptions given;
  given.block_size = static_cast<int>(c.line.integer("block_size"));
  given.num_blocks = static_cast<int32_t>(c.line.integer("stats.num_blocks"));
  given.quant = PagedKVQuantConfig(c.line.text("quant"));
  PagedKVCache cache(PagedKVCacheOptions::from_environment(given));
  int64_t begin = 0;
  for (const int64_t count : c.line.integers("chunks")) {
    cache.update(c.k.view().tokens(begin, count), c.v.view().tokens(begin, count));
    begin += count;
  }
  return cache;
}

// [num_q_heads, rows, value_dim]
std::vector<float> attended(PagedKVCache& cache, const Case& c, const Visibility& see,
                            Deviations& deviations) {
  AttendOptions how;
  how.scale = static_cast<float>(c.scale);
  how.causal = c.semantics == "causal";
  how.bias = see.bias;
  if (c.semantics == "full" && c.rows > 1) deviations.met("q8 without a mask");
  if (c.window > 0 && c.rows == 1)
    how.sliding_window = static_cast<int>(c.window);
  else if (c.window > 0 || (c.array_mask && see.bias.empty()))
    how.mask = see.visible;
  if (c.window > 0 && c.rows > 1) deviations.met("windows of the context");
  if (c.rows <= c.context) return floats(cache.attend(c.q.view(), how));

  deviations.met("more queries than tokens");
  EXPECT_THROW((void)cache.attend(c.q.view(), how), std::invalid_argument);
  how.causal = false;
  const TensorView v = c.v.view();
  std::vector<float> out(static_cast<size_t>(c.q.view().num_heads * c.rows * v.head_dim));
  for (int64_t i = 0; i < c.rows; ++i) {
    how.mask = std::span(see.visible).subspan(static_cast<size_t>(i * c.context), c.context);
    const std::vector<float> row = floats(cache.attend(c.q.view().tokens(i, 1), how));
    for (int64_t h = 0; h < c.q.view().num_heads; ++h)
      std::copy_n(&row[h * v.head_dim], v.head_dim, &out[(h * c.rows + i) * v.head_dim]);
  }
  return out;
}

// 4 x the seed's own error against double precision, at least 2e-6, 2e-3 or 2e-2. On quantised pages the
// seed rounds keys and values to the source dtype first, which we do not: its error against a reference
// that does not counts as its own.
double tolerance(const Case& c) {
  const std::string dtype = c.line.text("dtype");
  double error = c.line.number("max_abs_diff_from_float64");
  if (c.line.has("max_abs_diff_from_float64_without_cast_to_source_dtype"))
    error =
        std::max(error, c.line.number("max_abs_diff_from_float64_without_cast_to_source_dtype"));
  return std::max(4 * error, dtype == "float32" ? 2e-6 : dtype == "float16" ? 2e-3 : 2e-2);
}

// Rounding of a result of this size to the dtype, half a unit in the last place, beside float32's own
// error.
double rounding(const std::string& dtype, double value) {
  const double half_ulp = dtype == "float32" ? 0 : dtype == "float16" ? 0x1p-11 : 0x1p-8;
  return 2e-6 + half_ulp * std::max(std::abs(value), 0x1p-14);
}

TEST(GoldenAttention, WithinTheSeedsErrorOnEveryKernelSet) {
  const GoldenFile file("attention");
  Deviations deviations(Deviation::kAttention);
  const std::string before = kernels().name;
  int cases = 0, runs = 0;
  double worst_share = 0;
  for (const GoldenLine& line : file.lines()) {
    SCOPED_TRACE(line.place() + " " + line.text("id"));
    ++cases;
    const Case c(line);
    const Visibility see = visibility(c);
    const std::vector<double> exact = oracle(c, see, held(c, true), held(c, false));
    const std::vector<float> seed = c.declined ? std::vector<float>() : line.array("out").floats();
    for (const KernelSet& set : kernel_sets()) {
      if (!set.supported()) continue;
      SCOPED_TRACE(set.name);
      ++runs;
      select_kernels(set.name);
      PagedKVCache cache = written(c);
      EXPECT_EQ(cache.offset(), line.integer("stats.offset"));
      EXPECT_EQ(cache.capacity(), line.integer("stats.capacity"));
      const std::vector<float> ours = attended(cache, c, see, deviations);
      ASSERT_EQ(ours.size(), exact.size());
      double worst = 0;
      for (size_t i = 0; i < ours.size(); ++i) {
        const double limit = rounding(line.text("dtype"), exact[i]);
        ASSERT_NEAR(ours[i], exact[i], limit) << "element " << i;
      }
      if (c.declined) {
        deviations.met("nothing declined");
        continue;
      }
      ASSERT_EQ(ours.size(), seed.size());
      bool mean_rows = false;
      const int64_t row_size = c.v.view().head_dim;
      for (int64_t row = 0; row < static_cast<int64_t>(seed.size()) / row_size; ++row) {
        const uint8_t* keys = &see.visible[row % c.rows * c.context];
        if (std::none_of(keys, keys + c.context, [](uint8_t seen) { return seen != 0; })) {
          for (int64_t e = 0; e < row_size; ++e) EXPECT_EQ(ours[row * row_size + e], 0.0f);
          if (line.text("rows_without_a_key_give") == "mean") {
            mean_rows = true;
            continue;
          }
        }
        for (int64_t i = row * row_size; i < (row + 1) * row_size; ++i)
          worst = std::max(worst, std::abs(double{ours[i]} - seed[i]));
      }
      if (mean_rows) deviations.met("rows without a token");
      EXPECT_LE(worst, tolerance(c));
      worst_share = std::max(worst_share, worst / tolerance(c));
    }
  }
  select_kernels(before);
  std::cout << cases << " cases, " << runs << " runs over the kernel sets; largest difference "
            << worst_share << " of its tolerance; deviations:\n";
  deviations.print();
  EXPECT_EQ(cases, 147);
  EXPECT_EQ(deviations.unused(), std::vector<std::string>());
}

}  // namespace
}  // namespace pagedkv::testing
