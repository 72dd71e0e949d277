// The work items of a call. Two ways through a sequence's tokens, with the same operations in the same order:
//   direct  one query row (decode): pages outermost, all kv heads inside, codes become floats in registers. Each
//           K and V byte is read once from memory for every 4 query heads of a kv head.
//   tile    many rows (prefill), a head_dim that fills no whole register, or many query heads a kv head: one kv head's tile is
//           decoded to floats once, zero-padded, and all rows use it.
#if defined(PAGEDKV_ITEMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_ITEMS_INL_H_
#undef PAGEDKV_ITEMS_INL_H_
#else
#define PAGEDKV_ITEMS_INL_H_
#endif

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/attention_plan.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/score-inl.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/token_rows.h"
#include "kernels/cpu/value-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// What one item works on.
struct Task {
  const AttentionArgs& args;
  AttentionPlan::Impl& plan;
  const Job& job;
  const WorkItem& item;
  const WorkerScratch scratch;
  const ScoreRule rule;
  const TokenRows tokens;

  int group() const { return plan.queries_per_kv; }
  int num_rows() const { return plan.rows(job); }
  bool shared() const { return job.num_items > 1; }
  int64_t query_row(int query) const { return args.query_start[job.sequence] + job.first_query + query; }
  // A row of the job is (query, head of one kv head), or for a direct job (kv head, its query head).
  int64_t output_row(int row) const {
    const int query = job.direct ? 0 : row / group(), kv_head = job.first_head + (job.direct ? row / group() : 0);
    return query_row(query) * args.num_q_heads + kv_head * group() + row % group();
  }
  TokenRange range(int query) const {
    const int64_t seq_len = args.seq_lens[job.sequence];
    const int64_t query_len = args.query_start[job.sequence + 1] - args.query_start[job.sequence];
    return visible_range(args, seq_len, seq_len - query_len + job.first_query + query);
  }
  const uint16_t* visible(int query) const { return scratch.visible + query * kTilesPerPartition; }
};

// ---- queries in, rows out ------------------------------------------------------------------------------------------

// Rows are scored in blocks of four: of the whole job, or, in a direct job, of each kv head.
struct Block {
  int first, count;
};

HWY_INLINE Block block_of(const Task& task, int row) {
  if (!task.job.direct) return {row / 4 * 4, 4};
  const int begin = row - row % task.group() % 4, end = row - row % task.group() + task.group();
  return {begin, std::min(4, end - begin)};
}

// A block's queries lie together, [lanes / 16, rows of the block, 16], so that its inner loop needs one pointer.
template <class Format>
void pack_queries(const Task& task) {
  const int head_dim = task.args.pages.keys.head_dim, lanes = task.plan.key_lanes, rows = task.num_rows();
  const int padded = task.job.direct ? rows : (rows + 3) / 4 * 4;
  if (padded != rows || lanes != head_dim)
    std::memset(task.scratch.queries, 0, static_cast<size_t>(padded) * lanes * sizeof(float));
  for (int r = 0; r < rows; ++r) {
    const Block block = block_of(task, r);
    const float* HWY_RESTRICT query = task.args.queries + task.output_row(r) * head_dim;
    float* HWY_RESTRICT packed = task.scratch.queries + int64_t{block.first} * lanes + (r - block.first) * kLanes;
    for (int e = 0; e < head_dim; ++e) {
      const int lane = Format::lane(e);
      packed[lane / kLanes * block.count * kLanes + lane % kLanes] = query[e] * task.rule.query_factor;
    }
  }
}

template <class Format>
void write_row(const Task& task, int row, float* HWY_RESTRICT total) {
  const int head_dim = task.args.pages.values.head_dim, lanes = task.plan.value_lanes;
  float* HWY_RESTRICT out = task.args.out + task.output_row(row) * head_dim;
  const float sum = state_sum(total, lanes);
  if (sum == 0.0f) {
    std::memset(out, 0, static_cast<size_t>(head_dim) * sizeof(float));
  } else {
    const Vec divisor = hn::Set(kFloats, sum);
    for (int i = 0; i < lanes; i += kNative)
      hn::StoreU(hn::Div(hn::LoadU(kFloats, total + i), divisor), kFloats, total + i);
    for (int e = 0; e < head_dim; ++e) out[e] = total[Format::lane(e)];
  }
  if (task.args.log_sum_exp)
    task.args.log_sum_exp[task.output_row(row)] =
        sum == 0.0f ? -kInfinity : log_sum_exp(state_max(total, lanes), sum);
}

