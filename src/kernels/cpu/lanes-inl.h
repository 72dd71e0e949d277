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

#undef PAGEDKV_TABLE_OF_16
#if HWY_TARGET == HWY_AVX3 && !defined(PAGEDKV_FOUR_LANES)
#define PAGEDKV_TABLE_OF_16  // one instruction looks up 16 floats
#endif

// Calls f(integral constant i) for i in [0, kCount), unrolled.
template <int kCount, int kAt = 0, class F>
HWY_INLINE void unroll(const F& f) {
  if constexpr (kAt < kCount) {
    f(std::integral_constant<int, kAt>{});
    unroll<kCount, kAt + 1>(f);
  }
}

// Reads stored elements as floats, without their scale. load(row, chunk, part) takes what holds lanes
// [part * kNative, + kNative) of a chunk's kGroups vectors of 16; get<v>() makes those lanes of vector v from it.
// Loads may reach up to 16 bytes past the row.
template <class Format>
struct Reader;

template <>
struct Reader<F32Page> {
  static constexpr int kGroups = 1;
  using Raw = Vec;
  static HWY_INLINE Raw load(const std::byte* HWY_RESTRICT row, int chunk, int part) {
    return hn::LoadU(kFloats,
                     reinterpret_cast<const float*>(row) + chunk * kLanes + part * kNative);
  }
  template <int>
  static HWY_INLINE Vec get(Raw raw) {
    return raw;
  }
};

template <>
struct Reader<F16Page> {
  static constexpr int kGroups = 1;
  using Raw = Vec;
  static HWY_INLINE Raw load(const std::byte* HWY_RESTRICT row, int chunk, int part) {
    const hn::Rebind<hwy::float16_t, Floats> halves;
    const auto* at = reinterpret_cast<const hwy::float16_t*>(row) + chunk * kLanes + part * kNative;
    return hn::PromoteTo(kFloats, hn::LoadU(halves, at));
  }
  template <int>
  static HWY_INLINE Vec get(Raw raw) {
    return raw;
  }
};

template <>
struct Reader<BF16Page> {
  static constexpr int kGroups = 1;
  using Raw = Vec;
  static HWY_INLINE Raw load(const std::byte* HWY_RESTRICT row, int chunk, int part) {
    const hn::Rebind<uint16_t, Floats> halves;
    const auto* at = reinterpret_cast<const uint16_t*>(row) + chunk * kLanes + part * kNative;
    return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(kInts, hn::LoadU(halves, at))));
  }
  template <int>
  static HWY_INLINE Vec get(Raw raw) {
    return raw;
  }
};

template <>
struct Reader<Q8Page> {
  static constexpr int kGroups = 1;
  using Raw = Vec;
  static HWY_INLINE Raw load(const std::byte* HWY_RESTRICT row, int chunk, int part) {
    const hn::Rebind<int8_t, Floats> bytes;
    const auto* at = reinterpret_cast<const int8_t*>(row) + chunk * kLanes + part * kNative;
    return hn::ConvertTo(kFloats, hn::PromoteTo(kInts, hn::LoadU(bytes, at)));
  }
  template <int>
  static HWY_INLINE Vec get(Raw raw) {
    return raw;
  }
};

// Integers as floats by an and and a subtraction, without masks, shifts and conversions of their own: under the exponent
// of 2^(23 - kShift), bit kShift of a float counts one. The bits that the exponents need are set before, for all fields
// at once; kKeep picks one's. Bits [kShift, kShift + kBits) become -2^(kBits - 1) .. 2^(kBits - 1) - 1, exactly.
template <int kShift, int kBits>
HWY_INLINE Vec read_field(hn::Vec<Ints> bits) {
  constexpr uint32_t kExponent = uint32_t{150 - kShift} << 23;
  constexpr uint32_t kKeep = kExponent | ((1u << kBits) - 1) << kShift;
  constexpr float kZero = static_cast<float>((1 << (23 - kShift)) + (1 << (kBits - 1)));
  const auto kept = hn::And(bits, hn::Set(kInts, static_cast<int32_t>(kKeep)));
  return hn::Sub(hn::BitCast(kFloats, kept), hn::Set(kFloats, kZero));
}

template <>
struct Reader<Q6Page> {
  static constexpr int kGroups = 4;
  using Raw = hn::Vec<Ints>;
  static HWY_INLINE Raw load(const std::byte* HWY_RESTRICT row, int chunk, int part) {
    const hn::Repartition<uint8_t, Floats> bytes;
    alignas(16) static constexpr uint8_t kTriples[16] = {0, 1, 2, 0x80, 3, 4,  5,  0x80,
                                                         6, 7, 8, 0x80, 9, 10, 11, 0x80};
    const auto* at = reinterpret_cast<const uint8_t*>(row) + (chunk * kLanes + part * kNative) * 3;
#if HWY_MAX_BYTES >= 64 && !defined(PAGEDKV_FOUR_LANES)  // 12 bytes to each block of four lanes
    alignas(64) static constexpr int32_t kTwelves[16] = {0, 1, 2, 2, 3, 4,  5,  5,
                                                         6, 7, 8, 8, 9, 10, 11, 11};
    const auto blocks =
        hn::BitCast(bytes, hn::TableLookupLanes(hn::BitCast(kInts, hn::LoadU(bytes, at)),
                                                hn::SetTableIndices(kInts, kTwelves)));
#elif HWY_MAX_BYTES >= 32 && !defined(PAGEDKV_FOUR_LANES)
    const hn::Half<decltype(bytes)> half;
    const auto blocks = hn::Combine(bytes, hn::LoadU(half, at + 12), hn::LoadU(half, at));
#else
    const auto blocks = hn::LoadU(bytes, at);
#endif
    const auto triples = hn::TableLookupBytesOr0(blocks, hn::LoadDup128(bytes, kTriples));
    return hn::Add(hn::BitCast(kInts, triples), hn::Set(kInts, static_cast<int32_t>(0xcf000000)));
  }
  template <int kGroup>
  static HWY_INLINE Vec get(Raw raw) {
    if constexpr (kGroup < 3)
      return read_field<6 * kGroup, 6>(raw);
    else  // its top bit is an exponent's lowest: make room
      return read_field<17, 6>(hn::ShiftRight<1>(raw));
  }
};

template <>
struct Reader<Q4Page> {
  static constexpr int kGroups = 2;
  using Raw = hn::Vec<Ints>;
  static HWY_INLINE Raw load(const std::byte* HWY_RESTRICT row, int chunk, int part) {
    const hn::Rebind<uint8_t, Floats> bytes;
    const auto* at = reinterpret_cast<const uint8_t*>(row) + chunk * kLanes + part * kNative;
    const Raw pairs = hn::PromoteTo(kInts, hn::LoadU(bytes, at));
#ifdef PAGEDKV_TABLE_OF_16
    return pairs;
#else
    return hn::Add(pairs, hn::Set(kInts, 0x4b000000));
#endif
  }
  template <int kGroup>
  static HWY_INLINE Vec get(Raw raw) {
#ifdef PAGEDKV_TABLE_OF_16  // it looks at the low four bits only
    const Vec table = hn::ConvertTo(kFloats, hn::Iota(kInts, -Q4Page::kBias));
    return Vec{_mm512_permutexvar_ps(hn::ShiftRight<4 * kGroup>(raw).raw, table.raw)};
#else
    return read_field<4 * kGroup, 4>(raw);
#endif
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
