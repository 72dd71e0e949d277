#include "apps/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace pagedkv::apps {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

ProgressBar::ProgressBar(std::string label, bool enabled)
    : label_(std::move(label)),
      enabled_(enabled && isatty(STDERR_FILENO)),
      start_(steady_clock::now()) {}

void ProgressBar::show(double done) {
  const auto now = steady_clock::now();
  if (!enabled_ || now - start_ < milliseconds(300) || now - last_ < milliseconds(50)) return;
  constexpr int kWidth = 30;
  const int filled = static_cast<int>(std::clamp(done, 0.0, 1.0) * kWidth);
  std::fprintf(stderr, "\r%s [%s%s] %3.0f%%", label_.c_str(), std::string(filled, '#').c_str(),
               std::string(kWidth - filled, ' ').c_str(), 100 * done);
  visible_ = true;
  last_ = now;
}

void ProgressBar::clear() {
  if (visible_) std::fprintf(stderr, "\r\033[K");
  visible_ = false;
}

}  // namespace pagedkv::apps
