// The definition of the arithmetic, in plain loops. Slow; every kernel set is held to its bits.
#pragma once

#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::reference {

void attend(const AttentionArgs& args, AttentionPlan::Impl& plan, Executor& executor) noexcept;
bool store(const StoreArgs& args, Executor& executor) noexcept;
void fetch(const FetchArgs& args, Executor& executor) noexcept;

}  // namespace pagedkv::reference
