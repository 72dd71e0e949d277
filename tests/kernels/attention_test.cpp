// Every kernel set against the reference, bit for bit, over one table of cases; and what "one arithmetic" promises: the
// bits of a row do not depend on how it was reached. A failing case prints as a variable that repeats it:
//   PAGEDKV_CASE='keys=f16 …' kernels_test --gtest_filter=Attention.Case
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

void expect_sets_agree(const AttentionCase& c, int threads = 1) {
  AttentionProblem problem(c);
  ThreadPool pool(threads), alone(1);
  const AttentionOutput expected = problem.run(reference_set(), alone);
  for (const KernelSet* set : supported_sets()) {
    const std::string difference = first_difference(problem.run(*set, pool), expected);
    EXPECT_EQ(difference, "") << set->name << ", " << threads << " threads: PAGEDKV_CASE='"
                              << c.text() << "'";
  }
}

AttentionCase base_case(PageFormat format, int seq_len, int query_len) {
  AttentionCase c;
  c.key_format = c.value_format = format;
  c.num_q_heads = 6;
  c.num_kv_heads = 2;
  c.sequences = {{seq_len, query_len, 1}};
  return c;
}

TEST(Attention, Case) {
  const char* text = std::getenv("PAGEDKV_CASE");
  const AttentionCase c = text ? AttentionCase::parse(text) : base_case(PageFormat::kF16, 100, 4);
  for (int threads = 1; threads <= 3; ++threads) expect_sets_agree(c, threads);
}

TEST(Attention, CaseReadsBackWhatItPrints) {
  AttentionCase c = base_case(PageFormat::kQ8, 100, 4);
  c.window = 7;
  c.softcap = 2.5f;
  c.sinks = true;
  c.sequences.push_back({3, 1, 9});
  c.sequences.push_back({70, 1, 5, 48, 0});
  EXPECT_EQ(AttentionCase::parse(c.text()).text(), c.text());
  EXPECT_THROW(AttentionCase::parse("seqs=60:1:7,50:1:8:48:1"), std::invalid_argument);
  EXPECT_THROW(AttentionCase::parse("seqs=40:1:7,50:1:8:48:0"), std::invalid_argument);
}

// ---- sets against the reference -----------------------------------------------------------------------------------

TEST(Attention, SetsAgreeAtEveryLength) {
  int n = 0;
  for (int seq_len : {0, 1, 2, 15, 16, 17, 31, 32, 33, 100, 511, 512, 513, 1023, 1024, 1025, 1037})
    for (int query_len : {1, 2, 7, 70})
      if (query_len <= seq_len || (seq_len == 0 && query_len == 2))
        for (PageFormat format : formats_of_case(n++))
          expect_sets_agree(base_case(format, seq_len, query_len), 1 + seq_len % 2);
}

TEST(Attention, SetsAgreeForEveryHeadDim) {
  for (PageFormat format : kFormats)
    for (int dim :
         {1, 2, 8, 15, 16, 17, 36, 40, 48, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256, 300, 512})
      for (int query_len : {1, 5}) {
        if (!fits(format, dim)) continue;
        AttentionCase c = base_case(format, 50, query_len);
        c.key_dim = c.value_dim = dim;
        expect_sets_agree(c);
      }
}

TEST(Attention, SetsAgreeForDifferentKeysAndValues) {
  int n = 0;
  for (PageFormat keys : kFormats)
    for (PageFormat values : kFormats)
      for (auto [key_dim, value_dim] : {std::pair{64, 128}, {96, 48}, {40, 64}, {64, 20}})
        for (int query_len : {1, 9}) {
          if (rounds(1) < 10 && n++ % 3 != 0) continue;
          AttentionCase c = base_case(keys, 530, query_len);
          c.value_format = values;
          c.key_dim = key_dim;
          c.value_dim = value_dim;
          expect_sets_agree(c);
        }
}

