// One work item and its surroundings: which rows it has, where its queries come from and where its results go.
#if defined(PAGEDKV_TASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_TASK_INL_H_
#undef PAGEDKV_TASK_INL_H_
#else
#define PAGEDKV_TASK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/attention_plan.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/token_rows.h"

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
  // Whether states stay in memory, for the item that comes last to merge.
  bool in_parts() const { return job.partials >= 0; }
  // Whose a job's query row is, and which of its rows.
  int sequence(int query) const {
    return job.is_shared() ? plan.shared.members()[job.first_member + query] : job.sequence;
  }
  int64_t query_row(int query) const {
    return args.query_start[sequence(query)] + (job.is_shared() ? 0 : job.first_query + query);
  }
  // A row of the job is (query, head of one kv head), or for a direct job (kv head, its query head).
  int64_t output_row(int row) const {
    const int query = job.direct ? 0 : row / group(),
              kv_head = job.first_head + (job.direct ? row / group() : 0);
    return query_row(query) * args.num_q_heads + kv_head * group() + row % group();
  }
  TokenRange range(int query) const {
    const int s = sequence(query);
    const int64_t after = args.query_start[s + 1] - query_row(query);  // rows from this on
    return visible_range(args, args.seq_lens[s], args.seq_lens[s] - after);
  }
  const uint16_t* visible(int query) const { return scratch.visible + query * kTilesPerPartition; }
};

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
  const int head_dim = task.args.pages.keys.head_dim, lanes = task.plan.key_lanes,
            rows = task.num_rows();
  const int padded = task.job.direct ? rows : (rows + 3) / 4 * 4;
  if (padded != rows || lanes != head_dim)
    std::memset(task.scratch.queries, 0, static_cast<size_t>(padded) * lanes * sizeof(float));
  for (int r = 0; r < rows; ++r) {
    const Block block = block_of(task, r);
    const float* HWY_RESTRICT query = task.args.queries + task.output_row(r) * head_dim;
    float* HWY_RESTRICT packed =
        task.scratch.queries + int64_t{block.first} * lanes + (r - block.first) * kLanes;
    for (int e = 0; e < head_dim; ++e) {
      const int lane = Format::lane(e);
      packed[lane / kLanes * block.count * kLanes + lane % kLanes] =
          query[e] * task.rule.query_factor;
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
  state_max(sink, lanes) =
      task.args.sinks[task.output_row(row) % task.args.num_q_heads] * static_cast<float>(kLog2e);
  state_sum(sink, lanes) = 1.0f;
  merge_row(total, sink, lanes);
}

// Writes the job's rows: from the item's totals, or from the partials that all items of the job have left.
void write_rows(const Task& task) {
  AttentionPlan::Impl& plan = task.plan;
  const auto write = with_page_format(task.args.pages.values.format,
                                      [](auto format) { return &write_row<decltype(format)>; });
  const int lanes = plan.value_lanes, stride = plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r) {
    float* const total = task.scratch.total + int64_t{r} * stride;
    if (task.in_parts()) {
      state_sum(total, lanes) = 0.0f;
      for (int p = 0; p < task.job.num_partitions; ++p)
        merge_row(total,
                  plan.partial_state(task.job, task.job.first_partition + p) + int64_t{r} * stride,
                  lanes);
    }
    if (task.args.sinks) merge_sink(task, r, total);
    write(task, r, total);
  }
}

// The last of the items that a job waits for writes its rows; an item of a shared job, for each sequence that has no other.
void finish(const Task& task) {
  AttentionPlan::Impl& plan = task.plan;
  if (!task.job.is_shared()) {
    if (!task.in_parts() || plan.finish_item(task.item.job)) write_rows(task);
    return;
  }
  for (int q = 0; q < task.job.num_queries; ++q) {
    const int32_t owner = plan.owner(task.sequence(q), task.job.first_head);
    if (plan.finish_item(owner))
      write_rows(
          {task.args, plan, plan.jobs[owner], task.item, task.scratch, task.rule, task.tokens});
  }
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_TASK_INL_H_
