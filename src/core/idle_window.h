// How many pages each group had in use at most, over the last whole period and since. A period begins anew when it is
// over and advance() is called, with the use of that moment. Not thread-safe.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace pagedkv {

class IdleWindow {
 public:
  using Time = std::chrono::steady_clock::time_point;

  IdleWindow(std::chrono::duration<double> period, size_t num_groups)
      : period_(std::chrono::duration_cast<Time::duration>(period)), peaks_(num_groups) {}

  void see(size_t group, int64_t pages) noexcept {
    peaks_[group].current = std::max(peaks_[group].current, pages);
  }
  // Whether a period has ended by `now`; the first call begins one. in_use(group): pages.
  template <class InUse>
  bool advance(Time now, const InUse& in_use) {
    if (end_ && now < *end_) return false;
    const bool ended = end_.has_value();
    end_ = now + period_;
    for (size_t g = 0; g < peaks_.size(); ++g)
      peaks_[g] = {std::max(peaks_[g].current, in_use(g)), in_use(g)};
    return ended;
  }
  int64_t peak(size_t group) const noexcept {
    return std::max(peaks_[group].last, peaks_[group].current);
  }

 private:
  struct Peak {
    int64_t last = 0;  // of the last whole period
    int64_t current = 0;
  };
  Time::duration period_;
  std::optional<Time> end_;
  std::vector<Peak> peaks_;
};

}  // namespace pagedkv