TEST(Attention, SetsAgreeForEveryGroup) {  // FC-02's shapes among them
  int n = 0;
  for (auto [q_heads, kv_heads] :
       {std::pair{1, 1}, {9, 3}, {20, 4}, {24, 4}, {28, 4}, {16, 1}, {71, 1}, {8, 1}, {6, 3}})
    for (int query_len : {1, 7})
      for (PageFormat format : formats_of_case(n++)) {
        AttentionCase c = base_case(format, 100, query_len);
        c.num_q_heads = q_heads;
        c.num_kv_heads = kv_heads;
        expect_sets_agree(c);
      }
}

TEST(Attention, SetsAgreeForEveryPageSize) {
  int n = 0;
  for (int page_size : {1, 2, 3, 5, 8, 16, 24, 32, 64, 100, 256})
    for (int seq_len : {page_size - 1, page_size, page_size + 1, 600})
      for (int query_len : {1, 3})
        for (PageFormat format : formats_of_case(n++)) {
          AttentionCase c = base_case(format, seq_len, query_len);
          c.page_size = page_size;
          if (query_len <= seq_len) expect_sets_agree(c, 2);
        }
}

TEST(Attention, SetsAgreeOnWindowsCapsSinksMasksAndBiases) {
  int n = 0;
  for (int page_size : {3, 16})
    for (int query_len : {1, 6, 50})
      for (int window : {0, 1, 33, 600})
        for (int extras = 0; extras < 16; ++extras) {
          if (query_len == 50 && extras != 0 && extras != 15) continue;  // the reference is slow
          for (PageFormat format : formats_of_case(n++)) {
            AttentionCase c = base_case(format, 577, query_len);
            c.page_size = page_size;
            c.window = window;
            c.softcap = extras & 1 ? 1.5f : 0;
            c.sinks = extras & 2;
            c.mask = extras & 4;
            c.bias = extras & 8;
            c.causal = window % 2 == 0 && extras != 5;
            expect_sets_agree(c, 2);
          }
        }
}

TEST(Attention, SetsAgreeOnRandomCases) {
  uint64_t state = 77;
  auto draw = [&](int n) { return static_cast<int>(splitmix64(state) % n); };
  for (int round = 0; round < rounds(100); ++round) {
    AttentionCase c;
    c.key_format = kFormats[draw(std::size(kFormats))];
    c.value_format = kFormats[draw(std::size(kFormats))];
    c.num_kv_heads = 1 + draw(4);
    c.num_q_heads = c.num_kv_heads * (1 + draw(10));
    c.key_dim = draw(3) ? 16 * (1 + draw(10)) : 1 + draw(160);
    c.value_dim = draw(3) ? 16 * (1 + draw(10)) : 1 + draw(160);
    if (!fits(c.key_format, c.key_dim)) c.key_dim = (c.key_dim + 3) / 4 * 4;
    if (!fits(c.value_format, c.value_dim)) c.value_dim = (c.value_dim + 3) / 4 * 4;
    c.page_size = draw(2) ? 16 : 1 + draw(256);
    c.causal = draw(4) != 0;
    c.window = draw(3) ? 0 : 1 + draw(700);
    c.softcap = draw(4) ? 0 : 0.5f + draw(20);
    c.sinks = draw(4) == 0;
    c.mask = draw(4) == 0;
    c.bias = draw(4) == 0;
    c.query_amplitude = draw(4) ? 1 : 30;
    const bool sharing = draw(5) == 0;
    for (int s = 0, n = sharing ? 3 + draw(4) : draw(6); s <= n; ++s) {
      const int seq_len = sharing ? 500 + draw(700) : draw(4) ? draw(200) : draw(1600);
      const int query_len = draw(sharing ? 5 : 2) ? 1 : draw(40);
      Sequence sequence{seq_len, std::min(query_len, std::max(seq_len, 1)), splitmix64(state)};
      if (sharing && s > 0) {
        sequence.with = draw(s);
        sequence.shared =
            std::min(draw(1200), std::min(seq_len, c.sequences[sequence.with].seq_len));
      }
      c.sequences.push_back(sequence);
    }
    expect_sets_agree(c, 1 + draw(3));
  }
}

// Small cases in great number: all pairs of page formats, lengths around the edges of pages, tiles and partitions.
class Draw {
 public:
  int operator()(int n) { return static_cast<int>(splitmix64(state_) % static_cast<uint64_t>(n)); }
  uint64_t content() { return splitmix64(state_); }

