#include "apps/measure.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>

extern "C" [[gnu::noinline]] void pagedkv_timed_call(const pagedkv::FunctionRef<void()>& call) {
  call();
  asm volatile("");  // not a tail call, which callgrind could not tell from a return
}

namespace pagedkv::apps {
namespace {

double thread_cpu_ms() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
}

void time_call(const FunctionRef<void()>& call, CallTimes& times) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const double cpu_start = thread_cpu_ms();
  pagedkv_timed_call(call);
  times.cpu_ms.push_back(thread_cpu_ms() - cpu_start);
  times.ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
}

}  // namespace

CallTimes time_calls(int runs, FunctionRef<void()> call) {
  CallTimes times;
  call();
  for (int i = 0; i < runs; ++i) time_call(call, times);
  return times;
}

PairTimes time_pairs(int runs, FunctionRef<void()> first, FunctionRef<void()> second) {
  PairTimes times;
  first();
  second();
  for (int i = 0; i < runs; ++i) {
    time_call(first, times.first);
    time_call(second, times.second);
  }
  return times;
}

std::vector<double> ratios(const std::vector<double>& first, const std::vector<double>& second) {
  std::vector<double> out(first.size());
  std::ranges::transform(first, second, out.begin(), std::divides<>());
  return out;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void fill(std::vector<float>& x, uint32_t seed) {
  for (float& f : x)
    f = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
}

}  // namespace pagedkv::apps
