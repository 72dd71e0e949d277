// What a plan promises: clear refusals, enough work for all workers, and kernel calls of exactly one run() without allocation.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <new>

#include "kernels/attention_case.h"
#include "kernels/attention_plan.h"

namespace {
std::atomic<int64_t> g_allocations{0};
}

// Counts every allocation of this program. GCC 12 sees free() in an inlined delete and not that new is ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void* operator new(size_t size) {
  ++g_allocations;
  if (void* p = std::malloc(size ? size : 1)) return p;
  throw std::bad_alloc();
}
void* operator new(size_t size, std::align_val_t alignment) {
  ++g_allocations;
  if (void* p =
          std::aligned_alloc(static_cast<size_t>(alignment),
                             (size + static_cast<size_t>(alignment) - 1) /
                                 static_cast<size_t>(alignment) * static_cast<size_t>(alignment)))
    return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace pagedkv::testing {
namespace {

AttentionCase small_case() {
  AttentionCase c;
  c.num_q_heads = 9;
  c.num_kv_heads = 3;
  c.sequences = {{40, 3, 1}};
  return c;
}

void expect_refused(const std::function<void(AttentionArgs&)>& spoil, const std::string& word) {
  AttentionProblem problem(small_case());
  AttentionArgs args = problem.args();
  spoil(args);
  AttentionPlan plan;
  try {
    plan.prepare(args, 1);
    ADD_FAILURE() << "accepted, though it should name " << word;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(AttentionPlan, RefusesWhatDoesNotFitNamingIt) {
  static const int32_t falls[] = {0, -1}, starts_late[] = {1, 3}, too_many[] = {0, 41},
                       negative[] = {-1};
  expect_refused([](auto& a) { a.pages.keys.head_dim = 0; }, "head_dim 0");
  expect_refused([](auto& a) { a.pages.values.head_dim = 513; }, "head_dim 513");
  expect_refused([](auto& a) { a.pages.page_size = 257; }, "page_size 257");
  expect_refused([](auto& a) { a.pages.num_kv_heads = 0; }, "num_kv_heads 0");
  expect_refused([](auto& a) { a.num_q_heads = 10; }, "num_q_heads 10");
  expect_refused([](auto& a) { a.scale = NAN; }, "scale");
  expect_refused([](auto& a) { a.logit_softcap = -1; }, "logit_softcap -1");
  expect_refused([](auto& a) { a.sliding_window = -5; }, "sliding_window -5");
  expect_refused([](auto& a) { a.num_seqs = -1; }, "num_seqs -1");
  expect_refused([](auto& a) { a.query_start = nullptr; }, "query_start");
  expect_refused([](auto& a) { a.query_start = falls; }, "query_start");
  expect_refused([](auto& a) { a.query_start = starts_late; }, "query_start[0] is 1");
  expect_refused([](auto& a) { a.query_start = too_many; }, "41 query rows");
  expect_refused([](auto& a) { a.seq_lens = negative; }, "seq_lens[0] is -1");
  expect_refused([](auto& a) { a.seq_lens = nullptr; }, "seq_lens");
  expect_refused([](auto& a) { a.block_table = nullptr; }, "block_table");
  expect_refused([](auto& a) { a.block_table_stride = 2; }, "block_table_stride 2");
  expect_refused(
      [](auto& a) {
        static const uint8_t mask[3] = {};
        a.mask = mask;
        a.mask_stride = 39;
      },
      "mask_stride 39");
  expect_refused(
      [](auto& a) {
        static const float bias[3] = {};
        a.bias = bias;
        a.bias_stride = 39;
      },
      "bias_stride 39");
}

TEST(AttentionPlan, RefusesNoWorkers) {
  AttentionProblem problem(small_case());
  AttentionPlan plan;
  EXPECT_THROW(plan.prepare(problem.args(), 0), std::invalid_argument);
}

TEST(AttentionPlan, AnEmptyStepIsNoWork) {
  AttentionCase c = small_case();
  c.sequences.clear();
  AttentionProblem problem(c);
  AttentionPlan plan;
  plan.prepare(problem.args(), 2);
  EXPECT_EQ(plan.num_items(), 0);
  ThreadPool pool(2);
  for (const KernelSet* set : supported_sets()) EXPECT_TRUE(problem.run(*set, pool).out.empty());
}

TEST(AttentionPlan, GivesEveryWorkerWork) {
  for (int query_len : {1, 3, 7, 16, 64})
    for (int workers : {2, 4, 8}) {
      AttentionCase c = small_case();
      c.sequences = {{8192, query_len, 1}};
      AttentionProblem problem(c);
      AttentionPlan plan;
      plan.prepare(problem.args(), workers);
      EXPECT_GE(plan.num_items(), 2 * workers) << query_len << " rows, " << workers << " workers";
    }
}

// ---- sequences that share pages --------------------------------------------------------------------------------------

// n sequences of `own` tokens behind `shared` common ones.
AttentionCase sharing_case(int n, int shared, int own) {
  AttentionCase c;
  c.num_q_heads = 32;
  c.num_kv_heads = 8;
  c.key_dim = c.value_dim = 16;
  for (int s = 0; s < n; ++s)
    c.sequences.push_back({shared + own, 1, uint64_t(s + 1), s ? shared : 0, 0});
  return c;
}

// How often the items of a plan go through a partition for one kv head: the work of reading it. By (sequence whose table is
// read, partition, head); and the same for each sequence that gets a state.
struct Reads {
  std::map<std::array<int, 3>, int> passes, states;

  explicit Reads(const AttentionPlan::Impl& plan) {
    for (const WorkItem& item : plan.items) {
      const Job& job = plan.jobs[item.job];
      for (int p = 0; p < item.num_partitions; ++p)
        for (int h = 0; h < job.num_heads; ++h) {
          const int partition = item.first_partition + p, head = job.first_head + h;
          ++passes[{job.sequence, partition, head}];
          for (int q = 0; q < (job.is_shared() ? job.num_queries : 1); ++q)
            ++states[{job.is_shared() ? plan.shared.members()[job.first_member + q] : job.sequence,
                      partition, head}];
        }
    }
  }

  int64_t count() const {
    int64_t sum = 0;
    for (const auto& [what, times] : passes) sum += times;
    return sum;
  }
};

TEST(AttentionPlan, ReadsSharedPagesOnce) {
  const AttentionCase c = sharing_case(16, 4096, 128);
  AttentionProblem problem(c);
  for (int workers = 1; workers <= 8; ++workers) {
    AttentionPlan plan;
    plan.prepare(problem.args(), workers);
    const Reads reads(plan.impl());
    int shared_passes = 0;
    for (const auto& [what, times] : reads.passes) {
      EXPECT_EQ(times, 1);
      shared_passes += what[1] < 8;
    }
    EXPECT_EQ(shared_passes, 8 * 8) << "eight partitions, eight heads";
    EXPECT_EQ(reads.count(), 8 * 8 + 16 * 8);
    EXPECT_EQ(reads.states.size(), 16u * 9 * 8);
    for (const auto& [what, times] : reads.states) EXPECT_EQ(times, 1);
    // One worker: an item for each head's shared pages and for each sequence's own.
    EXPECT_TRUE(workers > 1 || plan.num_items() == 8 + 16) << plan.num_items();
    EXPECT_GE(plan.num_items(), 2 * workers);
  }
}

TEST(AttentionPlan, ReadsPagesOnceAtEveryLevelOfATree) {
  AttentionCase c = sharing_case(12, 2 * 512, 4 * 512);
  for (int s : {2, 5, 7, 11}) c.sequences[s].shared = 2 * 512, c.sequences[s].with = 0;
  for (int s : {5, 7, 11}) c.sequences[s].shared = 4 * 512 + 20, c.sequences[s].with = 2;
  for (int s : {4, 6, 8}) c.sequences[s].shared = 3 * 512, c.sequences[s].with = 3;
  AttentionProblem problem(c);
  AttentionPlan plan;
  plan.prepare(problem.args(), 1);
  std::map<std::array<int, 3>, int> runs;  // (members, first partition, partitions)
  for (const SharedPartitions::Run& run : plan.impl().shared.runs())
    ++runs[{run.num_members, run.first_partition, run.num_partitions}];
  const std::map<std::array<int, 3>, int> expected = {
      {{12, 0, 2}, 1}, {{4, 2, 2}, 1}, {{4, 2, 1}, 1}};
  EXPECT_EQ(runs, expected);
  const Reads reads(plan.impl());
  EXPECT_EQ(reads.states.size(), 12u * 6 * 8);
  for (const auto& [what, times] : reads.states) EXPECT_EQ(times, 1);
  EXPECT_EQ(reads.count(), 8 * (2 + 2 + 1 + 4 * 2 + 4 * 3 + 4 * 4));
}

TEST(AttentionPlan, SharesOnlyWhatHasTheSamePages) {
  const auto reads = [](const AttentionCase& c) {
    AttentionProblem problem(c);
    AttentionPlan plan;
    plan.prepare(problem.args(), 2);
    return Reads(plan.impl()).count();
  };
  AttentionCase c = sharing_case(8, 1024, 100);
  EXPECT_EQ(reads(c), 8 * (2 + 8));
  c.window = 600;  // from token 524: inside the second partition
  EXPECT_EQ(reads(c), 8 * (1 + 8));
  c.sequences[0].seq_len += 16;  // its window begins a page later
  EXPECT_EQ(reads(c), 8 * (1 + 8 + 1));
  c = sharing_case(8, 1023, 100);  // the second partition's last page is each one's own
  EXPECT_EQ(reads(c), 8 * (1 + 8 * 2));
  c = sharing_case(8, 1024, 100);
  for (Sequence& s : c.sequences)
    s.shared = 0, s.content = 1;  // equal tokens in pages of their own
  EXPECT_EQ(reads(c), 8 * 8 * 3);
  c = sharing_case(8, 1024, 100);
  for (Sequence& s : c.sequences) s.query_len = 2;
  EXPECT_EQ(reads(c), 8 * 8 * 3);
  EXPECT_EQ(reads(sharing_case(3, 1024, 100)), 8 * 3 * 3) << "too few to gain";
  EXPECT_EQ(reads(sharing_case(4, 1024, 100)), 8 * (2 + 4));
  c = sharing_case(2, 1024, 100);
  c.key_dim = c.value_dim = 20;  // tiles anyhow
  EXPECT_EQ(reads(c), 8 * (2 + 2));
}

TEST(AttentionPlan, SequencesThatShareAllTheirPagesHaveNoWorkOfTheirOwn) {
  AttentionCase c = sharing_case(5, 1024, 0);
  AttentionProblem problem(c);
  AttentionPlan plan;
  plan.prepare(problem.args(), 1);
  EXPECT_EQ(plan.num_items(), 8);
  const Reads reads(plan.impl());
  EXPECT_EQ(reads.states.size(), 5u * 2 * 8);
}

// More rows than a tile job takes are cut evenly, and every state comes from one item whatever is drawn.
TEST(AttentionPlan, EveryStateComesFromOneItem) {
  uint64_t state = 5;
  auto draw = [&](int n) { return static_cast<int>(splitmix64(state) % n); };
  for (int round = 0; round < rounds(40); ++round) {
    AttentionCase c;
    c.num_kv_heads = 1 + draw(4);
    c.num_q_heads = c.num_kv_heads * (1 + draw(10));
    c.key_dim = c.value_dim = 16;
    c.page_size = draw(2) ? 16 : 1 + draw(100);
    c.window = draw(3) ? 0 : 1 + draw(1500);
    for (int s = 0, n = 2 + draw(40); s < n; ++s) {
      Sequence sequence{1 + draw(2500), 1, uint64_t(s)};
      if (s > 0) {
        sequence.with = draw(4) ? 0 : draw(s);
        sequence.shared = std::min(
            {draw(4) ? 1100 : draw(2000), sequence.seq_len, c.sequences[sequence.with].seq_len});
      }
      c.sequences.push_back(sequence);
    }
    AttentionProblem problem(c);
    const AttentionArgs args = problem.args();
    AttentionPlan plan;
    plan.prepare(args, 1 + draw(8));
    const Reads reads(plan.impl());
    size_t expected = 0;
    for (const Sequence& s : c.sequences) {
      const int first = c.window ? std::max(0, s.seq_len - c.window) / 512 : 0;
      expected += ((s.seq_len + 511) / 512 - first) * c.num_kv_heads;
    }
    EXPECT_EQ(reads.states.size(), expected) << c.text();
    for (const auto& [what, times] : reads.states) ASSERT_EQ(times, 1) << c.text();
  }
}

// Counts the runs of a call and sees to it that they allocate nothing.
class Watching final : public Executor {
 public:
  int num_workers() const noexcept override { return 2; }
  void run(int64_t num_items, FunctionRef<void(int64_t, int)> fn) override {
    ++runs;
    for (int64_t i = 0; i < num_items; ++i) fn(i, static_cast<int>(i % 2));
  }
  int runs = 0;
};

TEST(AttentionPlan, ACallIsOneRunAndAllocatesNothing) {
  AttentionCase c = small_case();
  c.sequences = {{3000, 1, 1}, {700, 60, 2}, {0, 1, 3}};
  for (uint64_t content : {4, 5, 6, 7}) c.sequences.push_back({2600, 1, content, 2500, 0});
  c.key_format = PageFormat::kQ8;
  c.sinks = c.mask = true;
  AttentionProblem problem(c);
  for (const KernelSet* set : supported_sets()) {
    AttentionArgs args = problem.args();
    std::vector<float> out(int64_t{c.num_tokens()} * c.num_q_heads * c.value_dim);
    args.out = out.data();
    AttentionPlan plan;
    Watching executor;
    plan.prepare(args, executor.num_workers());
    const int64_t before = g_allocations;
    set->attend(args, plan.impl(), executor);
    EXPECT_EQ(g_allocations, before) << set->name;
    EXPECT_EQ(executor.runs, 1) << set->name;
    plan.prepare(args, executor.num_workers());
    EXPECT_EQ(g_allocations, before) << "preparing the same shapes again";
  }
}

}  // namespace
}  // namespace pagedkv::testing