 private:
  uint64_t state_ = 2026;
};

int edge_length(Draw& draw, int page_size) {
  const int near = draw(5) - 2;
  switch (draw(6)) {
    case 0:
      return draw(20);
    case 1:
      return page_size * (1 + draw(4)) + near;
    case 2:
      return 16 * (1 + draw(12)) + near;
    case 3:
    case 4:
      return 512 + near;
    default:
      return draw(3) ? 512 + 16 * draw(4) + near : 1024 + near;
  }
}

AttentionCase small_case(Draw& draw, int number) {
  constexpr int kNumFormats = std::size(kFormats);
  constexpr int kDims[] = {16, 32, 48, 64, 64, 80, 96, 128, 128, 20, 36, 100};
  AttentionCase c;
  c.key_format = kFormats[number % kNumFormats];
  c.value_format = draw(3) ? c.key_format : kFormats[number / kNumFormats % kNumFormats];
  c.num_kv_heads = 1 + draw(3);
  c.num_q_heads = c.num_kv_heads * (1 + draw(draw(4) ? 4 : 14));
  c.key_dim = kDims[draw(std::size(kDims))];
  c.value_dim = draw(4) ? c.key_dim : kDims[draw(std::size(kDims))];
  constexpr int kPageSizes[] = {16, 16, 16, 1, 5, 8, 32, 48, 256};
  c.page_size = kPageSizes[draw(std::size(kPageSizes))];
  c.causal = draw(5) != 0;
  c.window = draw(3) ? 0 : 1 + draw(600);
  c.softcap = draw(4) ? 0 : 0.5f + static_cast<float>(draw(20));
  c.sinks = draw(4) == 0;
  c.mask = draw(4) == 0;
  c.bias = draw(5) == 0;
  c.query_amplitude = draw(6) ? 1 : 30;
  for (int s = draw(8) ? 1 : 3; s > 0; --s) {
    const int length = std::max(0, edge_length(draw, c.page_size));
    const int rows = draw(2) ? 1 : 1 + draw(draw(8) ? 6 : 24);
    c.sequences.push_back({length, std::min(rows, std::max(length, 1)), draw.content()});
  }
  return c;
}

TEST(Attention, SetsAgreeOnManySmallCases) {
  Draw draw;
  const int count = rounds(2400);
  for (int number = 0; number < count; ++number)
    expect_sets_agree(small_case(draw, number), number % 4 ? 1 : 3);
  std::string sets;
  for (const KernelSet* set : supported_sets()) sets.append(" ").append(set->name);
  std::printf("[ COUNT    ] %d attention cases have the same bits on:%s\n", count, sets.c_str());
}

// ---- sequences that share pages --------------------------------------------------------------------------------------

// Words for `seqs=`.
constexpr const char* kSharing[] = {
    // The common pages end inside the third partition, inside a page, where a sequence ends.
    "1300:1:1,1280:1:2:1200:0,1290:1:3:1100:0,1100:1:4:1100:0,1310:1:5:1030:0",
    // A tree, its members not adjacent: seven have one partition in common, five of them two, the others as well.
    "1090:1:1,1100:1:2:530:0,700:1:9,1110:1:3:1024:0,"
    "1120:1:4:1060:0,1130:1:5:1050:1,1080:1:6:1040:0,1090:1:7:1030:0",
    // Whole sequences, to the token and to the partition, and one that goes on.
    "1024:1:1,1024:1:2:1024:0,1024:1:3:1024:0,1025:1:4:1024:0,1024:1:5:1024:0",
    // Prefills of the same pages and of others, nothing, and less than a partition.
    "1100:1:1,650:20:2:620:0,1100:1:3:1100:0,0:1:4,1060:1:5:1050:2,"
    "600:3:6:590:0,1099:1:7:1095:0,1098:1:8:1096:0,300:1:9:300:0",
};

