// IEEE 754 binary16 and bfloat16 in software: the same bits on every machine, whatever its instructions.
#pragma once

#include <bit>
#include <cstdint>

namespace pagedkv {

// Exact. A NaN stays a NaN.
inline float half_to_float(uint16_t half) noexcept {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
  if (exponent == 0) {  // zero and denormals: the mantissa counts steps of 2^-24
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Rounds to nearest even; too large becomes infinity. A NaN becomes quiet and keeps its payload's top bits, as
// the instruction does.
inline uint16_t float_to_half(float value) noexcept {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((bits >> 13) & 0x3ff));
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above
  if (bits < 0x38800000) {  // below 2^-14: a denormal half
    const uint32_t shift = 126 - (bits >> 23);
    if (shift > 24) return static_cast<uint16_t>(sign);
    const uint32_t mantissa = (bits & 0x7fffff) | 0x800000;
    const uint32_t steps = mantissa >> shift, rest = mantissa & ((1u << shift) - 1),
                   middle = 1u << (shift - 1);
    return static_cast<uint16_t>(sign |
                                 (steps + (rest > middle || (rest == middle && (steps & 1)))));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | (bits - 0x38000000) >> 13);
}

// bfloat16 is the upper half of a float. Exact.
inline float bfloat16_to_float(uint16_t upper) noexcept {
  return std::bit_cast<float>(uint32_t{upper} << 16);
}

// Rounds to nearest even; too large becomes infinity. A NaN becomes quiet and keeps its payload's top bits.
inline uint16_t float_to_bfloat16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace pagedkv
