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

template <class Format>
void pack_queries(const Task& task) {
  const int head_dim = task.args.pages.keys.head_dim, lanes = task.plan.key_lanes, rows = task.num_rows();
  for (int r = 0; r < rows; ++r) {
    const float* HWY_RESTRICT query = task.args.queries + task.output_row(r) * head_dim;
    float* HWY_RESTRICT packed = task.scratch.queries + int64_t{r} * lanes;
    if (lanes != head_dim) std::memset(packed, 0, static_cast<size_t>(lanes) * sizeof(float));
    for (int e = 0; e < head_dim; ++e) packed[Format::lane(e)] = query[e] * task.rule.query_factor;
  }
  const size_t padding = static_cast<size_t>((rows + 3) / 4 * 4 - rows) * lanes;  // whole blocks of 4 are scored
  std::memset(task.scratch.queries + int64_t{rows} * lanes, 0, padding * sizeof(float));
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

// Fills the visible bits of each query and finds the tiles that any of them sees.
void find_visible(const Task& task, int partition, int* first_tile, int* last_tile) {
  *first_tile = kTilesPerPartition;
  *last_tile = 0;
  for (int q = 0; q < task.job.num_queries; ++q) {
    const TokenRange range = task.range(q);
    const uint8_t* mask = mask_row(task.args, task.query_row(q));
    uint16_t* bits = task.scratch.visible + q * kTilesPerPartition;
    for (int tile = 0; tile < kTilesPerPartition; ++tile) {
      bits[tile] = visible_bits(range, mask, int64_t{partition} * kPartition + tile * kTile);
      if (bits[tile] == 0) continue;
      *first_tile = std::min(*first_tile, tile);
      *last_tile = std::max(*last_tile, tile + 1);
    }
  }
}

// Copies the scales of a tile to [head][token].
HWY_INLINE void gather_scales(const float* scales, const int64_t* slots, int num_kv_heads, int first_head,
                              int num_heads, float* HWY_RESTRICT out) {
  for (int h = 0; h < num_heads; ++h)
    PAGEDKV_UNROLL for (int t = 0; t < kTile; ++t)
      out[h * kScoreStride + t] = scales[slots[t] * num_kv_heads + first_head + h];
}

void gather_tile_scales(const Task& task, const int64_t* slots, int tile) {
  const LayerPages& p = task.args.pages;
  const Job& job = task.job;
  if (has_scales(p.keys.format))
    gather_scales(p.keys.scales, slots, p.num_kv_heads, job.first_head, job.num_heads,
                  task.scratch.key_scales + tile * kTile);
  if (has_scales(p.values.format))
    gather_scales(p.values.scales, slots, p.num_kv_heads, job.first_head, job.num_heads,
                  task.scratch.value_scales + tile * kTile);
}

void softmax_rows(const Task& task, int first_tile, int last_tile, float* states) {
  const LayerPages& p = task.args.pages;
  const int lanes = task.plan.value_lanes, stride = task.plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r) {
    const int unit = r / task.group();  // a kv head if direct, else a query
    const int head = task.job.direct ? unit : 0;
    const Partition partition{
        first_tile, last_tile, has_scales(p.keys.format) ? task.scratch.key_scales + head * kScoreStride : nullptr,
        has_scales(p.values.format) ? task.scratch.value_scales + head * kScoreStride : nullptr};
    float* const state = states + int64_t{r} * stride;
    std::memset(state, 0, static_cast<size_t>(lanes) * sizeof(float));
    softmax_row(task.scratch.scores + int64_t{r} * kScoreStride, task.visible(task.job.direct ? 0 : unit), partition,
                task.rule, state, lanes);
  }
}

// ---- direct -------------------------------------------------------------------------------------------------------

// Prefetching needs some distance; small tiles are fetched several ahead.
constexpr int64_t kAheadBytes = 16384;

// One pass over a partition's tiles, and what comes after it.
struct Pass {
  const PageArray& array;
  int64_t row_bytes;        // of one head
  int64_t token_bytes;      // of all heads
  int64_t partition_token;  // the partition's first
  int first_tile, last_tile;
  const PageArray* next_array;  // read after this pass; null: nothing
  int64_t next_token;           // its first

  // Where the bytes lie that this pass should prefetch beside tile `tile` and the share `part` of `parts`.
  const std::byte* ahead(const TokenRows& tokens, int num_kv_heads, int tile, int part, int parts) const {
    int64_t target = tile + (kAheadBytes - 1) / (kTile * token_bytes) + 1;
    const PageArray* from = &array;
    int64_t token = partition_token + target * kTile;
    if (target >= last_tile && next_array) {
      from = next_array;
      token = next_token + (target - last_tile) * kTile;
    }
    token = tokens.clamp(token);
    const int64_t bytes = pagedkv::row_bytes(from->format, from->head_dim);
    if (tokens.whole_tiles())
      return from->data + tokens.slot(token) * num_kv_heads * bytes + part * (kTile * num_kv_heads * bytes / parts);
    return from->data + tokens.slot(tokens.clamp(token + kTile * part / parts)) * num_kv_heads * bytes;
  }
};

