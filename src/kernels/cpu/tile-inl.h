// Many rows (prefill, or sequences that share pages), a head_dim that fills no whole register, or many query heads a kv head:
// one kv head's tile is decoded to floats once, zero-padded, and all rows of the job use it from L1.
#if defined(PAGEDKV_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_TILE_INL_H_
#undef PAGEDKV_TILE_INL_H_
#else
#define PAGEDKV_TILE_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/cpu/blocks-inl.h"
#include "kernels/cpu/partition-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// Decodes 16 rows of one kv head to floats, storage order, padded with zeros.
template <class Format>
void decode_tile(const std::byte* HWY_RESTRICT rows, const int64_t* HWY_RESTRICT offsets,
                 int head_dim, int lanes, float* HWY_RESTRICT tile) {
  constexpr int kGroups = Reader<Format>::kGroups, kChunk = kGroups * kLanes;
  const int whole = head_dim / kChunk;
  for (int t = 0; t < kTile; ++t) {
    const std::byte* row = rows + offsets[t];
    float* HWY_RESTRICT out = tile + t * lanes;
    for (int c = 0; c < whole; ++c)
      PAGEDKV_UNROLL (part, kParts) {
        const typename Reader<Format>::Raw raw = Reader<Format>::load(row, c, part);
        unroll<kGroups>([&](auto v) PAGEDKV_LAMBDA {
          hn::StoreU(Reader<Format>::template get<v>(raw), kFloats,
                     out + c * kChunk + v * kLanes + part * kNative);
        });
      }
    for (int i = whole * kChunk; i < lanes; ++i) out[i] = 0.0f;
    for (int e = whole * kChunk; e < head_dim; ++e) out[Format::lane(e)] = Format::load(row, e);
  }
}

// One kv head's 16 rows of the next tile. Each block of four rows of the job fetches some of them while it uses the present
// tile: all at once would wait for line buffers (16 to 64 rows, f16 in memory: 2 to 11 % of the time).
struct NextTile {
  const std::byte* rows;
  int64_t row_bytes;
  int tokens_per_block;
  int64_t offsets[kTile];

  HWY_INLINE void fetch(int block) const {
    const int from = block * tokens_per_block, to = std::min(from + tokens_per_block, kTile);
    for (int t = from; t < to; ++t)
      for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(rows + offsets[t] + b, 0, 2);
  }
};

// Decodes tile after tile of a partition's K or V and calls use(tile, next).
template <class Use>
HWY_INLINE void for_each_decoded_tile(const Task& task, const PageArray& array, int lanes,
                                      int64_t partition_token, const Sight& sight, bool gather,
                                      const Use& use) {
  const auto decode =
      with_page_format(array.format, [](auto format) { return &decode_tile<decltype(format)>; });
  const int64_t bytes = row_bytes(array.format, array.head_dim),
                token_bytes = bytes * task.args.pages.num_kv_heads;
  const std::byte* rows = array.data + task.job.first_head * bytes;
  NextTile next{rows, bytes, (kTile - 1) / ((task.num_rows() + 3) / 4) + 1, {}};
  int64_t slots[kTile], offsets[kTile];
  task.tokens.slots(partition_token + sight.first_tile * kTile, slots);
  for (int tile = sight.first_tile; tile < sight.last_tile; ++tile) {
    if (gather) gather_tile_scales(task, slots, tile);
    for (int t = 0; t < kTile; ++t) offsets[t] = slots[t] * token_bytes;
    task.tokens.slots(partition_token + std::min(tile + 1, sight.last_tile - 1) * kTile, slots);
    if (gather) prefetch_tile_scales(task, slots[0]);
    for (int t = 0; t < kTile; ++t) next.offsets[t] = slots[t] * token_bytes;
    decode(rows, offsets, array.head_dim, lanes, task.scratch.tile);
    use(tile, next);
  }
}

// What the rows [row, row + count) of a tile job see of a tile.
struct BlockVisible {
  uint32_t all, any;
};

