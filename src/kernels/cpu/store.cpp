// Encoding rows into pages, for each instruction set: the same bytes as base/page_codec.h.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/store.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <algorithm>
#include <array>
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

// x / s to the last bit (Markstein), a third to an eighth of a division's time. reciprocal: 1 / s, correctly rounded. Each
// step adds what is left of x: the first leaves an error below one unit in the last place, so that the second starts from
// an exact remainder. Quotients below 1/4 may differ where the remainder underflows; their code is 0 either way.
HWY_INLINE Vec divide(Vec x, Vec s, Vec reciprocal) {
  Vec quotient = hn::Mul(x, reciprocal);
  PAGEDKV_UNROLL (i, 2) quotient = hn::MulAdd(hn::NegMulAdd(quotient, s, x), reciprocal, quotient);
  return quotient;
}

// Integer codes with one scale a row.
template <class Format>
struct CodeWriter {
  // The largest |x|, compared as integers: infinities and NaNs are above every number.
  static HWY_INLINE float amax(const float* HWY_RESTRICT x, int n) {
    const int whole = n / kNative * kNative;
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

  static void store_row(const float* HWY_RESTRICT x, int n, float largest,
                        std::byte* HWY_RESTRICT row, float* HWY_RESTRICT scale) {
    const float s = std::max(largest / Format::kMaxCode, Format::kMinScale);
    const Vec divisor = hn::Set(kFloats, s), reciprocal = hn::Set(kFloats, 1.0f / s);
    // |x / s| rounds to at most the largest code: no clamp is needed.
    const auto codes = [&](const float* from) PAGEDKV_LAMBDA {
      return hn::NearestInt(divide(hn::LoadU(kFloats, from), divisor, reciprocal));
    };
    const auto store_run = [&](const float* from, std::byte* to) PAGEDKV_LAMBDA {
      const auto low = hn::ReorderDemote2To(kPairs, codes(from), codes(from + kNative));
      const auto high =
          hn::ReorderDemote2To(kPairs, codes(from + 2 * kNative), codes(from + 3 * kNative));
      const auto blocks = hn::BitCast(kInts, narrow(low, high));
      store_packed(hn::BitCast(kBytes, in_order(blocks)), to);
    };
    const auto bytes = [](int elements) { return elements * Format::kElementBits / 8; };
    for (int e = 0; e + kRun <= n; e += kRun) store_run(x + e, row + bytes(e));
    if (n < kRun) {
      HWY_ALIGN float padded[kRun] = {};
      HWY_ALIGN std::byte run[kRun];
      std::memcpy(padded, x, static_cast<size_t>(n) * sizeof(float));
      store_run(padded, run);
      std::memcpy(row, run, static_cast<size_t>(bytes(n)));
    } else if (n % kRun != 0) {  // some codes twice
      store_run(x + n - kRun, row + bytes(n - kRun));
    }
    *scale = s;
  }

 private:
  static constexpr int kRun = 4 * kNative;  // a register of codes
  static constexpr hn::Repartition<int8_t, Floats> kBytes{};
  static constexpr hn::Repartition<int16_t, Floats> kPairs{};

  // 16 bits to 8, for codes that fit; Highway has it in later releases.
  template <class Pairs>
  static HWY_INLINE hn::Vec<decltype(kBytes)> narrow(Pairs low, Pairs high) {
#if HWY_TARGET == HWY_AVX3 && !defined(PAGEDKV_FOUR_LANES)
    return hn::Vec<decltype(kBytes)>{_mm512_packs_epi16(low.raw, high.raw)};
#elif HWY_TARGET == HWY_AVX2 && !defined(PAGEDKV_FOUR_LANES)
    return hn::Vec<decltype(kBytes)>{_mm256_packs_epi16(low.raw, high.raw)};
#else
    const hn::Half<decltype(kBytes)> half;
    return hn::Combine(kBytes, hn::DemoteTo(half, high), hn::DemoteTo(half, low));
#endif
  }

  // Narrowing works within blocks of 128 bits, so four codes of each source lie side by side in each block.
  static HWY_INLINE hn::Vec<Ints> in_order(hn::Vec<Ints> blocks) {
    if constexpr (kNative == 4) return blocks;
    constexpr int kBlocks = kNative / 4;
    HWY_ALIGN static constexpr auto kFrom = [] {
      std::array<int32_t, kNative> from{};
      for (int i = 0; i < kNative; ++i) from[i] = i % kBlocks * 4 + i / kBlocks;
      return from;
    }();
    return hn::TableLookupLanes(blocks, hn::SetTableIndices(kInts, kFrom.data()));
  }

  static HWY_INLINE void store_packed(hn::Vec<decltype(kBytes)> codes,
                                      std::byte* HWY_RESTRICT row) {
    constexpr int kBits = Format::kElementBits;
    if constexpr (kBits == 8) {
      hn::StoreU(codes, kBytes, reinterpret_cast<int8_t*>(row));
    } else {
      const hn::Repartition<uint8_t, Floats> bytes;
      const hn::Repartition<uint16_t, Floats> pairs;
      const hn::Repartition<uint32_t, Floats> fours;
      const auto biased = hn::Add(hn::BitCast(bytes, codes), hn::Set(bytes, Format::kBias));
      const auto pair = hn::BitCast(pairs, biased);
      constexpr uint16_t kLow = (1 << kBits) - 1;
      const auto two = hn::Or(hn::And(pair, hn::Set(pairs, kLow)),
                              hn::And(hn::ShiftRight<8 - kBits>(pair),
                                      hn::Set(pairs, static_cast<uint16_t>(kLow << kBits))));
      if constexpr (kBits == 4) {
        const hn::Rebind<uint8_t, decltype(pairs)> half;
        hn::StoreU(hn::TruncateTo(half, two), half, reinterpret_cast<uint8_t*>(row));
      } else {
        const auto joined = hn::BitCast(fours, two);  // 12 bits in each half
        const auto four = hn::Or(hn::And(joined, hn::Set(fours, 0xfffu)),
                                 hn::And(hn::ShiftRight<4>(joined), hn::Set(fours, 0xfff000u)));
        store_triples(hn::BitCast(bytes, four), row);
      }
    }
  }

  // Stores three bytes of each four.
  template <class Bytes>
  static HWY_INLINE void store_triples(Bytes fours, std::byte* HWY_RESTRICT row) {
    const hn::Repartition<uint8_t, Floats> bytes;
    alignas(16) static constexpr uint8_t kTriples[16] = {0,  1,  2,  4,  5,    6,    8,    9,
                                                         10, 12, 13, 14, 0x80, 0x80, 0x80, 0x80};
    HWY_ALIGN uint8_t triples[kRun];
    hn::Store(hn::TableLookupBytesOr0(fours, hn::LoadDup128(bytes, kTriples)), bytes, triples);
    PAGEDKV_UNROLL (b, kNative / 4) std::memcpy(row + 12 * b, triples + 16 * b, 12);
  }
};
template <>
struct Writer<Q8Page> : CodeWriter<Q8Page> {};
template <>
struct Writer<Q6Page> : CodeWriter<Q6Page> {};
template <>
struct Writer<Q4Page> : CodeWriter<Q4Page> {};

// The rows of one token. Where they have scales, those of several heads are found before any is used: the way from a row's
// first element to its scale is long, and many of them overlap.
template <class Format>
bool store_heads(const PageArray& array, int num_kv_heads, const float* rows, int64_t slot) {
  const int n = array.head_dim;
  const int64_t bytes = row_bytes(Format::kFormat, n);
  std::byte* const out = array.data + slot * num_kv_heads * bytes;
  bool ok = true;
  if constexpr (Format::kHasScales) {
    constexpr int kHeads = 8;
    float* const scales = array.scales + slot * num_kv_heads;
    for (int first = 0; first < num_kv_heads; first += kHeads) {
      const int last = std::min(first + kHeads, num_kv_heads);
      float largest[kHeads];
      for (int h = first; h < last; ++h)
        largest[h - first] = Writer<Format>::amax(rows + int64_t{h} * n, n);
      for (int h = first; h < last; ++h)
        if (largest[h - first] < kInfinity)
          Writer<Format>::store_row(rows + int64_t{h} * n, n, largest[h - first], out + h * bytes,
                                    scales + h);
        else
          ok = false;
    }
  } else {
    for (int h = 0; h < num_kv_heads; ++h)
      ok &= Writer<Format>::store_row(rows + int64_t{h} * n, n, out + h * bytes, nullptr);
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
