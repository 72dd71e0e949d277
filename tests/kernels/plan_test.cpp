// What a plan promises: clear refusals, enough work for all workers, and kernel calls of exactly one run() without allocation.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <new>

#include "kernels/attention_case.h"

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
