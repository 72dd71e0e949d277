// The kernel sets of this build and the one in use.
//
// Every set computes the same bits. They are listed best first; the first that the CPU supports is
// used, unless PAGEDKV_KERNELS names another. Where no fast set fits the CPU, the reference runs and
// one warning per process says so.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "pagedkv/kernels/attention.h"

namespace [[gnu::visibility("default")]] pagedkv {

struct KernelSet {
  const char* name;   // "avx512", "avx2", "neon", "reference"
  const char* needs;  // the CPU features, for messages
  bool (*supported)() noexcept;
  void (*attend)(const AttentionArgs&, AttentionPlan::Impl&, Executor&) noexcept;
  bool (*store)(const StoreArgs&, Executor&) noexcept;
  void (*fetch)(const FetchArgs&, Executor&) noexcept;
};

// All sets compiled in, best first, supported here or not.
std::span<const KernelSet> kernel_sets() noexcept;

// The set in use. Picked at first use: PAGEDKV_KERNELS if set (throws std::invalid_argument when it
// names an unknown or unsupported set), else the best supported.
const KernelSet& kernels();

// Uses the named set from here on. For tests and benchmarks; not while kernels run.
void select_kernels(std::string_view name);

}  // namespace pagedkv
