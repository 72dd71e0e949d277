#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "models/text.h"

namespace pagedkv {
namespace {

struct Normaliser {
  double max, log_sum;
  double log_probability(float logit) const { return static_cast<double>(logit) - max - log_sum; }
};

Normaliser normaliser(std::span<const float> logits) {
  double max = -std::numeric_limits<double>::infinity();
  for (float x : logits) max = std::max(max, static_cast<double>(x));
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - max);
  return {max, std::log(sum)};
}

}  // namespace

double log_probability(std::span<const float> logits, int32_t token) {
  return normaliser(logits).log_probability(logits[token]);
}

std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int count) {
  std::vector<TokenLogprob> out(std::min<size_t>(static_cast<size_t>(count), logits.size()));
  if (out.empty()) return out;
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto better = [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  };
  std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(out.size()), ids.end(),
                    better);
  const Normaliser n = normaliser(logits);
  for (size_t i = 0; i < out.size(); ++i) out[i] = {ids[i], n.log_probability(logits[ids[i]])};
  return out;
}

}  // namespace pagedkv
