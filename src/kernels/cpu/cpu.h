// The Highway kernel sets: one source, compiled once for each instruction set.
#pragma once

#include <span>

#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::cpu {

// Those compiled in, best first; whether the CPU has them or not.
std::span<const KernelSet> kernel_sets() noexcept;

}  // namespace pagedkv::cpu
