#include <algorithm>
#include <cmath>
#include <limits>

#include "models/text.h"

namespace pagedkv {

double log_probability(std::span<const float> logits, int32_t token) {
  double max = -std::numeric_limits<double>::infinity();
  for (float x : logits) max = std::max(max, static_cast<double>(x));
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - max);
  return static_cast<double>(logits[token]) - max - std::log(sum);
}

}  // namespace pagedkv
