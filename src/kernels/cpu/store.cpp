// Encoding rows into pages, for each instruction set: the same bytes as base/page_codec.h.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/store.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/float_environment.h"
#include "base/page_codec.h"
#include "pagedkv/kernels/kernel_set.h"

#if PAGEDKV_IS_KERNEL_TARGET
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// store_row() of a format over whole registers; the rest of a row, if any, is the caller's.
template <class Format>
struct Writer;

template <>
struct Writer<F32Page> {
  static bool store_row(const float* HWY_RESTRICT x, int n, std::byte* HWY_RESTRICT row, float*) {
    std::memcpy(row, x, static_cast<size_t>(n) * sizeof(float));
    return true;
  }
};

template <>
struct Writer<F16Page> {
  static bool store_row(const float* HWY_RESTRICT x, int n, std::byte* HWY_RESTRICT row, float*) {
    const hn::Rebind<hwy::float16_t, Floats> halves;
    const int whole = n / kNative * kNative;
    auto* out = reinterpret_cast<hwy::float16_t*>(row);
    for (int e = 0; e < whole; e += kNative)
      hn::StoreU(hn::DemoteTo(halves, hn::LoadU(kFloats, x + e)), halves, out + e);
    return F16Page::store_row(x + whole, n - whole, row + 2 * whole, nullptr);
  }
};

template <>
struct Writer<BF16Page> {
  static bool store_row(const float* HWY_RESTRICT x, int n, std::byte* HWY_RESTRICT row, float*) {
    const hn::RebindToUnsigned<Ints> words;
    const hn::Rebind<uint16_t, Floats> halves;
    const int whole = n / kNative * kNative;
    auto* out = reinterpret_cast<uint16_t*>(row);
    for (int e = 0; e < whole; e += kNative) {
      const auto bits = hn::BitCast(words, hn::LoadU(kFloats, x + e));
      const auto upper = hn::ShiftRight<16>(bits);
      const auto half_and_odd = hn::Add(hn::Set(words, 0x7fff), hn::And(upper, hn::Set(words, 1)));
      const auto rounded = hn::ShiftRight<16>(hn::Add(bits, half_and_odd));
      const auto is_nan = hn::Gt(hn::BitCast(kInts, hn::And(bits, hn::Set(words, 0x7fffffff))),
                                 hn::Set(kInts, 0x7f800000));
      const auto quiet = hn::BitCast(kInts, hn::Or(upper, hn::Set(words, 0x40)));
      const auto stored = hn::IfThenElse(is_nan, quiet, hn::BitCast(kInts, rounded));
      hn::StoreU(hn::DemoteTo(halves, stored), halves, out + e);
    }
    return BF16Page::store_row(x + whole, n - whole, row + 2 * whole, nullptr);
  }
};

// Integer codes with one scale a row.
template <class Format>
struct CodeWriter {
  // The largest |x|, compared as integers: infinities and NaNs are above every number.
  static HWY_INLINE float amax(const float* HWY_RESTRICT x, int n, int whole) {
    const auto magnitude = hn::Set(kInts, 0x7fffffff);
    auto m0 = hn::Zero(kInts), m1 = m0;
    int e = 0;
    for (; e + 2 * kNative <= whole; e += 2 * kNative) {
      m0 = hn::Max(m0, hn::And(magnitude, hn::BitCast(kInts, hn::LoadU(kFloats, x + e))));
      m1 = hn::Max(m1, hn::And(magnitude, hn::BitCast(kInts, hn::LoadU(kFloats, x + e + kNative))));
    }
    for (; e < whole; e += kNative)
      m0 = hn::Max(m0, hn::And(magnitude, hn::BitCast(kInts, hn::LoadU(kFloats, x + e))));
    int32_t bits = hn::GetLane(hn::MaxOfLanes(kInts, hn::Max(m0, m1)));
    for (; e < n; ++e) bits = std::max(bits, std::bit_cast<int32_t>(x[e]) & 0x7fffffff);
    return std::bit_cast<float>(bits);
  }

  static bool store_row(const float* HWY_RESTRICT x, int n, std::byte* HWY_RESTRICT row,
                        float* HWY_RESTRICT scale) {
    const hn::Rebind<int8_t, Floats> codes;
    const int whole = n / kNative * kNative;
    const float largest = amax(x, n, whole);
    if (!(largest < kInfinity)) return false;
    const float s = std::max(largest / Format::kMaxCode, Format::kMinScale);
    const Vec divisor = hn::Set(kFloats, s);
    HWY_ALIGN int8_t unpacked[kMaxHeadDim];
    int8_t* const out = Format::kElementBits == 8 ? reinterpret_cast<int8_t*>(row) : unpacked;
    // |x / s| rounds to at most the largest code: no clamp is needed.
    for (int e = 0; e < whole; e += kNative) {
      const Vec quotient = hn::Div(hn::LoadU(kFloats, x + e), divisor);
      hn::StoreU(hn::DemoteTo(codes, hn::NearestInt(quotient)), codes, out + e);
    }
    for (int e = whole; e < n; ++e) out[e] = static_cast<int8_t>(std::nearbyint(x[e] / s));
    if constexpr (Format::kElementBits < 8) {
      const int packed = n / kPacked * kPacked;
      for (int e = 0; e < packed; e += kPacked)
        pack(unpacked + e, row + e * Format::kElementBits / 8);
      Format::store_codes(row + packed * Format::kElementBits / 8, n - packed,
                          [&](int e) { return int{unpacked[packed + e]}; });
    }
    *scale = s;
    return true;
  }

