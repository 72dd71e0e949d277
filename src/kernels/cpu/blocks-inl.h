// The inner loops for one to four rows, and for lane counts that the compiler knows.
#if defined(PAGEDKV_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_BLOCKS_INL_H_
#undef PAGEDKV_BLOCKS_INL_H_
#else
#define PAGEDKV_BLOCKS_INL_H_
#endif

#include "kernels/cpu/score-inl.h"
#include "kernels/cpu/value-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// Calls use(lanes), with the count as a constant where it is a common one.
template <class Use>
HWY_INLINE void with_lanes(int lanes, const Use& use) {
#ifndef PAGEDKV_NO_FIXED_LANES
  if (lanes == 64) return use(FixedLanes<64>{});
  if (lanes == 128) return use(FixedLanes<128>{});
#endif
  return use(AnyLanes{lanes});
}

template <class Format, bool kAhead, class Lanes>
HWY_INLINE void score_block(int queries, const float* q, Lanes lanes, const std::byte* keys,
                            const int64_t* offsets, float* scores, Ahead<kAhead> ahead) {
  switch (queries) {
    case 1:
      return score_tile<Format, 1>(q, lanes, keys, offsets, scores, ahead);
    case 2:
      return score_tile<Format, 2>(q, lanes, keys, offsets, scores, ahead);
    case 3:
      return score_tile<Format, 3>(q, lanes, keys, offsets, scores, ahead);
    default:
      return score_tile<Format, 4>(q, lanes, keys, offsets, scores, ahead);
  }
}

template <class Format, bool kAhead, class Lanes>
HWY_INLINE void value_block(int queries, const float* weights, const std::byte* values,
                            const int64_t* offsets, uint32_t visible, float* out, int stride,
                            Lanes lanes, Ahead<kAhead> ahead) {
  switch (queries) {
    case 1:
      return value_tile<Format, 1>(weights, values, offsets, visible, out, stride, lanes, ahead);
    case 2:
      return value_tile<Format, 2>(weights, values, offsets, visible, out, stride, lanes, ahead);
    case 3:
      return value_tile<Format, 3>(weights, values, offsets, visible, out, stride, lanes, ahead);
    default:
      return value_tile<Format, 4>(weights, values, offsets, visible, out, stride, lanes, ahead);
  }
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_BLOCKS_INL_H_
