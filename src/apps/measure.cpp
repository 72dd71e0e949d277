#include "apps/measure.h"

#include <algorithm>
#include <chrono>
#include <ctime>

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

}  // namespace

CallTimes time_calls(int runs, FunctionRef<void()> call) {
  using Clock = std::chrono::steady_clock;
  CallTimes times;
  call();
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    const double cpu_start = thread_cpu_ms();
    pagedkv_timed_call(call);
    times.cpu_ms.push_back(thread_cpu_ms() - cpu_start);
    times.ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  return times;
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
