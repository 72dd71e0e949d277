// What both ways through a partition share: what its rows see, the scales of its tokens, the softmax between the passes.
#if defined(PAGEDKV_PARTITION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_PARTITION_INL_H_
#undef PAGEDKV_PARTITION_INL_H_
#else
#define PAGEDKV_PARTITION_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/cpu/task-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// What the rows of a job see of a partition, beside the bits of each query in scratch.
struct Sight {
  uint16_t all[kTilesPerPartition];  // seen by every query
  uint16_t any[kTilesPerPartition];  // seen by some query
  int first_tile, last_tile;         // tiles [first, last) hold what any query sees

  bool empty() const { return first_tile >= last_tile; }
};

Sight find_visible(const Task& task, int partition) {
  Sight sight;
  sight.first_tile = kTilesPerPartition;
  sight.last_tile = 0;
  for (int tile = 0; tile < kTilesPerPartition; ++tile) {
    sight.all[tile] = 0xffff;
    sight.any[tile] = 0;
  }
  for (int q = 0; q < task.job.num_queries; ++q) {
    const TokenRange range = task.range(q);
    const uint8_t* mask = mask_row(task.args, task.query_row(q));
    const float* bias = bias_row(task.args, task.query_row(q));
    uint16_t* bits = task.scratch.visible + q * kTilesPerPartition;
    for (int tile = 0; tile < kTilesPerPartition; ++tile) {
      bits[tile] = visible_bits(range, mask, bias, int64_t{partition} * kPartition + tile * kTile);
      sight.all[tile] &= bits[tile];
      sight.any[tile] |= bits[tile];
    }
  }
  for (int tile = 0; tile < kTilesPerPartition; ++tile)
    if (sight.any[tile]) {
      sight.first_tile = std::min(sight.first_tile, tile);
      sight.last_tile = tile + 1;
    }
  return sight;
}

// Copies the scales of a tile, [token][kv head] in the page, to [head][token] for the heads of the job.
HWY_INLINE void gather_scales(const Task& task, const float* scales, const int64_t* slots,
                              float* HWY_RESTRICT out) {
  const int64_t num_kv_heads = task.args.pages.num_kv_heads;
  for (int h = 0; h < task.job.num_heads; ++h, out += kScoreStride) {
    const float* at = scales + task.job.first_head + h;
    if (task.tokens.whole_tiles()) {
      at += slots[0] * num_kv_heads;
      PAGEDKV_UNROLL (t, kTile) out[t] = at[t * num_kv_heads];
    } else {
      for (int t = 0; t < kTile; ++t) out[t] = at[slots[t] * num_kv_heads];
    }
  }
}

void gather_tile_scales(const Task& task, const int64_t* slots, int tile) {
  const LayerPages& p = task.args.pages;
  if (has_scales(p.keys.format))
    gather_scales(task, p.keys.scales, slots, task.scratch.key_scales + tile * kTile);
  if (has_scales(p.values.format))
    gather_scales(task, p.values.scales, slots, task.scratch.value_scales + tile * kTile);
}

// Scales are few but lie apart from the codes: without this, gathering them took an eighth of a long decode.
HWY_INLINE void prefetch_scales(const float* scales, int64_t slot, int num_kv_heads) {
  if (!scales) return;
  const auto* at = reinterpret_cast<const std::byte*>(scales + slot * num_kv_heads);
  for (int b = 0; b < kTile * num_kv_heads * 4; b += 64) __builtin_prefetch(at + b, 0, 2);
}

HWY_INLINE void prefetch_tile_scales(const Task& task, int64_t slot) {
  const LayerPages& p = task.args.pages;
  prefetch_scales(p.keys.scales, slot, p.num_kv_heads);
  prefetch_scales(p.values.scales, slot, p.num_kv_heads);
}

void softmax_rows(const Task& task, int partition, const Sight& sight, float* states) {
  const LayerPages& p = task.args.pages;
  const int lanes = task.plan.value_lanes, stride = task.plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r) {
    const int unit = r / task.group();  // a kv head if direct, else a query
    const int head = task.job.direct ? unit : 0, query = task.job.direct ? 0 : unit;
    const float* bias = bias_row(task.args, task.query_row(query));
    const Partition shared{
        sight.first_tile, sight.last_tile,
        has_scales(p.keys.format) ? task.scratch.key_scales + head * kScoreStride : nullptr,
        has_scales(p.values.format) ? task.scratch.value_scales + head * kScoreStride : nullptr,
        bias ? bias + int64_t{partition} * kPartition : nullptr};
    float* const state = states + int64_t{r} * stride;
    std::memset(state, 0, static_cast<size_t>(lanes) * sizeof(float));
    softmax_row(task.scratch.scores + int64_t{r} * kScoreStride, task.visible(query), shared,
                task.rule, state, lanes);
  }
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_PARTITION_INL_H_