// The pages of other heads lie between a job's where it has not all of them: then its rows are fetched one by one.
void prefetch_rows(const Task& task, const Pass& pass, int tile) {
  if (tile + 1 >= pass.last_tile) return;
  int64_t slots[kTile];
  task.tokens.slots(pass.partition_token + (tile + 1) * kTile, slots);
  const int64_t bytes = pass.row_bytes * task.job.num_heads;
  for (const int64_t slot : slots) {
    const std::byte* row = pass.array.data + slot * pass.token_bytes + task.job.first_head * pass.row_bytes;
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row + b, 0, 2);
  }
}

template <class Format, bool kAhead>
HWY_INLINE void score_block(int queries, const float* q, int lanes, const std::byte* keys, const int64_t* offsets,
                            float* scores, Ahead<kAhead> ahead) {
  switch (queries) {
    case 1: return score_tile<Format, 1>(q, lanes, keys, offsets, scores, ahead);
    case 2: return score_tile<Format, 2>(q, lanes, keys, offsets, scores, ahead);
    case 3: return score_tile<Format, 3>(q, lanes, keys, offsets, scores, ahead);
    default: return score_tile<Format, 4>(q, lanes, keys, offsets, scores, ahead);
  }
}

template <class Format, bool kAhead>
HWY_INLINE void value_block(int queries, const float* weights, const std::byte* values, const int64_t* offsets,
                            uint32_t visible, float* out, int stride, int lanes, Ahead<kAhead> ahead) {
  switch (queries) {
    case 1: return value_tile<Format, 1>(weights, values, offsets, visible, out, stride, lanes, ahead);
    case 2: return value_tile<Format, 2>(weights, values, offsets, visible, out, stride, lanes, ahead);
    case 3: return value_tile<Format, 3>(weights, values, offsets, visible, out, stride, lanes, ahead);
    default: return value_tile<Format, 4>(weights, values, offsets, visible, out, stride, lanes, ahead);
  }
}

// Calls visit(tile, head, slots' offsets, prefetch address or null) for each tile of the pass and each kv head of the job.
template <class Visit>
HWY_INLINE void for_each_tile_head(const Task& task, const Pass& pass, bool gather, const Visit& visit) {
  const int num_heads = task.job.num_heads, num_kv_heads = task.args.pages.num_kv_heads;
  const bool all_heads = num_heads == num_kv_heads;
  for (int tile = pass.first_tile; tile < pass.last_tile; ++tile) {
    int64_t offsets[kTile];
    task.tokens.slots(pass.partition_token + tile * kTile, offsets);
    if (gather) gather_tile_scales(task, offsets, tile);
    PAGEDKV_UNROLL for (int t = 0; t < kTile; ++t) offsets[t] *= pass.token_bytes;
    if (!all_heads) prefetch_rows(task, pass, tile);
    for (int h = 0; h < num_heads; ++h)
      visit(tile, h, offsets, all_heads ? pass.ahead(task.tokens, num_kv_heads, tile, h, num_heads) : nullptr);
  }
}

