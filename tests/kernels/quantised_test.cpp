// What q8, q6 and q4 pages promise: any stored code is read alike by all kernel sets, rounding stays within half a step,
// any head_dim that can be stored can be attended, and a batch changes nothing (FC-03, FC-04, FC-18).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

constexpr PageFormat kQuantised[] = {PageFormat::kQ8, PageFormat::kQ6, PageFormat::kQ4};

float largest_code(PageFormat format) {
  return format == PageFormat::kQ8 ? 127.0f : format == PageFormat::kQ6 ? 31.0f : 7.0f;
}

AttentionCase quantised_case(PageFormat keys, PageFormat values, int head_dim, int seq_len,
                             int query_len) {
  AttentionCase c;
  c.key_format = keys;
  c.value_format = values;
  c.num_q_heads = 6;
  c.key_dim = c.value_dim = head_dim;
  c.sequences = {{seq_len, query_len, 1}};
  return c;
}

// Every byte a page can hold, also codes that no store writes (-128, -32, -8).
TEST(Quantised, SetsAgreeOnEveryCode) {
  for (PageFormat keys : kQuantised)
    for (PageFormat values : kQuantised)
      for (int head_dim : {64, 128, 192, 40})
        for (int query_len : {1, 5}) {
          const AttentionCase c = quantised_case(keys, values, head_dim, 70, query_len);
          AttentionProblem problem(c);
          const LayerPages pages = problem.tokens().pages();
          uint64_t state = 21;
          for (int t = 0; t < 70; ++t)
            for (const PageArray& array : {pages.keys, pages.values}) {
              const int64_t bytes = row_bytes(array.format, head_dim);
              std::byte* row = array.data + problem.tokens().slot(0, t) * c.num_kv_heads * bytes;
              for (int64_t b = 0; b < c.num_kv_heads * bytes; ++b)  // whole rows of one code, too
                row[b] = static_cast<std::byte>(t % 3 == 0   ? t / 3 * 11
                                                : t % 3 == 1 ? splitmix64(state)
                                                             : b);
            }
          ThreadPool one(1);
          const AttentionOutput expected = problem.run(reference_set(), one);
          for (float x : expected.out) ASSERT_TRUE(std::isfinite(x));
          for (const KernelSet* set : supported_sets())
            EXPECT_EQ(first_difference(problem.run(*set, one), expected), "")
                << set->name << ' ' << c.text();
        }
}

// FC-03, the bytes: what storing one token changes is the documented formula.
TEST(Quantised, ATokenTakesTheDocumentedBytes) {
  for (PageFormat format : kQuantised)
    for (int dim : {36, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256})
      for (const KernelSet* set : supported_sets()) {
        constexpr int kHeads = 3, kSlots = 4;
        const int64_t row = format == PageFormat::kQ8   ? dim
                            : format == PageFormat::kQ6 ? dim * 3 / 4
                                                        : dim / 2;
        ASSERT_EQ(row_bytes(format, dim), row);
        ASSERT_TRUE(has_scales(format));
        const std::vector<float> x = data(7, kHeads * dim);
        std::vector<int64_t> changed;
        int64_t scales_changed = 0;
        for (uint8_t fill : {0x00, 0xa5}) {  // a byte that equals one fill differs from the other
          const std::byte before{fill};
          std::vector<std::byte> bytes(kSlots * kHeads * row + 64, before);
          std::vector<float> scales(kSlots * kHeads, -1.0f);
          LayerPages pages;
          pages.keys = pages.values = {bytes.data(), scales.data(), format, dim};
          pages.num_kv_heads = kHeads;
          const int64_t slot = 2;
          ThreadPool one(1);
          ASSERT_TRUE(set->store({x.data(), x.data(), pages, &slot, 1}, one));
          for (size_t b = 0; b < bytes.size(); ++b)
            if (bytes[b] != before) changed.push_back(static_cast<int64_t>(b));
          scales_changed =
              std::count_if(scales.begin(), scales.end(), [](float s) { return s > 0; });
        }
        std::sort(changed.begin(), changed.end());
        changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
        EXPECT_EQ(static_cast<int64_t>(changed.size()), kHeads * row) << set->name << ' ' << dim;
        EXPECT_EQ(changed.front(), 2 * kHeads * row);
        EXPECT_EQ(scales_changed, kHeads);
      }
}

// FC-03, the results.
TEST(Quantised, AnyHeadDimAgreesWithDoublePrecision) {
  for (PageFormat format : kQuantised)
    for (int dim : {36, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256})
      for (int query_len : {1, 7}) {
        const AttentionCase c = quantised_case(format, format, dim, 50, query_len);
        AttentionProblem problem(c);
        const AttentionOutput oracle = problem.oracle();
        ThreadPool one(1);
        for (const KernelSet* set : supported_sets()) {
          const AttentionOutput output = problem.run(*set, one);
          for (size_t i = 0; i < oracle.out.size(); ++i)
            ASSERT_NEAR(output.out[i], oracle.out[i], 1e-4) << set->name << ' ' << c.text();
        }
      }
}

