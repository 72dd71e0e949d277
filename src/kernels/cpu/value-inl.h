// Weighted sums of values: up to four output rows take the visible values of one tile.
#if defined(PAGEDKV_VALUE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_VALUE_INL_H_
#undef PAGEDKV_VALUE_INL_H_
#else
#define PAGEDKV_VALUE_INL_H_
#endif

#include <algorithm>
#include <bit>

#include "kernels/attention_plan.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/prefetch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// Registers of an output row that a loop over tokens holds: 16 accumulators on AVX-512, 8 on AVX2. With the values and a
// weight that is what the registers hold.
template <int kQueries>
constexpr int kColumns = (kNative == 16 ? 16 : 8) / (kQueries <= 2 ? 2 : 4);

// A unit of columns is what one load holds: kGroups registers, kLanes apart. Units go part by part, then chunk by chunk.
template <class Format>
HWY_INLINE int unit_lane(int unit) {
  return unit / kParts * Reader<Format>::kGroups * kLanes + unit % kParts * kNative;
}

// Groups [kFirst, kFirst + kCount) of units [first, first + kUnits) of out[g] += sum over t in [from, to) of
// weights[g][t] * value t.
template <class Format, int kQueries, int kUnits, int kFirst, int kCount, bool kAhead>
HWY_INLINE void add_columns(const float* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT values,
                            const int64_t* HWY_RESTRICT offsets, int from, int to,
                            float* HWY_RESTRICT out, int out_stride, int first,
                            Ahead<kAhead>& ahead) {
  using Read = Reader<Format>;
  const auto column = [&](int g, int u, int v) PAGEDKV_LAMBDA {
    return out + g * out_stride + unit_lane<Format>(first + u) + (kFirst + v) * kLanes;
  };
  Vec acc[kQueries][kUnits][kCount];
  PAGEDKV_UNROLL (g, kQueries)
    PAGEDKV_UNROLL (u, kUnits)
      PAGEDKV_UNROLL (v, kCount) acc[g][u][v] = hn::LoadU(kFloats, column(g, u, v));
  for (int t = from; t < to; ++t) {
    const std::byte* row = values + offsets[t];
    Vec value[kUnits][kCount];
    unroll<kUnits>([&](auto u) PAGEDKV_LAMBDA {
      const typename Read::Raw raw = Read::load(row, (first + u) / kParts, (first + u) % kParts);
      unroll<kCount>([&](auto v)
                         PAGEDKV_LAMBDA { value[u][v] = Read::template get<kFirst + v>(raw); });
    });
    ahead.template step<kUnits * kChunkBytes<Format> / kParts * kCount / Read::kGroups>(t);
    PAGEDKV_UNROLL (g, kQueries) {
      const Vec weight = hn::Set(kFloats, weights[g * kScoreStride + t]);
      PAGEDKV_UNROLL (u, kUnits)
        PAGEDKV_UNROLL (v, kCount) acc[g][u][v] = hn::MulAdd(value[u][v], weight, acc[g][u][v]);
    }
  }
  PAGEDKV_UNROLL (g, kQueries)
    PAGEDKV_UNROLL (u, kUnits)
      PAGEDKV_UNROLL (v, kCount) hn::StoreU(acc[g][u][v], kFloats, column(g, u, v));
}

// The same for all groups of the units.
template <class Format, int kQueries, int kUnits, bool kAhead>
HWY_INLINE void add_units(const float* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT values,
                          const int64_t* HWY_RESTRICT offsets, int from, int to,
                          float* HWY_RESTRICT out, int out_stride, int first,
                          Ahead<kAhead>& ahead) {
  constexpr int kGroups = Reader<Format>::kGroups, kCount = std::min(kGroups, kColumns<kQueries>);
  unroll<kGroups / kCount>([&](auto part) PAGEDKV_LAMBDA {
    add_columns<Format, kQueries, kUnits, part * kCount, kCount>(weights, values, offsets, from, to,
                                                                 out, out_stride, first, ahead);
  });
}

template <class Format, int kQueries, bool kAhead, class Lanes>
HWY_INLINE void add_run(const float* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT values,
                        const int64_t* HWY_RESTRICT offsets, int from, int to,
                        float* HWY_RESTRICT out, int out_stride, Lanes lanes,
                        Ahead<kAhead>& ahead) {
  constexpr int kGroups = Reader<Format>::kGroups;
  constexpr int kUnits = std::max(1, kColumns<kQueries> / kGroups);
  const int units = lanes / (kNative * kGroups);
  int at = 0;
  for (; at + kUnits <= units; at += kUnits)
    add_units<Format, kQueries, kUnits>(weights, values, offsets, from, to, out, out_stride, at,
                                        ahead);
  if constexpr (kUnits > 2)
    for (; at + 2 <= units; at += 2)
      add_units<Format, kQueries, 2>(weights, values, offsets, from, to, out, out_stride, at,
                                     ahead);
  for (; at < units; ++at)
    add_units<Format, kQueries, 1>(weights, values, offsets, from, to, out, out_stride, at, ahead);
}

// out[g] (g < kQueries) += weights[g][t] * value t for each t whose bit is set in `visible`, in rising order.
template <class Format, int kQueries, bool kAhead, class Lanes>
HWY_INLINE void value_tile(const float* HWY_RESTRICT weights, const std::byte* HWY_RESTRICT values,
                           const int64_t* HWY_RESTRICT offsets, uint32_t visible,
                           float* HWY_RESTRICT out, int out_stride, Lanes lanes,
                           Ahead<kAhead> ahead) {
  while (visible) {  // run by run; nearly always there is one
    const int from = std::countr_zero(visible), to = from + std::countr_one(visible >> from);
    add_run<Format, kQueries>(weights, values, offsets, from, to, out, out_stride, lanes, ahead);
    visible &= ~0u << to;
  }
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_VALUE_INL_H_
