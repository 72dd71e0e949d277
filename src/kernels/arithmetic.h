// The scalar steps of the one arithmetic (docs/decisions/0001): what the reference and every kernel set must agree on. All in
// float32, round to nearest even, denormals on, each fma a single rounding.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace pagedkv {

constexpr int kLanes = 16;       // partial sums of a dot product
constexpr int kTile = 16;        // tokens handled together; partitions are whole tiles
constexpr int kPartition = 512;  // tokens that share one maximum, aligned to the sequence
constexpr int kTilesPerPartition = kPartition / kTile;

constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.69314718055994531;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// exp2(x) for x <= 0: x + kExp2Magic rounds x to an integer and leaves 2^integer's exponent in the low bits; then
// a polynomial on [-0.5, 0.5] (0.952 ulp at most over [-125, 0]). Below -125 the result is +0.
constexpr float kExp2Magic = 12583039.0f;  // 1.5 * 2^23 + 127
constexpr float kExp2Min = -125.0f;
constexpr float kExp2Coefficients[] = {
    0.00015353362f, 0.0013398875f, 0.00961843692f, 0.0555033237f, 0.240226477f, 0.693147182f, 1.0f};

inline float exp2_nonpositive(float x) noexcept {
  if (x < kExp2Min) return 0.0f;  // false for a NaN, which the product keeps
  const float z = x + kExp2Magic;
  const float f = x - (z - kExp2Magic);
  float p = kExp2Coefficients[0];
  for (int i = 1; i < 7; ++i) p = std::fma(p, f, kExp2Coefficients[i]);
  return p * std::bit_cast<float>(std::bit_cast<uint32_t>(z) << 23);
}

// Adds 16 lanes as a tree: j + 8, then + 4, + 2, + 1.
inline float add_lanes(const float* lanes) noexcept {
  float a[8], b[4];
  for (int j = 0; j < 8; ++j) a[j] = lanes[j] + lanes[j + 8];
  for (int j = 0; j < 4; ++j) b[j] = a[j] + a[j + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// What turns a dot product into a score in base 2. With a soft cap, score = cap * tanh(scale * q.k / cap).
struct ScoreRule {
  float query_factor;  // every query element is multiplied by it once
  bool softcap;
  float cap;  // cap * log2 e
  static constexpr float kTanh = static_cast<float>(-2.0 * kLog2e);

  ScoreRule(float scale, float logit_softcap) noexcept
      : query_factor(
            static_cast<float>(logit_softcap > 0 ? double{scale} / logit_softcap : scale * kLog2e)),
        softcap(logit_softcap > 0),
        cap(static_cast<float>(logit_softcap * kLog2e)) {}

  float capped(float x) const noexcept {
    const float t = exp2_nonpositive(kTanh * std::fabs(x));
    return std::copysign((1.0f - t) / (1.0f + t), x) * cap;
  }
};

// log2 for x > 0, normal, in double with + - * / alone, so that no math library decides the bits: with
// x = m 2^k, m in [sqrt 1/2, sqrt 2), log2 m = 2/ln 2 * atanh((m - 1) / (m + 1)).
inline double log2_positive(double x) noexcept {
  if (!(x < std::numeric_limits<double>::infinity())) return x;  // infinity, NaN
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double r = (m - 1) / (m + 1), r2 = r * r;
  double sum = 0;
  for (int k = 21; k >= 1; k -= 2)
    sum = sum * r2 + 1.0 / k;  // r2 < 0.03: what follows is below 1e-17
  return exponent + 2 * kLog2e * (sum * r);
}

// The natural logarithm of a row's sum of exponentials, from its maximum (base 2) and its sum.
inline float log_sum_exp(float max, float sum) noexcept {
  return static_cast<float>((double{max} + log2_positive(sum)) * kLn2);
}

}  // namespace pagedkv