// Sequences that grow together, as a server runs them: their tokens are stored and attended in one call a step.
class Batch {
 public:
  Batch(PageFormat format, const std::vector<int>& contents, const std::vector<int>& final_lengths)
      : tokens_(memory(format, contents, final_lengths), 0xff), contents_(contents) {
    lengths_.resize(contents.size());
  }

  static constexpr int kQHeads = 40, kKvHeads = 10, kDim = 128;

  // Stores and attends `count` new tokens of each sequence: the output rows of each.
  std::vector<std::vector<float>> step(const KernelSet& set, const std::vector<int>& count) {
    std::vector<float> keys, values, queries;
    std::vector<int64_t> slots;
    std::vector<int32_t> query_start = {0};
    for (size_t s = 0; s < contents_.size(); ++s) {
      for (int i = 0; i < count[s]; ++i, ++lengths_[s]) {
        append(keys, contents_[s], 1, lengths_[s], kKvHeads);
        append(values, contents_[s], 2, lengths_[s], kKvHeads);
        append(queries, contents_[s], 3, lengths_[s], kQHeads);
        slots.push_back(tokens_.slot(static_cast<int>(s), lengths_[s]));
      }
      query_start.push_back(query_start.back() + count[s]);
    }
    ThreadPool pool(2);
    EXPECT_TRUE(set.store(
        {keys.data(), values.data(), tokens_.pages(), slots.data(), static_cast<int>(slots.size())},
        pool));
    AttentionArgs args;
    std::vector<float> out(queries.size());
    args.queries = queries.data();
    args.out = out.data();
    args.pages = tokens_.pages();
    args.num_q_heads = kQHeads;
    args.num_seqs = static_cast<int>(contents_.size());
    args.query_start = query_start.data();
    args.seq_lens = lengths_.data();
    args.block_table = tokens_.block_table().data();
    args.block_table_stride = tokens_.table_stride();
    args.scale = 1 / std::sqrt(float{kDim});
    AttentionPlan plan;
    plan.prepare(args, pool.num_workers());
    set.attend(args, plan.impl(), pool);
    std::vector<std::vector<float>> rows;
    for (size_t s = 0; s < contents_.size(); ++s)
      rows.emplace_back(out.begin() + int64_t{query_start[s]} * kQHeads * kDim,
                        out.begin() + int64_t{query_start[s + 1]} * kQHeads * kDim);
    return rows;
  }

  // What the pages hold of a sequence: bytes of K and V, then scales.
  std::vector<std::byte> stored(int sequence) {
    const LayerPages pages = tokens_.pages();
    std::vector<std::byte> all;
    for (const PageArray& array : {pages.keys, pages.values})
      for (int t = 0; t < lengths_[sequence]; ++t) {
        const int64_t bytes = kKvHeads * row_bytes(array.format, kDim),
                      slot = tokens_.slot(sequence, t);
        all.insert(all.end(), array.data + slot * bytes, array.data + (slot + 1) * bytes);
        if (!array.scales) continue;
        const auto* scales = reinterpret_cast<const std::byte*>(array.scales + slot * kKvHeads);
        all.insert(all.end(), scales, scales + kKvHeads * sizeof(float));
      }
    return all;
  }

