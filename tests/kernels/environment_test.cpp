// The caller's floating-point settings change nothing, and are there again afterwards.
#include <gtest/gtest.h>

#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

constexpr uint32_t kDefault = 0x1f80, kFlush = 0x8000, kDenormalsAreZero = 0x0040, kUp = 0x4000,
                   kStatus = 0x3f;

// Tokens and queries so small that their products are denormal.
AttentionCase tiny_case(PageFormat format) {
  AttentionCase c;
  c.key_format = c.value_format = format;
  c.query_amplitude = 1e-38f;
  c.sequences = {{40, 1, 1}, {600, 5, 2}};
  return c;
}

class CallerSettings : public ::testing::TestWithParam<uint32_t> {
 protected:
  ~CallerSettings() override { _mm_setcsr(kDefault); }
};

TEST_P(CallerSettings, DoNotChangeAttention) {
  for (PageFormat format : kFormats)
    for (const KernelSet* set : supported_sets()) {
      AttentionProblem problem(tiny_case(format));
      ThreadPool pool(1);
      _mm_setcsr(kDefault);
      const AttentionOutput expected = problem.run(*set, pool);
      _mm_setcsr(GetParam());
      const AttentionOutput output = problem.run(*set, pool);
      const uint32_t after = _mm_getcsr();
      _mm_setcsr(kDefault);
      EXPECT_EQ(first_difference(output, expected), "") << set->name;
      EXPECT_EQ(after & ~kStatus, GetParam()) << set->name;
    }
}

TEST_P(CallerSettings, DoNotChangeWhatIsStored) {
  std::vector<float> x = data(9, 128);
  for (int i = 0; i < 64; ++i) x[i] *= 1e-38f;
  for (PageFormat format : kFormats)
    for (const KernelSet* set : supported_sets()) {
      AttentionCase c;
      c.key_format = c.value_format = format;
      c.num_kv_heads = c.num_q_heads = 2;
      c.sequences = {{1, 0, 0}};
      PagedTokens a(c, 0), b(c, 0);
      ThreadPool pool(1);
      const int64_t slot = 0;
      _mm_setcsr(kDefault);
      ASSERT_TRUE(set->store({x.data(), x.data(), a.pages(), &slot, 1}, pool));
      _mm_setcsr(GetParam());
      const bool stored = set->store({x.data(), x.data(), b.pages(), &slot, 1}, pool);
      const uint32_t after = _mm_getcsr();
      _mm_setcsr(kDefault);
      ASSERT_TRUE(stored);
      EXPECT_TRUE(std::ranges::equal(a.key_bytes(), b.key_bytes())) << set->name;
      EXPECT_EQ(after & ~kStatus, GetParam()) << set->name;
    }
}

INSTANTIATE_TEST_SUITE_P(Mxcsr, CallerSettings,
                         ::testing::Values(kDefault | kFlush, kDefault | kDenormalsAreZero,
                                           kDefault | kUp,
                                           kDefault | kFlush | kDenormalsAreZero | kUp));

}  // namespace
}  // namespace pagedkv::testing
#endif