// What a row sees: nothing but the rule of causality, or a window and more.
void add_rules(int n, AttentionCase* c) {
  c->window = n % 3 == 1 ? 600 : n % 6 == 2 ? 2000 : 0;  // 600 begins inside what is shared
  c->sinks = n % 4 == 1;
  c->mask = n % 4 >= 2;
  c->bias = n % 5 == 3;
  c->softcap = n % 5 == 4 ? 2.0f : 0;
  c->causal = n % 7 != 6;
}

TEST(Attention, SetsAgreeOnSharedPages) {
  int n = 0;
  for (PageFormat format : kFormats)
    for (int group : {1, 3, 4, 7})
      for (int dim : {64, 80, 128}) {
        AttentionCase c =
            AttentionCase::parse(std::string("seqs=") + kSharing[n % std::size(kSharing)]);
        c.key_format = c.value_format = format;
        c.num_kv_heads = group == 1 ? 2 : 1;
        c.num_q_heads = group * c.num_kv_heads;
        c.key_dim = c.value_dim = dim;
        c.page_size = n / 3 % 3 == 0 ? 16 : n / 3 % 3 == 1 ? 48 : 1;
        add_rules(n / 2, &c);
        const int threads[] = {1, 2, 5};
        expect_sets_agree(c, threads[n++ / 4 % 3]);
      }
}

TEST(Attention, SharedPagesWorkOnAnyNumberOfThreads) {
  for (const char* sequences : kSharing)
    for (int window : {0, 600}) {
      AttentionCase c =
          AttentionCase::parse(std::string("keys=q8 values=q4 heads=9/3 seqs=") + sequences);
      c.window = window;
      c.sinks = true;
      AttentionProblem problem(c);
      ThreadPool alone(1);
      const AttentionOutput expected = problem.run(reference_set(), alone);
      for (int threads : {1, 2, 3, 5, 8, 40}) {
        ThreadPool pool(threads);
        for (const KernelSet* set : supported_sets()) {
          if (set == &reference_set()) continue;
          EXPECT_EQ(first_difference(problem.run(*set, pool), expected), "")
              << set->name << ", " << threads << " threads: " << c.text();
        }
      }
    }
}

// Windows of one length begin in one page or in different ones, and pages before them are gone from some tables only.
TEST(Attention, SetsAgreeOnSharedPagesThatLeaveAWindow) {
  int n = 0;
  for (int page_size : {1, 16, 40, 48})
    for (int window : {1, 500, 512, 530, 700, 1100})
      for (PageFormat format : formats_of_case(n++)) {
        AttentionCase c = base_case(format, 1600, 1);
        c.page_size = page_size;
        c.window = window;
        c.mask = n % 2;
        for (int lead : {0, 0, 1, 2, 3, 3, 17, 60, 200})
          c.sequences.push_back({1600 - lead, 1, c.sequences.size() + 2, 1590 - lead, 0});
        expect_sets_agree(c, 1 + n % 3);
      }
}

TEST(Attention, ANaNSpoilsOnlyTheRowsThatSeeIt) {
  for (PageFormat format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16})
    for (const KernelSet* set : supported_sets()) {
      const AttentionCase c = base_case(format, 600, 40);
      AttentionProblem clean(c), spoilt(c);
      const std::vector<float> nan(static_cast<size_t>(c.num_kv_heads) * c.key_dim, NAN);
      spoilt.tokens().store(0, 590, nan.data(), nan.data());  // row 30 is the first to see it
      ThreadPool pool(2);
      const AttentionOutput a = clean.run(*set, pool), b = spoilt.run(*set, pool);
      const size_t row = static_cast<size_t>(c.num_q_heads) * c.value_dim;
      EXPECT_EQ(std::memcmp(a.out.data(), b.out.data(), 30 * row * sizeof(float)), 0) << set->name;
      for (size_t i = 30 * row; i < b.out.size(); ++i)
        ASSERT_TRUE(std::isnan(b.out[i])) << set->name << ' ' << i;
    }
}

// ---- one arithmetic -----------------------------------------------------------------------------------------------

// Output row `row` of a run, all heads.
std::vector<float> output_row(const AttentionOutput& output, const AttentionCase& c, int row) {
  const auto first = output.out.begin() + int64_t{row} * c.num_q_heads * c.value_dim;
  return {first, first + int64_t{c.num_q_heads} * c.value_dim};
}

