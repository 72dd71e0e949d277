// What programs that time something share: timed calls, their median, values to compute with. Needs no kernels, so that
// programs without ours (bench/peers) measure in the same way.
#pragma once

#include <cstdint>
#include <vector>

#include "pagedkv/base/function_ref.h"

namespace pagedkv::apps {

// One entry a call. Processor time is that of the calling thread, which other programs disturb less than the time that
// passes; with one thread it is all that the call took.
struct CallTimes {
  std::vector<double> ms, cpu_ms;
};

// Of runs >= 1 calls after one that warms up. The timed calls, and nothing else, go through the function
// `pagedkv_timed_call`: what callgrind's --toggle-collect names.
CallTimes time_calls(int runs, FunctionRef<void()> call);

// Entry i of both: the i-th pair.
struct PairTimes {
  CallTimes first, second;
};

// The same for two calls in strict turns: both meet the same disturbances, and each finds in the caches what the other
// left there.
PairTimes time_pairs(int runs, FunctionRef<void()> first, FunctionRef<void()> second);

// first / second, pair by pair.
std::vector<double> ratios(const std::vector<double>& first, const std::vector<double>& second);

double median(std::vector<double> values);  // not empty; the upper one of two

// Values in [-1, 1): what they are does not matter to the time.
void fill(std::vector<float>& x, uint32_t seed);

}  // namespace pagedkv::apps
