// Attention through tables whose window gives its pages back: the bits of the run that keeps them (FC-05).
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/pool_testing.h"
#include "pagedkv/core/batch_tables.h"
#include "pagedkv/kernels/attention.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv {
namespace {

constexpr int kNumQHeads = 4, kNumKvHeads = 2, kHeadDim = 64;
constexpr int kWindowGroup = 1, kWindowLayer = 1;  // group and layer 0 see all tokens

// DATA(state)[count] of the field cases.
std::vector<float> data(uint64_t state, int64_t count) {
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    out.push_back(static_cast<float>((z ^ (z >> 31)) >> 40) / 8388608.0f - 1.0f);
  }
  return out;
}

// Rows of tokens [first, first + count), token after token.
std::vector<float> rows(uint64_t state, int64_t first, int64_t count, int64_t heads) {
  std::vector<float> out;
  for (int64_t t = first; t < first + count; ++t) {
    const auto row = data(state + static_cast<uint64_t>(t), heads * kHeadDim);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}
std::vector<float> queries(int64_t first, int64_t count) {
  return rows(1000, first, count, kNumQHeads);
}
std::vector<float> keys(int64_t first, int64_t count) {
  return rows(2000, first, count, kNumKvHeads);
}
std::vector<float> values(int64_t first, int64_t count) {
  return rows(3000, first, count, kNumKvHeads);
}

struct Case {
  int page_size = 16, window = 32;
  PageFormat format = PageFormat::kF32;
};

PagePoolOptions pool_options(const Case& c) {
  PagePoolOptions o = testing::options(
      300, c.page_size, testing::group(1, testing::layer(kNumKvHeads, kHeadDim, c.format)));
  o.groups.push_back(o.groups[0]);
  o.groups[kWindowGroup].sliding_window = c.window;
  o.shuffle_seed = 5;
  return o;
}

// One sequence, step after step.
class SequenceRun {
 public:
  SequenceRun(const Case& c, const KernelSet& set, bool gives_back)
      : case_(c), set_(set), gives_back_(gives_back), pool_(pool_options(c)), table_(pool_) {}

  // What the next num_tokens see through the window.
  std::vector<float> step(int64_t num_tokens) {
    const int64_t first = table_.length();
    table_.append(num_tokens);
    for (int layer = 0; layer < 2; ++layer) store(layer, first, num_tokens);
    std::vector<float> out = attend(first, num_tokens);
    if (gives_back_) {
      table_.release_passed();
      spoil_free_pages();
    }
    return out;
  }

  const BlockTable& table() const { return table_; }
  PagePool& pool() { return pool_; }
  int64_t num_held() const {
    return static_cast<int64_t>(table_.pages(kWindowGroup).size()) -
           table_.num_passed(kWindowGroup);
  }

 private:
  void store(int layer, int64_t first, int64_t count) {
    const std::vector<float> k = keys(first, count), v = values(first, count);
    std::vector<int64_t> slots(static_cast<size_t>(count));
    table_.slot_mapping(layer, first, slots);
    const StoreArgs args{k.data(), v.data(), pool_.layer_pages(layer), slots.data(),
                         static_cast<int>(count)};
    ASSERT_TRUE(set_.store(args, executor_));
  }

  std::vector<float> attend(int64_t first, int64_t count) {
    const BlockTable* const one = &table_;
    const DenseTables tables = dense_tables({&one, 1}, kWindowGroup);
    const std::vector<float> q = queries(first, count);
    std::vector<float> out(q.size());
    const int32_t query_start[] = {0, static_cast<int32_t>(count)};
    AttentionArgs args;
    args.queries = q.data();
    args.out = out.data();
    args.pages = pool_.layer_pages(kWindowLayer);
    args.num_q_heads = kNumQHeads;
    args.num_seqs = 1;
    args.query_start = query_start;
    args.seq_lens = tables.seq_lens.data();
    args.block_table = tables.block_table.data();
    args.block_table_stride = tables.stride;
    args.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
    args.sliding_window = case_.window;
    plan_.prepare(args, 1);
    set_.attend(args, plan_.impl(), executor_);
    return out;
  }

  // Whoever reads them sees NaN.
  void spoil_free_pages() {
    const LayerPages pages = pool_.layer_pages(kWindowLayer);
    const int64_t tokens = pages.page_size * kNumKvHeads;
    const auto bytes = static_cast<int64_t>(row_bytes(case_.format, kHeadDim)) * tokens;
    for (PageId page = 0; page < pool_.committed(kWindowGroup); ++page)
      if (pool_.references(kWindowGroup, page) == 0)
        for (const PageArray& array : {pages.keys, pages.values}) {
          std::memset(array.data + page * bytes, 0xff, static_cast<size_t>(bytes));
          if (array.scales) std::fill_n(array.scales + page * tokens, tokens, NAN);
        }
  }

  Case case_;
  const KernelSet& set_;
  bool gives_back_;
  PagePool pool_;
  BlockTable table_;
  ThreadPool executor_{1};
  AttentionPlan plan_;
};

// Two-pass softmax in double over the rows themselves.
std::vector<double> oracle(int64_t first, int64_t count, int window) {
  const std::vector<float> q = queries(first, count), k = keys(0, first + count),
                           v = values(0, first + count);
  std::vector<double> out;
  for (int64_t p = first; p < first + count; ++p)
    for (int h = 0; h < kNumQHeads; ++h) {
      const int kv_head = h / (kNumQHeads / kNumKvHeads);
      const float* const query = q.data() + ((p - first) * kNumQHeads + h) * kHeadDim;
      const int64_t from = std::max<int64_t>(0, p + 1 - window);
      std::vector<double> scores;
      for (int64_t t = from; t <= p; ++t) {
        double dot = 0;
        for (int e = 0; e < kHeadDim; ++e)
          dot += double{query[e]} * k[(t * kNumKvHeads + kv_head) * kHeadDim + e];
        scores.push_back(dot / std::sqrt(static_cast<double>(kHeadDim)));
      }
      const double max = *std::ranges::max_element(scores);
      std::vector<double> row(kHeadDim);
      double sum = 0;
      for (size_t i = 0; i < scores.size(); ++i) {
        const double weight = std::exp(scores[i] - max);
        sum += weight;
        for (int e = 0; e < kHeadDim; ++e)
          row[e] +=
              weight * v[((from + static_cast<int64_t>(i)) * kNumKvHeads + kv_head) * kHeadDim + e];
      }
      for (double x : row) out.push_back(x / sum);
    }
  return out;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// A prompt of 100 tokens in chunks, then 100 decoded ones.
std::vector<int64_t> steps_of(int64_t chunk) {
  std::vector<int64_t> steps;
  for (int64_t left = 100; left > 0; left -= chunk) steps.push_back(std::min(left, chunk));
  steps.insert(steps.end(), 100, 1);
  return steps;
}

void expect_what_the_run_that_keeps_its_pages_gives(const Case& c, const KernelSet& set,
                                                    int64_t chunk) {
  SCOPED_TRACE(std::string(set.name) + " page_size " + std::to_string(c.page_size) + " window " +
               std::to_string(c.window) + ' ' + std::string(page_format_name(c.format)) +
               " chunk " + std::to_string(chunk));
  SequenceRun keeps(c, set, false), gives(c, set, true);
  for (const int64_t n : steps_of(chunk)) {
    const int64_t first = gives.table().length();
    const std::vector<float> want = keeps.step(n), got = gives.step(n);
    ASSERT_TRUE(same_bits(got, want)) << "tokens from " << first;
    if (c.format == PageFormat::kF32) {
      ASSERT_LE(relative_error(got, oracle(first, n, c.window)), 1e-5) << "tokens from " << first;
    }
    ASSERT_LE(gives.num_held(), most_pages_held(first + n, 1, c.page_size, c.window));
    ASSERT_EQ(gives.pool().stats().pages_held,
              gives.num_held() + static_cast<int64_t>(gives.table().pages(0).size()));
    ASSERT_NO_THROW(gives.pool().verify());
  }
  EXPECT_EQ(gives.table().length(), 200);
  EXPECT_EQ(gives.table().num_passed(0), 0);
}

TEST(Window, GivenBackPagesAreNeverRead) {
  for (const KernelSet& set : kernel_sets()) {
    if (!set.supported()) continue;
    int n = 0;
    for (const int page_size : {1, 3, 16, 32})
      for (const int window : {1, 15, 16, 17, 32, 33})
        for (const PageFormat format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kQ8}) {
          const int64_t chunks[] = {1, 7, 24, 100};
          expect_what_the_run_that_keeps_its_pages_gives({page_size, window, format}, set,
                                                         chunks[n++ % 4]);
          if (HasFailure()) return;
        }
  }
}

// FC-05: window 32, pages of 16, a prompt of 100 tokens and 100 more.
TEST(Window, HoldsAtMostFourPages) {
  SequenceRun run({}, kernels(), true);
  int64_t most = 0;
  for (const int64_t n : steps_of(16)) {
    run.step(n);
    most = std::max(most, run.num_held());
  }
  EXPECT_LE(most, 3);  // after a step; the next one may take a fourth
  EXPECT_EQ(most_pages_held(200, 1, 16, 32), 3);
  EXPECT_EQ(most_pages_held(200, 16, 16, 32), 4);
  EXPECT_LE(run.pool().stats().pages_peak, (200 + 15) / 16 + 4);
}

}  // namespace
}  // namespace pagedkv