// The sink is one more partition, merged last: its score, a weight of 1 and no value.
void merge_sink(const Task& task, int row, float* total) {
  const int lanes = task.plan.value_lanes;
  float* const sink = task.scratch.partial;
  std::memset(sink, 0, static_cast<size_t>(lanes) * sizeof(float));
  state_max(sink, lanes) = task.args.sinks[task.output_row(row) % task.args.num_q_heads] * static_cast<float>(kLog2e);
  state_sum(sink, lanes) = 1.0f;
  merge_row(total, sink, lanes);
}

// Writes the job's rows: from the item's own totals, or, by the last of the items that share the job, from all partials.
void finish(const Task& task) {
  AttentionPlan::Impl& plan = task.plan;
  if (task.shared() && !plan.finish_item(task.item.job)) return;
  const auto write = with_page_format(task.args.pages.values.format,
                                      [](auto format) { return &write_row<decltype(format)>; });
  const int lanes = plan.value_lanes, stride = plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r) {
    float* const total = task.scratch.total + int64_t{r} * stride;
    if (task.shared()) {
      state_sum(total, lanes) = 0.0f;
      for (int p = 0; p < task.job.num_partitions; ++p)
        merge_row(total, plan.partial_state(task.job, task.job.first_partition + p) + int64_t{r} * stride, lanes);
    }
    if (task.args.sinks) merge_sink(task, r, total);
    write(task, r, total);
  }
}

// ---- one partition, common to both ways ----------------------------------------------------------------------------

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
    uint16_t* bits = task.scratch.visible + q * kTilesPerPartition;
    for (int tile = 0; tile < kTilesPerPartition; ++tile) {
      bits[tile] = visible_bits(range, mask, int64_t{partition} * kPartition + tile * kTile);
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
HWY_INLINE void gather_scales(const Task& task, const float* scales, const int64_t* slots, float* HWY_RESTRICT out) {
  const int64_t num_kv_heads = task.args.pages.num_kv_heads;
  for (int h = 0; h < task.job.num_heads; ++h, out += kScoreStride) {
    const float* at = scales + task.job.first_head + h;
    if (task.tokens.whole_tiles()) {
      at += slots[0] * num_kv_heads;
      PAGEDKV_UNROLL for (int t = 0; t < kTile; ++t) out[t] = at[t * num_kv_heads];
    } else {
      for (int t = 0; t < kTile; ++t) out[t] = at[slots[t] * num_kv_heads];
    }
  }
}

void gather_tile_scales(const Task& task, const int64_t* slots, int tile) {
  const LayerPages& p = task.args.pages;
  if (has_scales(p.keys.format)) gather_scales(task, p.keys.scales, slots, task.scratch.key_scales + tile * kTile);
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

void softmax_rows(const Task& task, const Sight& sight, float* states) {
  const LayerPages& p = task.args.pages;
  const int lanes = task.plan.value_lanes, stride = task.plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r) {
    const int unit = r / task.group();  // a kv head if direct, else a query
    const int head = task.job.direct ? unit : 0;
    const Partition partition{
        sight.first_tile, sight.last_tile, has_scales(p.keys.format) ? task.scratch.key_scales + head * kScoreStride : nullptr,
        has_scales(p.values.format) ? task.scratch.value_scales + head * kScoreStride : nullptr};
    float* const state = states + int64_t{r} * stride;
    std::memset(state, 0, static_cast<size_t>(lanes) * sizeof(float));
    softmax_row(task.scratch.scores + int64_t{r} * kScoreStride, task.visible(task.job.direct ? 0 : unit), partition,
                task.rule, state, lanes);
  }
}

// Calls use(lanes), with the count as a constant where it is a common one.
template <class Use>
HWY_INLINE void with_lanes(int lanes, const Use& use) {
  switch (lanes) {
    case 64: return use(FixedLanes<64>{});
    case 128: return use(FixedLanes<128>{});
    default: return use(AnyLanes{lanes});
  }
}

// ---- direct -------------------------------------------------------------------------------------------------------

// Prefetching needs some distance; small tiles are fetched several ahead.
constexpr int64_t kAheadBytes = 16384;

// One array, as a pass reads it.
struct Rows {
  explicit Rows(const PageArray& array, int num_kv_heads)
      : data(array.data), row_bytes(pagedkv::row_bytes(array.format, array.head_dim)),
        token_bytes(row_bytes * num_kv_heads) {}
  const std::byte* data;
  int64_t row_bytes;    // of one head
  int64_t token_bytes;  // of all heads
};

// One pass over a partition's tiles, and what comes after it.
struct Pass {
  Pass(const TokenRows& tokens, const Rows& rows, int64_t partition_token, const Sight& sight, const Rows* next_rows,
       int64_t next_token)
      : tokens(tokens), rows(rows), partition_token(partition_token), first_tile(sight.first_tile),
        last_tile(sight.last_tile), next_rows(next_rows), next_token(next_token),
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
    const std::byte* row = pass.rows.data + slot * pass.rows.token_bytes + task.job.first_head * pass.rows.row_bytes;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
  }
}

