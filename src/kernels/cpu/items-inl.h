// A work item from start to end. Two ways through a partition, with the same operations in the same order: direct-inl.h and
// tile-inl.h.
#if defined(PAGEDKV_ITEMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PAGEDKV_ITEMS_INL_H_
#undef PAGEDKV_ITEMS_INL_H_
#else
#define PAGEDKV_ITEMS_INL_H_
#endif

#include "kernels/cpu/direct-inl.h"
#include "kernels/cpu/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

void clear_sums(const Task& task, float* states) {
  for (int r = 0; r < task.num_rows(); ++r)
    state_sum(states + int64_t{r} * task.plan.state_stride(), task.plan.value_lanes) = 0.0f;
}

// Copies the states of a shared job's partition to the partials of the jobs that own its rows.
void hand_out(const Task& task, int partition) {
  const int head = task.job.first_head;
  const int64_t floats = int64_t{task.group()} * task.plan.state_stride();
  for (int q = 0; q < task.job.num_queries; ++q) {
    const Job& owner = task.plan.jobs[task.plan.owner(task.sequence(q), head)];
    std::memcpy(task.plan.partial_state(owner, partition) + (head - owner.first_head) * floats,
                task.scratch.partial + q * floats, static_cast<size_t>(floats) * sizeof(float));
  }
}

void run_partition(const Task& task, int partition) {
  float* const states =
      task.in_parts() ? task.plan.partial_state(task.job, partition) : task.scratch.partial;
  const Sight sight = find_visible(task, partition);
  if (sight.empty())
    clear_sums(task, states);
  else if (task.job.direct)
    direct_partition(task, partition, sight, states);
  else
    tile_partition(task, partition, sight, states);
  if (task.job.is_shared()) return hand_out(task, partition);
  if (task.in_parts()) return;
  const int64_t stride = task.plan.state_stride();
  for (int r = 0; r < task.num_rows(); ++r)
    merge_row(task.scratch.total + r * stride, states + r * stride, task.plan.value_lanes);
}

void run_item(const Task& task) {
  with_page_format(task.args.pages.keys.format,
                   [](auto format) { return &pack_queries<decltype(format)>; })(task);
  if (!task.in_parts()) clear_sums(task, task.scratch.total);
  for (int p = 0; p < task.item.num_partitions; ++p)
    run_partition(task, task.item.first_partition + p);
  finish(task);
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // PAGEDKV_ITEMS_INL_H_
