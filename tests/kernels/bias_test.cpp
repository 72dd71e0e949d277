// What a bias means, beside the cases of attention_test.cpp that hold it to the reference and to double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

AttentionCase bias_case(PageFormat format, int query_len) {
  AttentionCase c;
  c.key_format = c.value_format = format;
  c.num_q_heads = 6;
  c.sequences = {{530, query_len, 1}, {40, query_len, 2}};
  return c;
}

// Runs a problem with a bias and a mask of the caller's. Arrays end where the last row of the longest sequence does.
AttentionOutput run(AttentionProblem& problem, const KernelSet& set, const std::vector<float>& bias,
                    const std::vector<uint8_t>& mask, int64_t stride) {
  const AttentionCase& c = problem.spec();
  const int64_t rows = int64_t{c.num_tokens()} * c.num_q_heads;
  AttentionOutput output;
  output.out.resize(rows * c.value_dim);
  output.log_sum_exp.resize(rows);
  AttentionArgs args = problem.args();
  args.out = output.out.data();
  args.log_sum_exp = output.log_sum_exp.data();
  args.bias = bias.empty() ? nullptr : bias.data();
  args.mask = mask.empty() ? nullptr : mask.data();
  args.bias_stride = args.mask_stride = stride;
  ThreadPool pool(2);
  AttentionPlan plan;
  plan.prepare(args, 2);
  set.attend(args, plan.impl(), pool);
  return output;
}

constexpr int64_t kStride = 530;

TEST(Bias, OfZeroChangesNothing) {
  for (PageFormat format : kFormats)
    for (int query_len : {1, 9})
      for (const KernelSet* set : supported_sets()) {
        AttentionProblem problem(bias_case(format, query_len));
        const std::vector<float> zeros(kStride * problem.spec().num_tokens());
        EXPECT_EQ(first_difference(run(problem, *set, zeros, {}, kStride),
                                   run(problem, *set, {}, {}, kStride)),
                  "")
            << set->name << ' ' << problem.spec().text();
      }
}

TEST(Bias, OfMinusInfinityHidesAsTheMaskDoes) {
  for (PageFormat format : kFormats)
    for (int query_len : {1, 9})
      for (const KernelSet* set : supported_sets()) {
        AttentionProblem problem(bias_case(format, query_len));
        const int64_t count = kStride * problem.spec().num_tokens();
        std::vector<float> bias = data(3, count);
        std::vector<uint8_t> mask(count);
        for (int64_t i = 0; i < count; ++i) {
          // Single holes, a whole partition, and a row that sees nothing.
          mask[i] = bias[i] > -0.9f && (i % kStride >= 512 || i / kStride % 3 != 1) &&
                    i / kStride % 4 != 3;
          bias[i] = mask[i] ? 0.0f : -INFINITY;
        }
        EXPECT_EQ(first_difference(run(problem, *set, bias, {}, kStride),
                                   run(problem, *set, {}, mask, kStride)),
                  "")
            << set->name << ' ' << problem.spec().text();
      }
}

TEST(Bias, OfNaNGivesNaNInItsRowAlone) {
  for (PageFormat format : kFormats)
    for (const KernelSet* set : supported_sets()) {
      AttentionProblem problem(bias_case(format, 9));
      const AttentionCase& c = problem.spec();
      std::vector<float> bias(kStride * c.num_tokens(), 0.25f), spoilt = bias;
      spoilt[4 * kStride + 3] = NAN;
      const AttentionOutput clean = run(problem, *set, bias, {}, kStride),
                            output = run(problem, *set, spoilt, {}, kStride);
      const int64_t row = int64_t{c.num_q_heads} * c.value_dim;
      for (int64_t i = 0; i < static_cast<int64_t>(output.out.size()); ++i) {
        const bool same = std::memcmp(&output.out[i], &clean.out[i], sizeof(float)) == 0;
        ASSERT_TRUE(i / row == 4 ? std::isnan(output.out[i]) : same) << set->name << ' ' << i;
      }
      for (int h = 0; h < c.num_q_heads; ++h)
        EXPECT_TRUE(std::isnan(output.log_sum_exp[4 * c.num_q_heads + h])) << set->name;
    }
}

// A bias joins after the soft cap and is not scaled: one that outweighs every score picks its token's value.
TEST(Bias, IsNeitherScaledNorCapped) {
  for (const KernelSet* set : supported_sets()) {
    AttentionCase c = bias_case(PageFormat::kF32, 1);
    c.softcap = 2.0f;
    AttentionProblem problem(c);
    std::vector<float> bias(kStride * 2);
    bias[17] = bias[kStride + 17] = 200.0f;
    const AttentionOutput output = run(problem, *set, bias, {}, kStride);
    for (int s = 0; s < 2; ++s)
      for (int h = 0; h < c.num_q_heads; ++h) {
        const int64_t at = int64_t{s} * c.num_q_heads + h;
        EXPECT_NEAR(output.log_sum_exp[at], 200.0f, 2.1f) << set->name;
        for (int e = 0; e < c.value_dim; ++e)
          ASSERT_EQ(output.out[at * c.value_dim + e], problem.tokens().value(s, 17, h / 3, e))
              << set->name;
      }
  }
}

}  // namespace
}  // namespace pagedkv::testing