template <class Format, bool kAhead, class Lanes>
HWY_INLINE void score_block(int queries, const float* q, Lanes lanes, const std::byte* keys, const int64_t* offsets,
                            float* scores, Ahead<kAhead> ahead) {
  switch (queries) {
    case 1: return score_tile<Format, 1>(q, lanes, keys, offsets, scores, ahead);
    case 2: return score_tile<Format, 2>(q, lanes, keys, offsets, scores, ahead);
    case 3: return score_tile<Format, 3>(q, lanes, keys, offsets, scores, ahead);
    default: return score_tile<Format, 4>(q, lanes, keys, offsets, scores, ahead);
  }
}

template <class Format, bool kAhead, class Lanes>
HWY_INLINE void value_block(int queries, const float* weights, const std::byte* values, const int64_t* offsets,
                            uint32_t visible, float* out, int stride, Lanes lanes, Ahead<kAhead> ahead) {
  switch (queries) {
    case 1: return value_tile<Format, 1>(weights, values, offsets, visible, out, stride, lanes, ahead);
    case 2: return value_tile<Format, 2>(weights, values, offsets, visible, out, stride, lanes, ahead);
    case 3: return value_tile<Format, 3>(weights, values, offsets, visible, out, stride, lanes, ahead);
    default: return value_tile<Format, 4>(weights, values, offsets, visible, out, stride, lanes, ahead);
  }
}

// Calls visit(tile, head, offsets, next) for each tile of the pass and each kv head of the job; offsets: of the tile's 16
// tokens; next: where to prefetch beside it, or null. The heads share out the tile ahead in address order.
template <class Visit>
HWY_INLINE void for_each_tile_head(const Task& task, const Pass& pass, bool gather, const Visit& visit) {
  const int num_heads = task.job.num_heads;
  const bool all_heads = num_heads == task.args.pages.num_kv_heads, whole_tiles = pass.tokens.whole_tiles();
  for (int tile = pass.first_tile; tile < pass.last_tile; ++tile) {
    int64_t offsets[kTile];
    pass.tokens.slots(pass.token(tile), offsets);
    if (gather) {
      prefetch_tile_scales(task, pass.tokens.slot(pass.tokens.clamp(pass.token(tile + 2))));
      gather_tile_scales(task, offsets, tile);
    }
    PAGEDKV_UNROLL for (int t = 0; t < kTile; ++t) offsets[t] *= pass.rows.token_bytes;
    if (!all_heads) prefetch_rows(task, pass, tile);
    const auto [next, token] = pass.ahead(tile);
    const std::byte* at = next->data + pass.tokens.slot(token) * next->token_bytes;
    for (int h = 0; h < num_heads; ++h) {
      visit(tile, h, offsets, all_heads ? at : nullptr);
      if (whole_tiles)
        at += kTile * next->row_bytes;
      else
        at = next->data + pass.tokens.slot(pass.tokens.clamp(token + kTile * (h + 1) / num_heads)) * next->token_bytes;
    }
  }
}

template <class Format, class Lanes>
void score_heads(const Task& task, const Pass& pass, Lanes lanes) {
  const int group = task.group();
  for_each_tile_head(task, pass, true, [&](int tile, int h, const int64_t* offsets, const std::byte* next) PAGEDKV_LAMBDA {
    const std::byte* keys = pass.rows.data + (task.job.first_head + h) * pass.rows.row_bytes;
    for (int g = 0; g < group; g += 4) {
      const float* q = task.scratch.queries + int64_t{h * group + g} * lanes;
      float* scores = task.scratch.scores + int64_t{h * group + g} * kScoreStride + tile * kTile;
      if (g == 0 && next)
        score_block<Format>(group - g, q, lanes, keys, offsets, scores, Ahead<true>{next});
      else
        score_block<Format>(group - g, q, lanes, keys, offsets, scores, Ahead<false>{nullptr});
    }
  });
}