// Rows of one sequence's last 90 tokens, prefilled in one call with 16-token pages.
class HowARowIsReached : public ::testing::TestWithParam<PageFormat> {
 protected:
  static constexpr int kLen = 1100, kRows = 90;
  HowARowIsReached() : whole_(base_case(GetParam(), kLen, kRows)) {
    whole_.bias = GetParam() == PageFormat::kBF16 || GetParam() == PageFormat::kQ6;
  }
  AttentionCase whole_;
};

TEST_P(HowARowIsReached, MakesNoDifference) {
  ThreadPool one(1), three(3);
  for (const KernelSet* set : supported_sets()) {
    const AttentionOutput all = AttentionProblem(whole_).run(*set, one);
    for (int chunk : {1, 7, 16, 64})
      for (int page_size : {1, 16, 64})
        for (int end : {kRows - 57, kRows - 1, kRows}) {
          AttentionCase part = whole_;
          part.page_size = page_size;
          part.sequences = {{kLen - kRows + end, std::min(chunk, end), 1}};
          const AttentionOutput rows = AttentionProblem(part).run(*set, chunk % 2 ? three : one);
          for (int i = 0; i < part.sequences[0].query_len; ++i)
            ASSERT_EQ(output_row(rows, part, i),
                      output_row(all, whole_, end - part.sequences[0].query_len + i))
                << set->name << ", chunk " << chunk << ", page size " << page_size << ", row " << i;
        }
  }
}

TEST_P(HowARowIsReached, NorDoesTheRestOfTheBatch) {
  ThreadPool one(1), two(2);
  AttentionCase batch = whole_;
  batch.sequences = {{5, 1, 2},   {0, 1, 3},    {kLen, kRows, 1}, {37, 37, 4},
                     {128, 0, 5}, {kLen, 1, 1}, {700, 3, 6}};
  for (const KernelSet* set : supported_sets()) {
    const AttentionOutput together = AttentionProblem(batch).run(*set, two);
    int first = 0;
    for (const Sequence& sequence : batch.sequences) {
      AttentionCase alone = whole_;
      alone.sequences = {sequence};
      const AttentionOutput output = AttentionProblem(alone).run(*set, one);
      for (int i = 0; i < sequence.query_len; ++i)
        ASSERT_EQ(output_row(together, batch, first + i), output_row(output, alone, i))
            << set->name << ' ' << first;
      first += sequence.query_len;
    }
  }
}

std::string format_name(const ::testing::TestParamInfo<PageFormat>& info) {
  return std::string(page_format_name(info.param));
}
INSTANTIATE_TEST_SUITE_P(Attention, HowARowIsReached, ::testing::ValuesIn(kFormats), format_name);

// ---- threads --------------------------------------------------------------------------------------------------

TEST(Attention, ThreadsAndHeadSplitsChangeNothing) {
  int n = 0;
  for (int query_len : {1, 4})
    for (int threads : {2, 3, 40})  // 40: more than there are partitions
      for (PageFormat format : formats_of_case(n++)) {
        AttentionCase c = base_case(format, 3000, query_len);
        c.num_q_heads = 12;
        c.num_kv_heads = 4;
        expect_sets_agree(c, threads);
      }
}

// As a graph runtime's worker: all enter the kernel together and draw from one counter.
class SharedCounter final : public Executor {
 public:
  SharedCounter(std::atomic<int64_t>* next, int worker, int workers)
      : next_(next), worker_(worker), workers_(workers) {}
  int num_workers() const noexcept override { return workers_; }
  void run(int64_t num_items, FunctionRef<void(int64_t, int)> fn) override {
    for (int64_t i; (i = next_->fetch_add(1)) < num_items;) fn(i, worker_);
  }

 private:
  std::atomic<int64_t>* next_;
  int worker_, workers_;
};

