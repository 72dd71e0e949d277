// What this machine reads and multiplies at best, measured: what the times of a case are shares of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {

// Each number is measured when it is first asked for: the best of a few runs. Reads are of 256 MiB in huge pages,
// where the system gives them.
class MachinePeaks {
 public:
  MachinePeaks();

  double contiguous_gb_s(int threads);
  // Pages of this size (rounded up to cache lines) in a shuffled order, each line prefetched into L2 (T1) 16 KiB ahead:
  // as much as attention over pages can hope for.
  double shuffled_gb_s(int64_t page_bytes, int threads);
  // Float multiply-adds, two operations each, in registers of that set; 0 for the reference.
  double fma_gflop_s(const KernelSet& set, int threads);

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> array_;
  std::map<std::pair<int64_t, int>, double> reads_;  // of page bytes (0: contiguous) and threads
  std::map<std::pair<int, int>, double> fmas_;       // of register bits and threads
};

}  // namespace pagedkv::apps
