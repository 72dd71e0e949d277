#include "pagedkv/kernels/attention.h"

#include <cassert>
#include <cmath>

#include "kernels/attention_plan.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv {
namespace {

bool all_finite(const float* x, int64_t count) noexcept {
  for (int64_t i = 0; i < count; ++i)
    if (!std::isfinite(x[i])) return false;
  return true;
}

bool token_storable(const PageArray& array, int num_kv_heads, const float* rows,
                    int64_t token) noexcept {
  const int64_t row_floats = int64_t{num_kv_heads} * array.head_dim;
  return !has_scales(array.format) || all_finite(rows + token * row_floats, row_floats);
}

}  // namespace

void attend(const AttentionArgs& args, AttentionPlan& plan, Executor& executor) noexcept {
  assert(executor.num_workers() <= plan.impl().num_workers);
  kernels().attend(args, plan.impl(), executor);
}

bool store(const StoreArgs& args, Executor& executor) noexcept {
  return kernels().store(args, executor);
}

void fetch(const FetchArgs& args, Executor& executor) noexcept { kernels().fetch(args, executor); }

bool storable(const StoreArgs& args) noexcept {
  const LayerPages& p = args.pages;
  for (int64_t t = 0; t < args.num_tokens; ++t)
    if (args.slot_mapping[t] >= 0 && (!token_storable(p.keys, p.num_kv_heads, args.keys, t) ||
                                      !token_storable(p.values, p.num_kv_heads, args.values, t)))
      return false;
  return true;
}

}  // namespace pagedkv