HWY_INLINE BlockVisible block_visible(const Task& task, const Sight& sight, int row, int count,
                                      int tile) {
  if (sight.all[tile] == sight.any[tile]) return {sight.all[tile], sight.any[tile]};
  BlockVisible bits{0xffff, 0};
  for (int q = row / task.group(); q <= (row + count - 1) / task.group(); ++q) {
    bits.all &= task.visible(q)[tile];
    bits.any |= task.visible(q)[tile];
  }
  return bits;
}

// Scores of all rows with the decoded tile.
template <class Lanes>
void score_rows(const Task& task, const Sight& sight, int tile, const NextTile& next, Lanes lanes) {
  const auto* keys = reinterpret_cast<const std::byte*>(task.scratch.tile);
  int64_t offsets[kTile];
  for (int t = 0; t < kTile; ++t) offsets[t] = int64_t{t} * lanes * 4;
  for (int r = 0, rows = task.num_rows(); r < rows; r += 4) {
    next.fetch(r / 4);
    if (block_visible(task, sight, r, std::min(4, rows - r), tile).any)
      score_tile<F32Page, 4>(task.scratch.queries + int64_t{r} * lanes, lanes, keys, offsets,
                             task.scratch.scores + int64_t{r} * kScoreStride + tile * kTile,
                             Ahead<false>{nullptr});
  }
}

// All rows take the decoded tile's values, four at a time where they see the same tokens. Where they differ, a common
// beginning is done together and the rest row by row, so that each row still takes its tokens in rising order.
template <class Lanes>
void value_rows(const Task& task, const Sight& sight, int tile, const NextTile& next, float* states,
                Lanes lanes) {
  const auto* values = reinterpret_cast<const std::byte*>(task.scratch.tile);
  const int stride = lanes + kStateTail;
  int64_t offsets[kTile];
  for (int t = 0; t < kTile; ++t) offsets[t] = int64_t{t} * lanes * 4;
  for (int row = 0, rows = task.num_rows(); row < rows; row += 4) {
    next.fetch(row / 4);
    const int count = std::min(4, rows - row);
    const float* weights = task.scratch.scores + int64_t{row} * kScoreStride + tile * kTile;
    float* out = states + int64_t{row} * stride;
    const BlockVisible bits = block_visible(task, sight, row, count, tile);
    // Up to the first token that some row sees and some other does not.
    const uint32_t differ = bits.any & ~bits.all;
    const uint32_t together = differ ? bits.all & ((differ & -differ) - 1) : bits.all;
    if (together)
      value_block<F32Page>(count, weights, values, offsets, together, out, stride, lanes,
                           Ahead<false>{nullptr});
    for (int r = 0; differ && r < count; ++r)
      value_tile<F32Page, 1>(weights + r * kScoreStride, values, offsets,
                             task.visible((row + r) / task.group())[tile] & ~together,
                             out + int64_t{r} * stride, stride, lanes, Ahead<false>{nullptr});
  }
}

void tile_partition(const Task& task, int partition, const Sight& sight, float* states) {
  const LayerPages& p = task.args.pages;
  const int64_t token = int64_t{partition} * kPartition;
  with_lanes(task.plan.key_lanes, [&](auto lanes) PAGEDKV_LAMBDA {
    for_each_decoded_tile(task, p.keys, lanes, token, sight, true,
                          [&](int tile, const NextTile& next)
                              PAGEDKV_LAMBDA { score_rows(task, sight, tile, next, lanes); });
  });
  softmax_rows(task, partition, sight, states);
  with_lanes(task.plan.value_lanes, [&](auto lanes) PAGEDKV_LAMBDA {
    for_each_decoded_tile(task, p.values, lanes, token, sight, false,
                          [&](int tile, const NextTile& next) PAGEDKV_LAMBDA {
                            value_rows(task, sight, tile, next, states, lanes);
                          });
  });
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_TILE_INL_H_
