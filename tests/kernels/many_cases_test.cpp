// Small attention cases in great number, every kernel set against the reference bit for bit: all pairs of page formats, lengths
// around the edges of pages, tiles and partitions, windows, masks, biases, soft caps, sinks, chunks of a prompt.
// Slots that no token owns hold NaN (attention_case.h). A failing case prints as a variable that repeats it:
//   PAGEDKV_CASE='keys=f16 …' kernels_test --gtest_filter=Attention.Case
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

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
  ThreadPool alone(1), three(3);
  const int count = rounds(2400);
  for (int number = 0; number < count; ++number) {
    const AttentionCase c = small_case(draw, number);
    AttentionProblem problem(c);
    const AttentionOutput expected = problem.run(reference_set(), alone);
    for (const KernelSet* set : supported_sets())
      ASSERT_EQ(first_difference(problem.run(*set, number % 4 ? alone : three), expected), "")
          << set->name << ": PAGEDKV_CASE='" << c.text() << "'";
  }
  std::string sets;
  for (const KernelSet* set : supported_sets()) sets.append(" ").append(set->name);
  std::printf("[ COUNT    ] %d attention cases have the same bits on:%s\n", count, sets.c_str());
}

}  // namespace
}  // namespace pagedkv::testing
