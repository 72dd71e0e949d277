// Scores of one tile: the dot products of up to four queries with 16 keys.
#if defined(PAGEDKV_SCORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_SCORE_INL_H_
#undef PAGEDKV_SCORE_INL_H_
#else
#define PAGEDKV_SCORE_INL_H_
#endif

#include "kernels/attention_plan.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/prefetch-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// Keys in one register block: with four queries that is 16 accumulators on AVX-512 and 8 for each half of the lanes on
// AVX2 (both halves at once would spill).
constexpr int kKeys = kNative / 4;

// The tree's levels that lie within one group of keys; then lane j of the result holds, of key 4 t' + i of the
// tile, partial sum j mod 4, where t' = j / 4 counts the keys of the block.
HWY_INLINE Vec join_keys(const Vec* sums) {
#if HWY_MAX_BYTES >= 64 && !defined(PAGEDKV_FOUR_LANES)
  return add_blocks(add_halves(sums[0], sums[2]), add_halves(sums[1], sums[3]));
#elif HWY_MAX_BYTES >= 32 && !defined(PAGEDKV_FOUR_LANES)
  return add_blocks(sums[0], sums[1]);
#else
  return sums[0];
#endif
}

// Takes the partial sums of lanes [part * kNative, ...) into `sums`: the tree's levels between whole registers.
template <int kPart>
HWY_INLINE void add_part(Vec x, Vec& sum, Vec& even, Vec& odd) {
  if constexpr (kParts == 4) {  // lanes 0-3 + 8-11, 4-7 + 12-15, then both
    if constexpr (kPart == 0) even = x;
    if constexpr (kPart == 1) odd = x;
    if constexpr (kPart == 2) even = hn::Add(even, x);
    if constexpr (kPart == 3) sum = hn::Add(even, hn::Add(odd, x));
  } else {
    if constexpr (kPart == 0) sum = x;
    if constexpr (kPart == 1) sum = hn::Add(sum, x);
  }
}

// Dot products over chunks [chunk, chunk + kCount), of which chunk is a multiple of kCount: what the accumulators gain.
template <class Format, int kPart, int kCount, int kQueries, bool kAhead>
HWY_INLINE void add_products(const float* HWY_RESTRICT queries,
                             const std::byte* const (&keys)[kKeys], int chunk,
                             Vec (&acc)[kQueries][kKeys], Ahead<kAhead>& ahead) {
  constexpr int kGroups = Reader<Format>::kGroups;
  PAGEDKV_UNROLL (i, kCount) {
    const int c = chunk + i;
    typename Reader<Format>::Raw raw[kKeys];
    PAGEDKV_UNROLL (t, kKeys) raw[t] = Reader<Format>::load(keys[t], c, kPart);
    if constexpr (kPart == 0)
      ahead.template step<kKeys * kChunkBytes<Format>>(kCount == 1 ? chunk : i);
    unroll<kGroups>([&](auto v) PAGEDKV_LAMBDA {
      Vec key[kKeys];
      PAGEDKV_UNROLL (t, kKeys) key[t] = Reader<Format>::template get<v>(raw[t]);
      PAGEDKV_UNROLL (g, kQueries) {
        Vec query = hn::LoadU(
            kFloats, queries + ((c * kGroups + v) * kQueries + g) * kLanes + kPart * kNative);
#if HWY_TARGET == HWY_AVX2
        // Else GCC loads it in each multiply-add: twice as often (decode on Zen 3: 4 % slower; prefill is faster so).
        if constexpr (kAhead) asm("" : "+x"(query.raw));
#endif
        PAGEDKV_UNROLL (t, kKeys) acc[g][t] = hn::MulAdd(key[t], query, acc[g][t]);
      }
    });
  }
}

// Part `kPart` of the lanes of kQueries x kKeys dot products.
template <class Format, int kQueries, bool kAhead, int kPart>
HWY_INLINE void dot_part(const float* HWY_RESTRICT queries, const std::byte* const (&keys)[kKeys],
                         int chunks, Vec (&sum)[kQueries][kKeys], Vec (&even)[kQueries][kKeys],
                         Vec (&odd)[kQueries][kKeys], Ahead<kAhead>& ahead) {
  Vec acc[kQueries][kKeys];
  PAGEDKV_UNROLL (g, kQueries)
    PAGEDKV_UNROLL (t, kKeys) acc[g][t] = hn::Zero(kFloats);
  int c = 0;
  for (; c + 4 <= chunks; c += 4) add_products<Format, kPart, 4>(queries, keys, c, acc, ahead);
  for (; c < chunks; ++c) add_products<Format, kPart, 1>(queries, keys, c, acc, ahead);
  PAGEDKV_UNROLL (g, kQueries)
    PAGEDKV_UNROLL (t, kKeys) add_part<kPart>(acc[g][t], sum[g][t], even[g][t], odd[g][t]);
}

// scores[g * kScoreStride + t] = query g . key t, for t in 0..15. queries: [lanes / 16, kQueries, 16].
// Keys are taken in groups {i, i + 4, i + 8, i + 12}: after the tree's first levels four keys share a register, and the last
// two levels over i = 0..3 leave 16 scores in token order, so that the tree wastes no lane for any kQueries.
template <class Format, int kQueries, bool kAhead, class Lanes>
HWY_INLINE void score_tile(const float* HWY_RESTRICT queries, Lanes lanes,
                           const std::byte* HWY_RESTRICT keys, const int64_t* HWY_RESTRICT offsets,
                           float* HWY_RESTRICT scores, Ahead<kAhead> ahead) {
  const int chunks = lanes / (Reader<Format>::kGroups * kLanes);
  for (int first = 0; first < kTile; first += kNative) {
    HWY_ALIGN float joined[4][kQueries][kNative];
    for (int i = 0; i < 4; ++i) {
      Vec sum[kQueries][kKeys], even[kQueries][kKeys], odd[kQueries][kKeys];
      asm("" : "+r"(queries));  // else GCC loads all queries before the loop, which spills them
      const std::byte* at[kKeys];
      PAGEDKV_UNROLL (t, kKeys) at[t] = keys + offsets[first + i + 4 * t];
      dot_part<Format, kQueries, kAhead, 0>(queries, at, chunks, sum, even, odd, ahead);
      if constexpr (kParts > 1)
        dot_part<Format, kQueries, kAhead, 1>(queries, at, chunks, sum, even, odd, ahead);
      if constexpr (kParts > 2) {
        dot_part<Format, kQueries, kAhead, 2>(queries, at, chunks, sum, even, odd, ahead);
        dot_part<Format, kQueries, kAhead, 3>(queries, at, chunks, sum, even, odd, ahead);
      }
      PAGEDKV_UNROLL (g, kQueries) hn::Store(join_keys(sum[g]), kFloats, joined[i][g]);
    }
    PAGEDKV_UNROLL (g, kQueries) {
      const Vec even = add_pairs(hn::Load(kFloats, joined[0][g]), hn::Load(kFloats, joined[2][g]));
      const Vec odd = add_pairs(hn::Load(kFloats, joined[1][g]), hn::Load(kFloats, joined[3][g]));
      hn::StoreU(add_neighbours(even, odd), kFloats, scores + g * kScoreStride + first);
    }
  }
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_SCORE_INL_H_
