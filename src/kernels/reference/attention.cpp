// The definition of attention (docs/decisions/0001): for one query row and head, what is computed and in which order.
// Nothing here is clever; a work item is one (row, query head).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/float_environment.h"
#include "base/page_codec.h"
#include "kernels/arithmetic.h"
#include "kernels/reference/reference.h"
#include "kernels/visibility.h"

namespace pagedkv::reference {
namespace {

constexpr int kMaxHeadDim = 512;

// Partitions of a sequence merge into one of these, left to right.
struct SoftmaxState {
  float max = -kInfinity;       // largest score so far, base 2
  float sum = 0.0f;             // sum of exp2(score - max); 0: no token seen yet
  float out[kMaxHeadDim] = {};  // sum of exp2(score - max) * v
};

void merge(SoftmaxState& into, const SoftmaxState& next, int head_dim) {
  if (next.sum == 0.0f) return;
  if (into.sum == 0.0f) {
    into = next;
    return;
  }
  const float max = std::max(into.max, next.max);
  const float a = exp2_nonpositive(into.max - max), b = exp2_nonpositive(next.max - max);
  into.sum = std::fma(next.sum, b, into.sum * a);
  for (int e = 0; e < head_dim; ++e) into.out[e] = std::fma(next.out[e], b, into.out[e] * a);
  into.max = max;
}

// One query row and head, and where its sequence's tokens live.
struct Row {
  const AttentionArgs& args;
  int64_t row;
  int64_t sequence;
  int kv_head;
  TokenRange range;

  int64_t slot(int64_t token) const {
    const int64_t page_size = args.pages.page_size;
    const int64_t page = args.block_table[sequence * args.block_table_stride + token / page_size];
    return page * page_size + token % page_size;
  }
  bool sees(int64_t token) const {
    const uint8_t* mask = mask_row(args, row);
    const float* bias = bias_row(args, row);
    return token >= range.first && token < range.last && (!mask || mask[token]) &&
           (!bias || bias[token] != -kInfinity);
  }
};

template <class Format>
float score(const Row& r, const float* query, const ScoreRule& rule, int64_t token) {
  const PageArray& keys = r.args.pages.keys;
  const int64_t at = r.slot(token) * r.args.pages.num_kv_heads + r.kv_head;
  const std::byte* key = keys.data + at * row_bytes(Format::kFormat, keys.head_dim);
  float ordered[kMaxHeadDim + kLanes] = {}, lanes[kLanes] = {};
  for (int e = 0; e < keys.head_dim; ++e) ordered[Format::lane(e)] = Format::load(key, e);
  for (int i = 0; i < Format::num_lanes(keys.head_dim); i += kLanes)
    for (int j = 0; j < kLanes; ++j) lanes[j] = std::fma(ordered[i + j], query[i + j], lanes[j]);
  float s = add_lanes(lanes);
  if (Format::kHasScales) s = s * keys.scales[at];
  if (rule.softcap) s = rule.capped(s);
  const float* bias = bias_row(r.args, r.row);
  return bias ? std::fma(bias[token], static_cast<float>(kLog2e), s) : s;
}

template <class Format>
void add_value(const Row& r, float weight, int64_t token, float* out) {
  const PageArray& values = r.args.pages.values;
  const int64_t at = r.slot(token) * r.args.pages.num_kv_heads + r.kv_head;
  const std::byte* value = values.data + at * row_bytes(Format::kFormat, values.head_dim);
  if (Format::kHasScales) weight = weight * values.scales[at];
  for (int e = 0; e < values.head_dim; ++e)
    out[e] = std::fma(weight, Format::load(value, e), out[e]);
}

template <class KeyFormat, class ValueFormat>
SoftmaxState attend_partition(const Row& r, const float* query, const ScoreRule& rule,
                              int64_t first) {
  SoftmaxState state;
  float scores[kPartition];
  const int64_t last = std::min(first + kPartition, r.range.last);
  for (int64_t t = first; t < last; ++t)
    if (r.sees(t)) {
      scores[t - first] = score<KeyFormat>(r, query, rule, t);
      state.max = std::max(state.max, scores[t - first]);
    }
  float lanes[kLanes] = {};
  for (int64_t t = first; t < last; ++t)
    if (r.sees(t)) {
      const float p = exp2_nonpositive(scores[t - first] - state.max);
      lanes[t % kLanes] += p;
      add_value<ValueFormat>(r, p, t, state.out);
    }
  state.sum = add_lanes(lanes);
  return state;
}

template <class KeyFormat, class ValueFormat>
void attend_row(const Row& r, int q_head) {
  const AttentionArgs& args = r.args;
  const int key_dim = args.pages.keys.head_dim, value_dim = args.pages.values.head_dim;
  const int64_t at = r.row * args.num_q_heads + q_head;
  const ScoreRule rule(args.scale, args.logit_softcap);
  float query[kMaxHeadDim + kLanes] = {};
  for (int e = 0; e < key_dim; ++e)
    query[KeyFormat::lane(e)] = args.queries[at * key_dim + e] * rule.query_factor;

  SoftmaxState state;
  for (int64_t first = r.range.first / kPartition * kPartition; first < r.range.last;
       first += kPartition)
    merge(state, attend_partition<KeyFormat, ValueFormat>(r, query, rule, first), value_dim);
  if (args.sinks) {
    SoftmaxState sink;
    sink.max = args.sinks[q_head] * static_cast<float>(kLog2e);
    sink.sum = 1.0f;
    merge(state, sink, value_dim);
  }
  for (int e = 0; e < value_dim; ++e)
    args.out[at * value_dim + e] = state.sum == 0.0f ? 0.0f : state.out[e] / state.sum;
  if (args.log_sum_exp)
    args.log_sum_exp[at] = state.sum == 0.0f ? -kInfinity : log_sum_exp(state.max, state.sum);
}

void attend_item(const AttentionArgs& args, int64_t item) {
  const int64_t row = item / args.num_q_heads;
  const int q_head = static_cast<int>(item % args.num_q_heads);
  const int32_t* next =
      std::upper_bound(args.query_start, args.query_start + args.num_seqs + 1, row);
  const int64_t sequence = next - args.query_start - 1;
  const int64_t seq_len = args.seq_lens[sequence];
  const int64_t position = seq_len - (args.query_start[sequence + 1] - row);
  const Row r{args, row, sequence, q_head / (args.num_q_heads / args.pages.num_kv_heads),
              visible_range(args, seq_len, position)};
  with_page_format(args.pages.keys.format, [&](auto key_format) {
    with_page_format(args.pages.values.format, [&](auto value_format) {
      attend_row<decltype(key_format), decltype(value_format)>(r, q_head);
    });
  });
}

}  // namespace

void attend(const AttentionArgs& args, AttentionPlan::Impl&, Executor& executor) noexcept {
  const int64_t num_items = int64_t{args.query_start[args.num_seqs]} * args.num_q_heads;
  executor.run(num_items, [&](int64_t item, int) {
    const FloatEnvironment environment;
    attend_item(args, item);
  });
}

}  // namespace pagedkv::reference