template <class Format, class Lanes>
void value_heads(const Task& task, const Pass& pass, float* states, Lanes lanes) {
  const int group = task.group(), stride = lanes + kStateTail;
  for_each_tile_head(task, pass, false, [&](int tile, int h, const int64_t* offsets, const std::byte* next) PAGEDKV_LAMBDA {
    const std::byte* values = pass.rows.data + (task.job.first_head + h) * pass.rows.row_bytes;
    const uint32_t visible = task.visible(0)[tile];
    for (int g = 0; g < group; g += 4) {
      const float* weights = task.scratch.scores + int64_t{h * group + g} * kScoreStride + tile * kTile;
      float* out = states + int64_t{h * group + g} * stride;
      if (g == 0 && next)
        value_block<Format>(group - g, weights, values, offsets, visible, out, stride, lanes, Ahead<true>{next});
      else
        value_block<Format>(group - g, weights, values, offsets, visible, out, stride, lanes, Ahead<false>{nullptr});
    }
  });
}

template <class Format>
void score_pass(const Task& task, const Pass& pass) {
  with_lanes(task.plan.key_lanes, [&](auto lanes) PAGEDKV_LAMBDA { score_heads<Format>(task, pass, lanes); });
}

template <class Format>
void value_pass(const Task& task, const Pass& pass, float* states) {
  with_lanes(task.plan.value_lanes, [&](auto lanes) PAGEDKV_LAMBDA { value_heads<Format>(task, pass, states, lanes); });
}

void direct_partition(const Task& task, int partition, const Sight& sight, float* states) {
  const LayerPages& p = task.args.pages;
  const auto score = with_page_format(p.keys.format, [](auto format) { return &score_pass<decltype(format)>; });
  const auto value = with_page_format(p.values.format, [](auto format) { return &value_pass<decltype(format)>; });
  const Rows keys(p.keys, p.num_kv_heads), values(p.values, p.num_kv_heads);
  const int64_t token = int64_t{partition} * kPartition;
  const bool last = partition + 1 == task.item.first_partition + task.item.num_partitions;
  score(task, Pass(task.tokens, keys, token, sight, &values, token + sight.first_tile * kTile));
  softmax_rows(task, sight, states);
  value(task, Pass(task.tokens, values, token, sight, last ? nullptr : &keys, token + kPartition), states);
}

// ---- tile ---------------------------------------------------------------------------------------------------------

// Decodes 16 rows of one kv head to floats, storage order, padded with zeros; fetches the tile after it.
template <class Format>
void decode_tile(const std::byte* HWY_RESTRICT rows, const int64_t* HWY_RESTRICT offsets,
                 const int64_t* HWY_RESTRICT next, int head_dim, int lanes, float* HWY_RESTRICT tile) {
  constexpr int kGroups = Reader<Format>::kGroups, kChunk = kGroups * kLanes;
  const int whole = head_dim / kChunk, bytes = head_dim * Format::kElementBits / 8;
  for (int t = 0; t < kTile; ++t) {
    const std::byte* row = rows + offsets[t];
    float* HWY_RESTRICT out = tile + t * lanes;
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch(rows + next[t] + b, 0, 2);
    for (int c = 0; c < whole; ++c)
      PAGEDKV_UNROLL for (int part = 0; part < kParts; ++part) {
        Vec x[kGroups];
        Reader<Format>::load(row, c, part, x);
        PAGEDKV_UNROLL for (int v = 0; v < kGroups; ++v)
          hn::StoreU(x[v], kFloats, out + c * kChunk + v * kLanes + part * kNative);
      }
    for (int i = whole * kChunk; i < lanes; ++i) out[i] = 0.0f;
    for (int e = whole * kChunk; e < head_dim; ++e) out[Format::lane(e)] = Format::load(row, e);
  }
}

// Decodes tile after tile of a partition's K or V and calls use(tile).
template <class Use>
HWY_INLINE void for_each_decoded_tile(const Task& task, const PageArray& array, int lanes, int64_t partition_token,
                                      const Sight& sight, bool gather, const Use& use) {
  const auto decode = with_page_format(array.format, [](auto format) { return &decode_tile<decltype(format)>; });
  const int64_t bytes = row_bytes(array.format, array.head_dim), token_bytes = bytes * task.args.pages.num_kv_heads;
  const std::byte* rows = array.data + task.job.first_head * bytes;
  int64_t slots[kTile], offsets[kTile], next[kTile];
  task.tokens.slots(partition_token + sight.first_tile * kTile, slots);
  for (int tile = sight.first_tile; tile < sight.last_tile; ++tile) {
    if (gather) gather_tile_scales(task, slots, tile);
    for (int t = 0; t < kTile; ++t) offsets[t] = slots[t] * token_bytes;
    task.tokens.slots(partition_token + std::min(tile + 1, sight.last_tile - 1) * kTile, slots);
    if (gather) prefetch_tile_scales(task, slots[0]);
    for (int t = 0; t < kTile; ++t) next[t] = slots[t] * token_bytes;
    decode(rows, offsets, next, array.head_dim, lanes, task.scratch.tile);
    use(tile);
  }
}

