// The 16 lanes of the arithmetic in native registers (one on AVX-512, two on AVX2, four on NEON), how each page format
// reads into them, and the tree that adds them up.
#if defined(PAGEDKV_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_LANES_INL_H_
#undef PAGEDKV_LANES_INL_H_
#else
#define PAGEDKV_LANES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/page_codec.h"
#include "hwy/highway.h"
#include "kernels/arithmetic.h"

#ifndef PAGEDKV_UNROLL
// for (int index = 0; index < count; ++index), unrolled: arrays of registers stay registers.
#define PAGEDKV_UNROLL(index, count) \
  _Pragma("GCC unroll 16") for (int index = 0; index < (count); ++index)
#define PAGEDKV_LAMBDA HWY_ATTR __attribute__((always_inline))
#endif

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#ifdef PAGEDKV_FOUR_LANES  // NEON's structure on any target, to check it where NEON is not
using Floats = hn::CappedTag<float, 4>;
#else
using Floats = hn::CappedTag<float, 16>;
#endif
using Ints = hn::Rebind<int32_t, Floats>;
using Vec = hn::Vec<Floats>;
constexpr Floats kFloats;
constexpr Ints kInts;
constexpr int kNative =
    static_cast<int>(hn::MaxLanes(Floats()));  // lanes of a register: 16, 8 or 4
constexpr int kParts = kLanes / kNative;       // registers for the 16 lanes

// Reads stored elements as floats, without their scale. One load yields kGroups groups of 16 lanes (a byte of two codes
// yields two), of which it fills registers x[0..kGroups) with part `part`: lanes [part * kNative, + kNative).
template <class Format>
struct Reader {
  static constexpr int kGroups = Format::kGroups;
  static HWY_INLINE void load(const std::byte* HWY_RESTRICT row, int chunk, int part, Vec* x) {
    HWY_ALIGN float elements[kNative];
    for (int v = 0; v < kGroups; ++v) {
      for (int j = 0; j < kNative; ++j)
        elements[j] =
            Format::load(row, chunk * Format::kChunk + (part * kNative + j) * kGroups + v);
      x[v] = hn::Load(kFloats, elements);
    }
  }
};

template <>
struct Reader<F32Page> {
  static constexpr int kGroups = 1;
  static HWY_INLINE void load(const std::byte* HWY_RESTRICT row, int chunk, int part, Vec* x) {
    x[0] =
        hn::LoadU(kFloats, reinterpret_cast<const float*>(row) + chunk * kLanes + part * kNative);
  }
};

template <>
struct Reader<F16Page> {
  static constexpr int kGroups = 1;
  static HWY_INLINE void load(const std::byte* HWY_RESTRICT row, int chunk, int part, Vec* x) {
    const hn::Rebind<hwy::float16_t, Floats> halves;
    const auto* at = reinterpret_cast<const hwy::float16_t*>(row) + chunk * kLanes + part * kNative;
    x[0] = hn::PromoteTo(kFloats, hn::LoadU(halves, at));
  }
};

template <>
struct Reader<Q8Page> {
  static constexpr int kGroups = 1;
  static HWY_INLINE void load(const std::byte* HWY_RESTRICT row, int chunk, int part, Vec* x) {
    const hn::Rebind<int8_t, Floats> bytes;
    const auto* at = reinterpret_cast<const int8_t*>(row) + chunk * kLanes + part * kNative;
    x[0] = hn::ConvertTo(kFloats, hn::PromoteTo(kInts, hn::LoadU(bytes, at)));
  }
};

// Bytes that one load of all parts covers.
template <class Format>
constexpr int kChunkBytes = Reader<Format>::kGroups * kLanes * Format::kElementBits / 8;

// The lanes of a row as a number that may be known to the compiler: the commonest head_dims get loops of fixed length.
struct AnyLanes {
  int count;
  constexpr operator int() const { return count; }
};
template <int kCount>
using FixedLanes = std::integral_constant<int, kCount>;

// One level of the tree for two registers at once: in each, lane j takes lane j + distance; x's sums go where the
// distance's bit of the lane number is 0, y's where it is 1.
#if HWY_MAX_BYTES >= 64 && !defined(PAGEDKV_FOUR_LANES)
HWY_INLINE Vec add_halves(Vec x, Vec y) {  // distance 8
  return hn::Add(hn::ConcatUpperLower(kFloats, y, x), hn::ConcatLowerUpper(kFloats, y, x));
}
HWY_INLINE Vec add_blocks(Vec x, Vec y) {  // distance 4
  return hn::Add(hn::OddEvenBlocks(y, x), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(x, y)));
}
#elif HWY_MAX_BYTES >= 32 && !defined(PAGEDKV_FOUR_LANES)
HWY_INLINE Vec add_blocks(Vec x, Vec y) {  // distance 4
  return hn::Add(hn::ConcatUpperLower(kFloats, y, x), hn::ConcatLowerUpper(kFloats, y, x));
}
#endif
HWY_INLINE Vec add_pairs(Vec x, Vec y) {  // distance 2
  const hn::Repartition<uint64_t, Floats> d64;
  const hn::Repartition<uint8_t, Floats> d8;
  const Vec own = hn::BitCast(kFloats, hn::OddEven(hn::BitCast(d64, y), hn::BitCast(d64, x)));
  const Vec other = hn::BitCast(
      kFloats, hn::CombineShiftRightBytes<8>(d8, hn::BitCast(d8, y), hn::BitCast(d8, x)));
  return hn::Add(own, other);
}
HWY_INLINE Vec add_neighbours(Vec x, Vec y) {  // distance 1
  return hn::Add(hn::OddEven(y, x), hn::Shuffle2301(hn::OddEven(x, y)));
}

// exp2_nonpositive() in each lane.
HWY_INLINE Vec exp2_nonpositive(Vec x) {
  const Vec magic = hn::Set(kFloats, kExp2Magic);
  const Vec z = hn::Add(x, magic);
  const Vec f = hn::Sub(x, hn::Sub(z, magic));
  Vec p = hn::Set(kFloats, kExp2Coefficients[0]);
  PAGEDKV_UNROLL (i, 6) p = hn::MulAdd(p, f, hn::Set(kFloats, kExp2Coefficients[i + 1]));
  const Vec power = hn::BitCast(kFloats, hn::ShiftLeft<23>(hn::BitCast(kInts, z)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(kFloats, kExp2Min)), hn::Mul(p, power));
}

HWY_INLINE float exp2_one(float x) { return hn::GetLane(exp2_nonpositive(hn::Set(kFloats, x))); }

// ScoreRule::capped() in each lane.
HWY_INLINE Vec capped(Vec x, float cap) {
  const Vec one = hn::Set(kFloats, 1.0f);
  const Vec t = exp2_nonpositive(hn::Mul(hn::Set(kFloats, ScoreRule::kTanh), hn::Abs(x)));
  const Vec tanh = hn::Div(hn::Sub(one, t), hn::Add(one, t));
  return hn::Mul(hn::CopySign(tanh, x), hn::Set(kFloats, cap));
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_LANES_INL_H_