 private:
  static constexpr int kMaxHeadDim = 512;
  static constexpr int kPacked = 16;  // codes packed at a time: two bytes to one, or four to three

  static HWY_INLINE void pack(const int8_t* HWY_RESTRICT codes, std::byte* HWY_RESTRICT out) {
    const hn::Full128<uint8_t> bytes;
    const hn::Full128<uint16_t> pairs;
    const auto stored = hn::Add(hn::Load(bytes, reinterpret_cast<const uint8_t*>(codes)),
                                hn::Set(bytes, Format::kBias));
    const auto pair = hn::BitCast(pairs, stored);  // a code in each byte
    constexpr int kBits = Format::kElementBits;
    constexpr uint16_t kLow = (1 << kBits) - 1;
    const auto joined = hn::Or(hn::And(pair, hn::Set(pairs, kLow)),
                               hn::And(hn::ShiftRight<8 - kBits>(pair),
                                       hn::Set(pairs, static_cast<uint16_t>(kLow << kBits))));
    if constexpr (kBits == 4) {
      const hn::Half<hn::Full128<uint8_t>> half;
      hn::StoreU(hn::TruncateTo(half, joined), half, reinterpret_cast<uint8_t*>(out));
    } else {
      const hn::Full128<uint32_t> fours;
      alignas(16) static constexpr uint8_t kTriples[16] = {0,  1,  2,  4,  5,    6,    8,    9,
                                                           10, 12, 13, 14, 0x80, 0x80, 0x80, 0x80};
      const auto two = hn::BitCast(fours, joined);  // 12 bits in each half
      const auto four = hn::Or(hn::And(two, hn::Set(fours, 0xfffu)),
                               hn::And(hn::ShiftRight<4>(two), hn::Set(fours, 0xfff000u)));
      HWY_ALIGN uint8_t triples[16];
      hn::Store(hn::TableLookupBytesOr0(hn::BitCast(bytes, four), hn::Load(bytes, kTriples)), bytes,
                triples);
      std::memcpy(out, triples, 12);
    }
  }
};
template <>
struct Writer<Q8Page> : CodeWriter<Q8Page> {};
template <>
struct Writer<Q6Page> : CodeWriter<Q6Page> {};
template <>
struct Writer<Q4Page> : CodeWriter<Q4Page> {};

template <class Format>
bool store_heads(const PageArray& array, int num_kv_heads, const float* rows, int64_t slot) {
  const int64_t bytes = row_bytes(Format::kFormat, array.head_dim);
  bool ok = true;
  for (int h = 0; h < num_kv_heads; ++h) {
    const int64_t at = slot * num_kv_heads + h;
    ok &= Writer<Format>::store_row(rows + int64_t{h} * array.head_dim, array.head_dim,
                                    array.data + at * bytes,
                                    Format::kHasScales ? array.scales + at : nullptr);
  }
  return ok;
}

bool store(const StoreArgs& args, Executor& executor) noexcept {
  const LayerPages& p = args.pages;
  const auto pick = [](auto format) { return &store_heads<decltype(format)>; };
  const auto store_keys = with_page_format(p.keys.format, pick);
  const auto store_values = with_page_format(p.values.format, pick);
  const int64_t key_floats = int64_t{p.num_kv_heads} * p.keys.head_dim;
  const int64_t value_floats = int64_t{p.num_kv_heads} * p.values.head_dim;
  // Whole tokens, a few items for each worker.
  const int64_t block = std::max<int64_t>(1, args.num_tokens / (4 * executor.num_workers()));
  std::atomic<bool> ok{true};
  executor.run((args.num_tokens + block - 1) / block, [&](int64_t item, int) {
    const FloatEnvironment environment;
    for (int64_t t = item * block; t < std::min<int64_t>(args.num_tokens, (item + 1) * block);
         ++t) {
      const int64_t slot = args.slot_mapping[t];
      if (slot < 0) continue;
      const bool keys = store_keys(p.keys, p.num_kv_heads, args.keys + t * key_floats, slot);
      const bool values =
          store_values(p.values, p.num_kv_heads, args.values + t * value_floats, slot);
      if (!keys || !values) ok.store(false, std::memory_order_relaxed);
    }
  });
  return ok;
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
