// Decode: one query row. Pages outermost, all kv heads inside; codes become floats in registers. Each K and V byte is read
// once from memory, and once from L1 for every further 4 query heads of its kv head.
#if defined(PAGEDKV_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_DIRECT_INL_H_
#undef PAGEDKV_DIRECT_INL_H_
#else
#define PAGEDKV_DIRECT_INL_H_
#endif

#include <utility>

#include "kernels/cpu/blocks-inl.h"
#include "kernels/cpu/partition-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// Prefetching needs some distance; small tiles are fetched several ahead.
constexpr int64_t kAheadBytes = 16384;

// One array, as a pass reads it.
struct Rows {
  explicit Rows(const PageArray& array, int num_kv_heads)
      : data(array.data),
        row_bytes(pagedkv::row_bytes(array.format, array.head_dim)),
        token_bytes(row_bytes * num_kv_heads) {}
  const std::byte* data;
  int64_t row_bytes;    // of one head
  int64_t token_bytes;  // of all heads
};

// One pass over a partition's tiles, and what comes after it.
struct Pass {
  Pass(const TokenRows& tokens, const Rows& rows, int64_t partition_token, const Sight& sight,
       const Rows* next_rows, int64_t next_token)
      : tokens(tokens),
        rows(rows),
        partition_token(partition_token),
        first_tile(sight.first_tile),
        last_tile(sight.last_tile),
        next_rows(next_rows),
        next_token(next_token),
        distance(static_cast<int>((kAheadBytes - 1) / (kTile * rows.token_bytes)) + 1) {}

  const TokenRows& tokens;
  const Rows rows;
  const int64_t partition_token;  // the partition's first
  const int first_tile, last_tile;
  const Rows* next_rows;     // read after this pass; null: nothing
  const int64_t next_token;  // its first
  const int distance;        // tiles

  int64_t token(int tile) const { return partition_token + int64_t{tile} * kTile; }

  // What to prefetch beside `tile`: of which array, and from which token on.
  std::pair<const Rows*, int64_t> ahead(int tile) const {
    const int target = tile + distance;
    if (target < last_tile || !next_rows) return {&rows, tokens.clamp(token(target))};
    return {next_rows, tokens.clamp(next_token + int64_t{target - last_tile} * kTile)};
  }
};

// The pages of other heads lie between a job's where it has not all of them: then its rows are fetched one by one.
void prefetch_rows(const Task& task, const Pass& pass, int tile) {
  if (tile + 1 >= pass.last_tile) return;
  int64_t slots[kTile];
  pass.tokens.slots(pass.token(tile + 1), slots);
  const int64_t bytes = pass.rows.row_bytes * task.job.num_heads;
  for (const int64_t slot : slots) {
    const std::byte* row =
        pass.rows.data + slot * pass.rows.token_bytes + task.job.first_head * pass.rows.row_bytes;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
  }
}

// Calls visit(tile, head, offsets, next) for each tile of the pass and each kv head of the job; offsets: of the tile's 16
// tokens; next: where to prefetch beside it. The heads share out the tile ahead in address order.
template <class Visit>
HWY_INLINE void for_each_tile_head(const Task& task, const Pass& pass, bool gather,
                                   const Visit& visit) {
  const int num_heads = task.job.num_heads;
  const bool all_heads = num_heads == task.args.pages.num_kv_heads,
             whole_tiles = pass.tokens.whole_tiles();
  for (int tile = pass.first_tile; tile < pass.last_tile; ++tile) {
    int64_t offsets[kTile];
    pass.tokens.slots(pass.token(tile), offsets);
    if (gather) {
      prefetch_tile_scales(task, pass.tokens.slot(pass.tokens.clamp(pass.token(tile + 2))));
      gather_tile_scales(task, offsets, tile);
    }
    PAGEDKV_UNROLL (t, kTile) offsets[t] *= pass.rows.token_bytes;
    if (!all_heads) prefetch_rows(task, pass, tile);
    const auto [next, token] = pass.ahead(tile);
    const std::byte* at = next->data + pass.tokens.slot(token) * next->token_bytes;
    for (int h = 0; h < num_heads; ++h) {
      const Ahead<true> walk{at};
      visit(tile, h, offsets, all_heads ? walk : walk.stay());
      if (whole_tiles)
        at += kTile * next->row_bytes;
      else
        at = next->data + pass.tokens.slot(pass.tokens.clamp(token + kTile * (h + 1) / num_heads)) *
                              next->token_bytes;
    }
  }
}

template <class Format, class Lanes>
void score_heads(const Task& task, const Pass& pass, Lanes lanes) {
  const int group = task.group();
  for_each_tile_head(task, pass, true,
                     [&](int tile, int h, const int64_t* offsets, Ahead<true> next) PAGEDKV_LAMBDA {
                       const std::byte* keys =
                           pass.rows.data + (task.job.first_head + h) * pass.rows.row_bytes;
                       for (int g = 0; g < group; g += 4) {
                         const float* q = task.scratch.queries + int64_t{h * group + g} * lanes;
                         float* scores = task.scratch.scores +
                                         int64_t{h * group + g} * kScoreStride + tile * kTile;
                         score_block<Format>(group - g, q, lanes, keys, offsets, scores,
                                             g == 0 ? next : next.stay());
                       }
                     });
}

template <class Format, class Lanes>
void value_heads(const Task& task, const Pass& pass, float* states, Lanes lanes) {
  const int group = task.group(), stride = lanes + kStateTail;
  for_each_tile_head(
      task, pass, false,
      [&](int tile, int h, const int64_t* offsets, Ahead<true> next) PAGEDKV_LAMBDA {
        const std::byte* values = pass.rows.data + (task.job.first_head + h) * pass.rows.row_bytes;
        const uint32_t visible = task.visible(0)[tile];
        for (int g = 0; g < group; g += 4) {
          const float* weights =
              task.scratch.scores + int64_t{h * group + g} * kScoreStride + tile * kTile;
          float* out = states + int64_t{h * group + g} * stride;
          value_block<Format>(group - g, weights, values, offsets, visible, out, stride, lanes,
                              g == 0 ? next : next.stay());
        }
      });
}

template <class Format>
void score_pass(const Task& task, const Pass& pass) {
  with_lanes(task.plan.key_lanes,
             [&](auto lanes) PAGEDKV_LAMBDA { score_heads<Format>(task, pass, lanes); });
}

template <class Format>
void value_pass(const Task& task, const Pass& pass, float* states) {
  with_lanes(task.plan.value_lanes,
             [&](auto lanes) PAGEDKV_LAMBDA { value_heads<Format>(task, pass, states, lanes); });
}

void direct_partition(const Task& task, int partition, const Sight& sight, float* states) {
  const LayerPages& p = task.args.pages;
  const auto score =
      with_page_format(p.keys.format, [](auto format) { return &score_pass<decltype(format)>; });
  const auto value =
      with_page_format(p.values.format, [](auto format) { return &value_pass<decltype(format)>; });
  const Rows keys(p.keys, p.num_kv_heads), values(p.values, p.num_kv_heads);
  const int64_t token = int64_t{partition} * kPartition;
  const bool last = partition + 1 == task.item.first_partition + task.item.num_partitions;
  score(task, Pass(task.tokens, keys, token, sight, &values, token + sight.first_tile * kTile));
  softmax_rows(task, partition, sight, states);
  value(task, Pass(task.tokens, values, token, sight, last ? nullptr : &keys, token + kPartition),
        states);
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_DIRECT_INL_H_
