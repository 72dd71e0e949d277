// Attention for each instruction set. The parts: lanes-inl.h (registers, formats, the tree), score-inl.h and value-inl.h (the
// two inner loops), softmax-inl.h (weights and merging), direct-inl.h and tile-inl.h (the two ways through a sequence).
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "base/float_environment.h"
#include "kernels/attention_plan.h"
#include "pagedkv/kernels/kernel_set.h"

#if PAGEDKV_IS_KERNEL_TARGET
#include "kernels/cpu/items-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

void attend(const AttentionArgs& args, AttentionPlan::Impl& plan, Executor& executor) noexcept {
  const ScoreRule rule(args.scale, args.logit_softcap);
  executor.run(static_cast<int64_t>(plan.items.size()), [&](int64_t i, int worker) {
    const FloatEnvironment environment;
    const WorkItem& item = plan.items[i];
    const Job& job = plan.jobs[item.job];
    run_item({args, plan, job, item, plan.worker_scratch(worker), rule,
              TokenRows(args.block_table + job.sequence * args.block_table_stride,
                        args.pages.page_size, job.range)});
  });
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
