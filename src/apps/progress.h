// A progress bar on stderr, on a terminal only, cleared when done. Appears after 300 ms, so that quick work shows nothing.
#pragma once

#include <chrono>
#include <string>

namespace pagedkv::apps {

class ProgressBar {
 public:
  ProgressBar(std::string label, bool enabled);
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  void show(double done);  // 0..1
  void clear();

 private:
  std::string label_;
  bool enabled_;
  bool visible_ = false;
  std::chrono::steady_clock::time_point start_, last_;
};

}  // namespace pagedkv::apps