 private:
  static AttentionCase memory(PageFormat format, const std::vector<int>& contents,
                              const std::vector<int>& final_lengths) {
    AttentionCase c;
    c.key_format = c.value_format = format;
    c.num_q_heads = kQHeads;
    c.num_kv_heads = kKvHeads;
    c.key_dim = c.value_dim = kDim;
    for (size_t s = 0; s < contents.size(); ++s) c.sequences.push_back({final_lengths[s], 0, 0});
    return c;
  }
  static void append(std::vector<float>& rows, int content, int kind, int token, int heads) {
    const std::vector<float> row = data(content * 1'000'003 + kind * 10'007 + token, heads * kDim);
    rows.insert(rows.end(), row.begin(), row.end());
  }

  PagedTokens tokens_;
  std::vector<int> contents_;
  std::vector<int32_t> lengths_;
};

// FC-04.
TEST(Quantised, ABatchChangesNeitherRowsNorPages) {
  for (PageFormat format : {PageFormat::kF32, PageFormat::kQ8, PageFormat::kQ6, PageFormat::kQ4})
    for (const KernelSet* set : supported_sets()) {
      const std::vector<int> contents = {1, 2, 3}, lengths = {5, 37, 128};
      const std::vector<int> final_lengths = {8, 40, 131};
      Batch together(format, contents, final_lengths);
      std::vector<Batch> alone;
      for (int s = 0; s < 3; ++s) alone.push_back(Batch(format, {contents[s]}, {final_lengths[s]}));
      for (int step = 0; step < 4; ++step) {
        const std::vector<int> count = step == 0 ? lengths : std::vector<int>{1, 1, 1};
        const std::vector<std::vector<float>> rows = together.step(*set, count);
        for (int s = 0; s < 3; ++s) {
          ASSERT_EQ(rows[s], alone[s].step(*set, {count[s]})[0])
              << set->name << ' ' << page_format_name(format) << ", step " << step << ", row " << s;
          ASSERT_EQ(together.stored(s), alone[s].stored(0)) << set->name << ", step " << step;
        }
      }
    }
}

// ---- FC-18: accuracy ------------------------------------------------------------------------------------------------

TEST(Quantised, RoundsWithinHalfAStepAndKeepsAttentionClose) {
  constexpr int kDim = 64, kTokens = 256;
  AttentionCase exact = quantised_case(PageFormat::kF32, PageFormat::kF32, kDim, kTokens, 1);
  exact.num_q_heads = exact.num_kv_heads = 1;
  for (auto [format, bound] :
       {std::pair{PageFormat::kQ8, 0.01}, {PageFormat::kQ6, 0.03}, {PageFormat::kQ4, 0.12}})
    for (int t = 0; t < 8; ++t) {
      AttentionCase quantised = exact;
      quantised.key_format = quantised.value_format = format;
      AttentionProblem a(exact), b(quantised);
      a.queries() = b.queries() = data(1000 + t, kDim);
      const std::vector<float> keys = data(2000 + t, kTokens * kDim),
                               values = data(3000 + t, kTokens * kDim);
      for (int i = 0; i < kTokens; ++i) {
        a.tokens().store(0, i, &keys[i * kDim], &values[i * kDim]);
        b.tokens().store(0, i, &keys[i * kDim], &values[i * kDim]);
        for (int e = 0; e < kDim; ++e) {
          const auto half_step = [&](const std::vector<float>& x) {
            float amax = 0;
            for (int j = 0; j < kDim; ++j) amax = std::max(amax, std::fabs(x[i * kDim + j]));
            return std::max(amax / largest_code(format), 1e-6f) / 2 * 1.001f;
          };
          ASSERT_LE(std::fabs(b.tokens().key(0, i, 0, e) - keys[i * kDim + e]), half_step(keys));
          ASSERT_LE(std::fabs(b.tokens().value(0, i, 0, e) - values[i * kDim + e]),
                    half_step(values));
        }
      }
      ThreadPool pool(1);
      for (const KernelSet* set : supported_sets())
        EXPECT_LE(relative_error(b.run(*set, pool).out, a.oracle().out), bound)
            << set->name << ' ' << page_format_name(format) << " t " << t;
    }
}

TEST(Quantised, KeepsZerosTinyAndLargeRowsAndRefusesInfinity) {
  for (PageFormat format : kQuantised)
    for (const KernelSet* set : supported_sets()) {
      constexpr int kDim = 64;
      std::vector<float> x(4 * kDim, 0.0f);
      for (int e = 0; e < kDim; ++e) {
        x[kDim + e] = 1e-30f;
        x[2 * kDim + e] = e % 2 ? 6e4f : -3e4f;
      }
      x[3 * kDim + 9] = INFINITY;
      std::vector<std::byte> bytes(4 * row_bytes(format, kDim) + 64, std::byte{0xa5});
      std::vector<float> scales(4, -1.0f), back(3 * kDim);
      LayerPages pages;
      pages.keys = pages.values = {bytes.data(), scales.data(), format, kDim};
      pages.num_kv_heads = 1;
      const int64_t slots[] = {0, 1, 2, 3};
      ThreadPool one(1);
      const StoreArgs all{x.data(), x.data(), pages, slots, 4},
          finite{x.data(), x.data(), pages, slots, 3};
      EXPECT_FALSE(storable(all));
      EXPECT_FALSE(set->store({&x[3 * kDim], &x[3 * kDim], pages, slots, 1}, one));
      for (std::byte b : bytes) ASSERT_EQ(b, std::byte{0xa5}) << "nothing is stored of an infinity";
      for (float s : scales) ASSERT_EQ(s, -1.0f);
      EXPECT_TRUE(storable(finite));
      ASSERT_TRUE(set->store(finite, one));
      set->fetch({pages, slots, 3, back.data(), nullptr}, one);
      for (int i = 0; i < 3 * kDim; ++i) {
        if (i < 2 * kDim)
          EXPECT_EQ(back[i], 0.0f) << set->name << ' ' << i;
        else
          EXPECT_LE(std::fabs(back[i] - x[i]), scales[2] / 2 * 1.001f) << set->name << ' ' << i;
      }
    }
}

}  // namespace
}  // namespace pagedkv::testing