// What the rows [row, row + count) of a tile job see of a tile.
struct BlockVisible {
  uint32_t all, any;
};

HWY_INLINE BlockVisible block_visible(const Task& task, const Sight& sight, int row, int count, int tile) {
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
void score_rows(const Task& task, const Sight& sight, int tile, Lanes lanes) {
  const auto* keys = reinterpret_cast<const std::byte*>(task.scratch.tile);
  int64_t offsets[kTile];
  for (int t = 0; t < kTile; ++t) offsets[t] = int64_t{t} * lanes * 4;
  for (int r = 0, rows = task.num_rows(); r < rows; r += 4)
    if (block_visible(task, sight, r, std::min(4, rows - r), tile).any)
      score_tile<F32Page, 4>(task.scratch.queries + int64_t{r} * lanes, lanes, keys, offsets,
                             task.scratch.scores + int64_t{r} * kScoreStride + tile * kTile, Ahead<false>{nullptr});
}

// All rows take the decoded tile's values, four at a time where they see the same tokens. Where they differ, a common
// beginning is done together and the rest row by row, so that each row still takes its tokens in rising order.
template <class Lanes>
void value_rows(const Task& task, const Sight& sight, int tile, float* states, Lanes lanes) {
  const auto* values = reinterpret_cast<const std::byte*>(task.scratch.tile);
  const int stride = lanes + kStateTail;
  int64_t offsets[kTile];
  for (int t = 0; t < kTile; ++t) offsets[t] = int64_t{t} * lanes * 4;
  for (int row = 0, rows = task.num_rows(); row < rows; row += 4) {
    const int count = std::min(4, rows - row);
    const float* weights = task.scratch.scores + int64_t{row} * kScoreStride + tile * kTile;
    float* out = states + int64_t{row} * stride;
    const BlockVisible bits = block_visible(task, sight, row, count, tile);
    // Up to the first token that some row sees and some other does not.
    const uint32_t differ = bits.any & ~bits.all;
    const uint32_t together = differ ? bits.all & ((differ & -differ) - 1) : bits.all;
    if (together)
      value_block<F32Page>(count, weights, values, offsets, together, out, stride, lanes, Ahead<false>{nullptr});
    for (int r = 0; differ && r < count; ++r)
      value_tile<F32Page, 1>(weights + r * kScoreStride, values, offsets,
                             task.visible((row + r) / task.group())[tile] & ~together, out + int64_t{r} * stride,
                             stride, lanes, Ahead<false>{nullptr});
  }
}

void tile_partition(const Task& task, int partition, const Sight& sight, float* states) {
  const LayerPages& p = task.args.pages;
  const int64_t token = int64_t{partition} * kPartition;
  with_lanes(task.plan.key_lanes, [&](auto lanes) PAGEDKV_LAMBDA {
    for_each_decoded_tile(task, p.keys, lanes, token, sight, true,
                          [&](int tile) PAGEDKV_LAMBDA { score_rows(task, sight, tile, lanes); });
  });
  softmax_rows(task, sight, states);
  with_lanes(task.plan.value_lanes, [&](auto lanes) PAGEDKV_LAMBDA {
    for_each_decoded_tile(task, p.values, lanes, token, sight, false,
                          [&](int tile) PAGEDKV_LAMBDA { value_rows(task, sight, tile, states, lanes); });
  });
}

// ---- an item ------------------------------------------------------------------------------------------------------

void clear_sums(const Task& task, float* states) {
  for (int r = 0; r < task.num_rows(); ++r)
    state_sum(states + int64_t{r} * task.plan.state_stride(), task.plan.value_lanes) = 0.0f;
}

void run_partition(const Task& task, int partition) {
  float* const states = task.shared() ? task.plan.partial_state(task.job, partition) : task.scratch.partial;
  const Sight sight = find_visible(task, partition);
  if (sight.empty()) return clear_sums(task, states);
  if (task.job.direct)
    direct_partition(task, partition, sight, states);
  else
    tile_partition(task, partition, sight, states);
  if (task.shared()) return;
  const int64_t stride = task.plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r)
    merge_row(task.scratch.total + r * stride, states + r * stride, task.plan.value_lanes);
}

void run_item(const Task& task) {
  with_page_format(task.args.pages.keys.format, [](auto format) { return &pack_queries<decltype(format)>; })(task);
  if (!task.shared()) clear_sums(task, task.scratch.total);
  for (int p = 0; p < task.item.num_partitions; ++p) run_partition(task, task.item.first_partition + p);
  finish(task);
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_ITEMS_INL_H_