TEST(Attention, WorkersMayEnterTogetherAndReuseAPlanForEachLayer) {
  constexpr int kWorkers = 3, kLayers = 5;
  AttentionCase c = base_case(PageFormat::kF16, 2100, 1);
  c.sequences.push_back({900, 20, 2});
  for (uint64_t content : {3, 4, 5, 6}) c.sequences.push_back({1900, 1, content, 1800, 0});
  AttentionProblem problem(c);
  ThreadPool one(1);
  const AttentionOutput expected = problem.run(reference_set(), one);
  for (const KernelSet* set : supported_sets()) {
    AttentionArgs args = problem.args();
    AttentionPlan plan;
    plan.prepare(args, kWorkers);
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> out(expected.out.size(), NAN);
      args.out = out.data();
      std::atomic<int64_t> next{0};
      std::vector<std::thread> threads;
      for (int w = 0; w < kWorkers; ++w)
        threads.emplace_back([&, w] {
          SharedCounter executor(&next, w, kWorkers);
          set->attend(args, plan.impl(), executor);
        });
      for (auto& t : threads) t.join();
      ASSERT_EQ(out, expected.out) << set->name << ", layer " << layer;
    }
  }
}

// ---- against double precision ---------------------------------------------------------------------------------------

TEST(Attention, AgreesWithDoublePrecision) {
  for (int extras = 0; extras < 32; ++extras)
    for (PageFormat format : formats_of_case(extras)) {
      AttentionCase c = base_case(format, 700, 12);
      c.window = extras & 1 ? 130 : 0;
      c.softcap = extras & 2 ? 3.0f : 0;
      c.sinks = extras & 4;
      c.mask = extras & 8;
      c.bias = extras & 16;
      c.query_amplitude = 4;
      AttentionProblem problem(c);
      ThreadPool pool(1);
      const AttentionOutput output = problem.run(reference_set(), pool), oracle = problem.oracle();
      EXPECT_LT(relative_error(output.out, oracle.out), 1e-5) << c.text();
      for (size_t i = 0; i < oracle.log_sum_exp.size(); ++i)
        if (std::isinf(oracle.log_sum_exp[i]))
          ASSERT_EQ(output.log_sum_exp[i], oracle.log_sum_exp[i]) << c.text();
        else
          ASSERT_NEAR(output.log_sum_exp[i], oracle.log_sum_exp[i], 2e-5) << c.text();
    }
}

// FC-01: what unwritten slots hold must not matter.
TEST(Attention, UnwrittenSlotsDoNotMatter) {
  for (PageFormat format : kFormats)
    for (const KernelSet* set : supported_sets())
      for (int seq_len : {1, 5, 13, 16, 17})
        for (int query_len : {1, 4}) {
          if (query_len > seq_len) continue;
          const AttentionCase c = base_case(format, seq_len, query_len);
          AttentionProblem ones(c, 0xff), zeros(c, 0x00);
          ThreadPool pool(1);
          const AttentionOutput a = ones.run(*set, pool), b = zeros.run(*set, pool);
          EXPECT_EQ(first_difference(a, b), "") << set->name << ' ' << c.text();
          for (float x : a.out) ASSERT_TRUE(std::isfinite(x)) << set->name << ' ' << c.text();
          EXPECT_LT(relative_error(a.out, ones.oracle().out), 1e-5) << set->name << ' ' << c.text();
        }
}

// FC-02: any number of query heads for a kv head.
TEST(Attention, AnyGroupAgreesWithDoublePrecision) {
  for (PageFormat format : kFormats)
    for (const KernelSet* set : supported_sets())
      for (auto [q_heads, kv_heads] :
           {std::pair{1, 1}, {9, 3}, {20, 4}, {24, 4}, {28, 4}, {16, 1}, {71, 1}})
        for (int query_len : {1, 7}) {
          AttentionCase c = base_case(format, 100, query_len);
          c.num_q_heads = q_heads;
          c.num_kv_heads = kv_heads;
          AttentionProblem problem(c);
          ThreadPool pool(1);
          EXPECT_LT(relative_error(problem.run(*set, pool).out, problem.oracle().out), 1e-5)
              << set->name << ' ' << c.text();
        }
}

}  // namespace
}  // namespace pagedkv::testing
