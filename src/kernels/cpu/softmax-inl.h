// Scores of a partition to weights, and the merging of partitions.
#if defined(PAGEDKV_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_SOFTMAX_INL_H_
#undef PAGEDKV_SOFTMAX_INL_H_
#else
#define PAGEDKV_SOFTMAX_INL_H_
#endif

#include <cstring>

#include "kernels/attention_plan.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// A row of a state: value_lanes floats, then maximum and sum.
HWY_INLINE float& state_max(float* state, int lanes) { return state[lanes]; }
HWY_INLINE float& state_sum(float* state, int lanes) { return state[lanes + 1]; }

// What a row of a partition needs beside its scores.
struct Partition {
  int first_tile, last_tile;  // tiles [first, last) of the partition hold what any row sees
  const float* key_scales;    // [kPartition] of this kv head, or null
  const float* value_scales;  // [kPartition] of this kv head, or null
  const float* bias;          // of this query, to the sequence's end at most, or null
};

HWY_INLINE Vec hide(Vec x, uint32_t visible, int part) {
  uint8_t bits[8] = {};
  const uint16_t mine = static_cast<uint16_t>(visible >> (part * kNative));
  std::memcpy(bits, &mine, sizeof mine);
  return hn::IfThenElse(hn::LoadMaskBits(kFloats, bits), x, hn::Set(kFloats, -kInfinity));
}

// The biases of lanes [part * kNative, + kNative) of a tile. Those of hidden tokens may lie past the row's end.
HWY_INLINE Vec load_bias(const float* bias, uint32_t visible, int part) {
  if (visible == 0xffff) return hn::LoadU(kFloats, bias + part * kNative);
  HWY_ALIGN float seen[kNative];
  for (int j = 0; j < kNative; ++j)
    seen[j] = visible >> (part * kNative + j) & 1 ? bias[part * kNative + j] : 0.0f;
  return hn::Load(kFloats, seen);
}

// Scores to final scores: scale, soft cap, bias, hidden tokens to -inf. Returns the maximum.
HWY_INLINE float finish_scores(float* HWY_RESTRICT scores, const uint16_t* HWY_RESTRICT visible,
                               const Partition& p, const ScoreRule& rule) {
  Vec max[kParts];
  PAGEDKV_UNROLL (j, kParts) max[j] = hn::Set(kFloats, -kInfinity);
  for (int tile = p.first_tile; tile < p.last_tile; ++tile) {
    const uint32_t seen = visible[tile];
    if (seen == 0) continue;
    PAGEDKV_UNROLL (j, kParts) {
      const int at = tile * kTile + j * kNative;
      Vec s = hn::LoadU(kFloats, scores + at);
      if (p.key_scales) s = hn::Mul(s, hn::LoadU(kFloats, p.key_scales + at));
      if (rule.softcap) s = capped(s, rule.cap);
      if (p.bias)
        s = hn::MulAdd(load_bias(p.bias + tile * kTile, seen, j),
                       hn::Set(kFloats, static_cast<float>(kLog2e)), s);
      if (seen != 0xffff) s = hide(s, seen, j);
      hn::StoreU(s, kFloats, scores + at);
      max[j] = hn::Max(max[j], s);
    }
  }
  for (int j = 1; j < kParts; ++j) max[0] = hn::Max(max[0], max[j]);
  return hn::GetLane(hn::MaxOfLanes(kFloats, max[0]));
}

// One row of a partition: scores become weights in place, maximum and sum go to the state. A sum of 0 says
// that the row sees nothing here.
HWY_INLINE void softmax_row(float* HWY_RESTRICT scores, const uint16_t* HWY_RESTRICT visible,
                            const Partition& p, const ScoreRule& rule, float* HWY_RESTRICT state,
                            int lanes) {
  const float max = finish_scores(scores, visible, p, rule);
  const Vec vmax = hn::Set(kFloats, max);
  Vec sum[kParts];
  PAGEDKV_UNROLL (j, kParts) sum[j] = hn::Zero(kFloats);
  for (int tile = p.first_tile; tile < p.last_tile; ++tile) {
    if (visible[tile] == 0) continue;
    PAGEDKV_UNROLL (j, kParts) {
      const int at = tile * kTile + j * kNative;
      Vec w = exp2_nonpositive(hn::Sub(hn::LoadU(kFloats, scores + at), vmax));
      sum[j] = hn::Add(sum[j], w);
      if (p.value_scales) w = hn::Mul(w, hn::LoadU(kFloats, p.value_scales + at));
      hn::StoreU(w, kFloats, scores + at);
    }
  }
  HWY_ALIGN float sums[kLanes];
  PAGEDKV_UNROLL (j, kParts) hn::Store(sum[j], kFloats, sums + j * kNative);
  state_max(state, lanes) = max;
  state_sum(state, lanes) = add_lanes(sums);
}

// Takes the next partition's row into a total: as it is where the total is empty, else both brought to one maximum.
HWY_INLINE void merge_row(float* HWY_RESTRICT total, const float* HWY_RESTRICT next, int lanes) {
  const float next_max = next[lanes], next_sum = next[lanes + 1];
  if (next_sum == 0.0f) return;
  if (state_sum(total, lanes) == 0.0f) {
    std::memcpy(total, next, (static_cast<size_t>(lanes) + 2) * sizeof(float));
    return;
  }
  const float max = std::max(state_max(total, lanes), next_max);
  const Vec a = hn::Set(kFloats, exp2_one(state_max(total, lanes) - max));
  const Vec b = hn::Set(kFloats, exp2_one(next_max - max));
  state_sum(total, lanes) = hn::GetLane(hn::MulAdd(
      hn::Set(kFloats, next_sum), b, hn::Mul(hn::Set(kFloats, state_sum(total, lanes)), a)));
  for (int i = 0; i < lanes; i += kNative) {
    const Vec scaled = hn::Mul(hn::LoadU(kFloats, total + i), a);
    hn::StoreU(hn::MulAdd(hn::LoadU(kFloats, next + i), b, scaled), kFloats, total + i);
  }
  state_max(total, lanes) = max;
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_SOFTMAX_INL_H_