template <class Format>
void score_pass(const Task& task, const Pass& pass) {
  const int group = task.group(), lanes = task.plan.key_lanes;
  for_each_tile_head(task, pass, true, [&](int tile, int h, const int64_t* offsets, const std::byte* next) HWY_ATTR {
    const std::byte* keys = pass.array.data + (task.job.first_head + h) * pass.row_bytes;
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

template <class Format>
void value_pass(const Task& task, const Pass& pass, float* states) {
  const int group = task.group(), lanes = task.plan.value_lanes, stride = task.plan.state_stride();
  for_each_tile_head(task, pass, false, [&](int tile, int h, const int64_t* offsets, const std::byte* next) HWY_ATTR {
    const std::byte* values = pass.array.data + (task.job.first_head + h) * pass.row_bytes;
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

void direct_partition(const Task& task, int partition, int first_tile, int last_tile, float* states) {
  const LayerPages& p = task.args.pages;
  const auto score = with_page_format(p.keys.format, [](auto format) { return &score_pass<decltype(format)>; });
  const auto value = with_page_format(p.values.format, [](auto format) { return &value_pass<decltype(format)>; });
  const int64_t key_bytes = row_bytes(p.keys.format, p.keys.head_dim);
  const int64_t value_bytes = row_bytes(p.values.format, p.values.head_dim);
  const int64_t token = int64_t{partition} * kPartition;
  const bool last = partition + 1 == task.item.first_partition + task.item.num_partitions;
  score(task, Pass{p.keys, key_bytes, key_bytes * p.num_kv_heads, token, first_tile, last_tile, &p.values,
                   token + first_tile * kTile});
  softmax_rows(task, first_tile, last_tile, states);
  value(task, Pass{p.values, value_bytes, value_bytes * p.num_kv_heads, token, first_tile, last_tile,
                   last ? nullptr : &p.keys, token + kPartition}, states);
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
                                      int first_tile, int last_tile, bool gather, const Use& use) {
  const auto decode = with_page_format(array.format, [](auto format) { return &decode_tile<decltype(format)>; });
  const int64_t bytes = row_bytes(array.format, array.head_dim), token_bytes = bytes * task.args.pages.num_kv_heads;
  const std::byte* rows = array.data + task.job.first_head * bytes;
  int64_t slots[kTile], offsets[kTile], next[kTile];
  task.tokens.slots(partition_token + first_tile * kTile, slots);
  for (int tile = first_tile; tile < last_tile; ++tile) {
    if (gather) gather_tile_scales(task, slots, tile);
    for (int t = 0; t < kTile; ++t) offsets[t] = slots[t] * token_bytes;
    task.tokens.slots(partition_token + std::min(tile + 1, last_tile - 1) * kTile, slots);
    for (int t = 0; t < kTile; ++t) next[t] = slots[t] * token_bytes;
    decode(rows, offsets, next, array.head_dim, lanes, task.scratch.tile);
    use(tile);
  }
}

// Rows [row, row + 4) of the job see `and`: all of them, `or`: at least one.
struct BlockVisible {
  uint32_t all = 0xffff, any = 0;
};

BlockVisible block_visible(const Task& task, int row, int count, int tile) {
  BlockVisible bits;
  for (int q = row / task.group(); q <= (row + count - 1) / task.group(); ++q) {
    bits.all &= task.visible(q)[tile];
    bits.any |= task.visible(q)[tile];
  }
  return bits;
}

// Four rows at a time where all see the same tokens. Where they differ, a common beginning is done together and the rest
// row by row, so that each row still takes its tokens in rising order.
HWY_INLINE void value_rows(const Task& task, int row, int count, int tile, const int64_t* offsets, float* states) {
  const int lanes = task.plan.value_lanes, stride = task.plan.state_stride();
  const auto* values = reinterpret_cast<const std::byte*>(task.scratch.tile);
  const float* weights = task.scratch.scores + int64_t{row} * kScoreStride + tile * kTile;
  float* out = states + int64_t{row} * stride;
  const BlockVisible bits = block_visible(task, row, count, tile);
  // Up to the first token that some row sees and some other does not.
  const uint32_t differ = bits.any & ~bits.all;
  const uint32_t together = differ ? bits.all & ((differ & -differ) - 1) : bits.all;
  if (together)
    value_block<F32Page>(count, weights, values, offsets, together, out, stride, lanes, Ahead<false>{nullptr});
  if (!differ) return;
  for (int r = 0; r < count; ++r)
    value_block<F32Page>(1, weights + r * kScoreStride, values, offsets,
                         task.visible((row + r) / task.group())[tile] & ~together, out + int64_t{r} * stride, stride,
                         lanes, Ahead<false>{nullptr});
}

void tile_partition(const Task& task, int partition, int first_tile, int last_tile, float* states) {
  const LayerPages& p = task.args.pages;
  const int rows = task.num_rows(), key_lanes = task.plan.key_lanes, value_lanes = task.plan.value_lanes;
  const int64_t token = int64_t{partition} * kPartition;
  int64_t key_offsets[kTile], value_offsets[kTile];
  for (int t = 0; t < kTile; ++t) {
    key_offsets[t] = int64_t{t} * key_lanes * 4;
    value_offsets[t] = int64_t{t} * value_lanes * 4;
  }
  for_each_decoded_tile(task, p.keys, key_lanes, token, first_tile, last_tile, true, [&](int tile) HWY_ATTR {
    for (int r = 0; r < rows; r += 4)
      if (block_visible(task, r, std::min(4, rows - r), tile).any)
        score_tile<F32Page, 4>(task.scratch.queries + int64_t{r} * key_lanes, key_lanes,
                               reinterpret_cast<const std::byte*>(task.scratch.tile), key_offsets,
                               task.scratch.scores + int64_t{r} * kScoreStride + tile * kTile, Ahead<false>{nullptr});
  });
  softmax_rows(task, first_tile, last_tile, states);
  for_each_decoded_tile(task, p.values, value_lanes, token, first_tile, last_tile, false, [&](int tile) HWY_ATTR {
    for (int r = 0; r < rows; r += 4) value_rows(task, r, std::min(4, rows - r), tile, value_offsets, states);
  });
}

// ---- an item ------------------------------------------------------------------------------------------------------

void clear_sums(const Task& task, float* states) {
  for (int r = 0; r < task.num_rows(); ++r)
    state_sum(states + int64_t{r} * task.plan.state_stride(), task.plan.value_lanes) = 0.0f;
}

void run_partition(const Task& task, int partition) {
  float* const states = task.shared() ? task.plan.partial_state(task.job, partition) : task.scratch.partial;
  int first_tile, last_tile;
  find_visible(task, partition, &first_tile, &last_tile);
  if (first_tile >= last_tile) return clear_sums(task, states);
  if (task.job.direct)
    direct_partition(task, partition, first_tile, last_tile, states);
  else
    tile_partition(task, partition, first_tile, last_tile, states);
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
