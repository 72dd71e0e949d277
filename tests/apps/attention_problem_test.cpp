#include "apps/attention_problem.h"

#include <gtest/gtest.h>

namespace pagedkv::apps {
namespace {

TEST(AttentionCase, ReadsItsWords) {
  const auto c = AttentionCase::parse(
      "keys=q8 values=int4 heads=9/3 dims=64/96 page=4 window=100 softcap=2.5 sinks=1 "
      "seqs=4096:512,3*200:7");
  EXPECT_EQ(c.key_format, PageFormat::kQ8);
  EXPECT_EQ(c.value_format, PageFormat::kQ4);
  EXPECT_EQ(c.heads.query, 9);
  EXPECT_EQ(c.heads.kv, 3);
  EXPECT_EQ(c.key_dim, 64);
  EXPECT_EQ(c.value_dim, 96);
  EXPECT_EQ(c.page_size, 4);
  EXPECT_EQ(c.window, 100);
  EXPECT_EQ(c.softcap, 2.5f);
  EXPECT_TRUE(c.sinks);
  ASSERT_EQ(c.sequences.size(), 4u);
  EXPECT_EQ(c.sequences[3].seq_len, 200);
  EXPECT_EQ(c.tokens_held(), 4096 + 3 * 200);
  EXPECT_EQ(c.num_queries(), 512 + 3 * 7);
  EXPECT_EQ(c.visible_tokens(), (512 + 3 * 7) * 100);
}

TEST(AttentionCase, CountsWhatEachQuerySees) {
  EXPECT_EQ(AttentionCase::parse("seqs=10:3,5:1").visible_tokens(), 8 + 9 + 10 + 5);
  EXPECT_EQ(AttentionCase::parse("seqs=10:3 window=9").visible_tokens(), 8 + 9 + 9);
  EXPECT_EQ(AttentionCase::parse("seqs=10:3 heads=6/2 dims=32/16").flops(), 27 * 2 * (32 + 16) * 6);
}

TEST(AttentionCase, CountsSharedTokensOnceUnlessTheyAreCopied) {
  const auto c = AttentionCase::parse("seqs=40:1,50:2 shared=32");
  EXPECT_EQ(c.tokens_held(), 90);
  EXPECT_EQ(c.tokens_stored(), 58);
  EXPECT_EQ(c.visible_tokens(), 40 + 49 + 50);
  EXPECT_EQ(AttentionCase::parse("copied=1 shared=32 seqs=40:1,50:2").tokens_stored(), 90);
  EXPECT_EQ(AttentionCase::parse("seqs=40:1").tokens_stored(), 40);
}

TEST(AttentionCase, ReadsWhatAKernelTestPrints) {
  const auto c = AttentionCase::parse(
      "keys=f16 values=f16 heads=4/2 dims=64/64 page=16 causal=1 window=0 softcap=0 sinks=0 mask=0 "
      "bias=0 amplitude=1 seqs=100:4:0,37:1:8");
  EXPECT_EQ(c.sequences.size(), 2u);
  EXPECT_EQ(c.visible_tokens(), 97 + 98 + 99 + 100 + 37);
}

TEST(AttentionCase, NamesTheWordItRefuses) {
  const struct {
    const char *words, *named;
  } bad[] = {{"heads=7/2 seqs=1:1", "heads=7/2"},  {"heads=x seqs=1:1", "heads=x"},
             {"dims=64/ seqs=1:1", "dims=64/"},    {"page=0 seqs=1:1", "page=0"},
             {"page seqs=1:1", "page: has no ="},  {"seqs=4:5", "seqs=4:5"},
             {"seqs=0*4:1", "seqs=0*4:1"},         {"seqs=4:1x", "seqs=4:1x"},
             {"keys=q5 seqs=1:1", "q5"},           {"softcap=nan seqs=1:1", "softcap=nan"},
             {"mask=1 seqs=1:1", "mask=1"},        {"causal=0 seqs=1:1", "causal=0"},
             {"colour=1 seqs=1:1", "colour=1"},    {"shared=20 seqs=40:1", "shared=20"},
             {"shared=32 seqs=32:1", "shared=32"}, {"heads=32/8", "seqs="}};
  for (const auto& b : bad) {
    try {
      AttentionCase::parse(b.words);
      ADD_FAILURE() << b.words << " was accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(b.named), std::string::npos) << error.what();
    }
  }
}

TEST(AttentionProblem, EverySetMatchesTheReferenceWithAnyThreads) {
  for (const char* words : {"heads=6/2 dims=64/64 keys=q8 values=q4 seqs=700:3,40:1",
                            "heads=4 dims=80/48 page=1 seqs=530:530",
                            "heads=6/2 dims=64/64 window=50 softcap=3 sinks=1 seqs=600:9",
                            "heads=6/2 dims=64/64 keys=q8 shared=512 seqs=3*520:1,530:4,513:1"}) {
    AttentionProblem problem(AttentionCase::parse(words), 1);
    for (const int threads : {1, 3}) {
      problem.use_threads(threads);
      for (const KernelSet& set : kernel_sets()) {
        if (!set.supported()) continue;
        EXPECT_NO_THROW(problem.check(set)) << words << ' ' << set.name;
      }
    }
  }
}

TEST(AttentionProblem, ASetThatComputesSomethingElseIsFound) {
  AttentionProblem problem(AttentionCase::parse("heads=2 dims=32/32 seqs=40:3,40:3"), 1);
  KernelSet wrong = kernel_sets().back();
  wrong.name = "wrong";
  wrong.attend = [](const AttentionArgs& args, AttentionPlan::Impl& plan,
                    Executor& executor) noexcept {
    kernel_sets().back().attend(args, plan, executor);
    float& last = args.out[args.query_start[args.num_seqs] * args.num_q_heads * 32 - 1];
    last = -last;
  };
  EXPECT_NO_THROW(problem.check(kernel_sets().back()));
  try {
    problem.check(wrong);
    ADD_FAILURE() << "not found";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "row 5 of kernel set wrong differs from the reference");
  }
  wrong.attend = [](const AttentionArgs&, AttentionPlan::Impl&, Executor&) noexcept {};
  EXPECT_THROW(problem.check(wrong), std::runtime_error);
}

TEST(SharingProblem, CopiesOfTheSharedTokensGiveTheSameBits) {
  SharingProblem problem(
      AttentionCase::parse("heads=6/2 dims=64/64 keys=q8 shared=512 seqs=5*520:1,513:1"), 1);
  EXPECT_EQ(problem.shared().bytes(), (512 + 5 * 8 + 1) * 2 * (64 + 4 + 2 * 64));
  for (const int threads : {1, 3}) {
    problem.use_threads(threads);
    for (const KernelSet& set : kernel_sets()) {
      if (!set.supported()) continue;
      EXPECT_NO_THROW(problem.check(set)) << set.name;
    }
  }
  const auto [copied, shared] = problem.time(kernel_sets().back(), 3);
  EXPECT_EQ(copied.ms.size(), 3u);
  EXPECT_EQ(shared.ms.size(), 3u);
}

TEST(SharingProblem, ASetThatComputesSomethingElseFromCopiesIsFound) {
  SharingProblem problem(AttentionCase::parse("heads=2 dims=32/32 shared=32 seqs=2*40:1"), 1);
  static int calls;
  calls = 0;
  KernelSet wrong = kernel_sets().back();
  wrong.name = "wrong";
  wrong.attend = [](const AttentionArgs& args, AttentionPlan::Impl& plan,
                    Executor& executor) noexcept {
    kernel_sets().back().attend(args, plan, executor);
    if (++calls == 3) args.out[1] = -args.out[1];  // shared twice, then the copies
  };
  try {
    problem.check(wrong);
    ADD_FAILURE() << "not found";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(),
                 "kernel set wrong: shared pages give other bits than copies of them");
  }
}

TEST(Measure, TimesPairsInTurns) {
  std::string order;
  const PairTimes t = time_pairs(2, [&] { order += 'a'; }, [&] { order += 'b'; });
  EXPECT_EQ(order, "ababab");
  EXPECT_EQ(t.first.ms.size(), 2u);
  EXPECT_EQ(t.second.cpu_ms.size(), 2u);
  EXPECT_EQ(ratios({6, 1}, {2, 4}), (std::vector<double>{3, 0.25}));
}

TEST(AttentionProblem, TimesEachRunAfterOneThatWarmsUp) {
  int calls = 0;
  const CallTimes t = time_calls(5, [&] { ++calls; });
  EXPECT_EQ(calls, 6);
  EXPECT_EQ(t.ms.size(), 5u);
  EXPECT_EQ(t.cpu_ms.size(), 5u);
  EXPECT_EQ(median({3, 1, 2}), 2);
}

}  // namespace
}  // namespace pagedkv::apps
