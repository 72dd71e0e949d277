#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "llama.h"
#include "models/ggml/ggml_text.h"

namespace pagedkv {
namespace {

struct FreeSampler {
  void operator()(llama_sampler* sampler) const noexcept { llama_sampler_free(sampler); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, FreeSampler>;

void check(bool ok, const char* option, double value, const char* limit) {
  if (!ok)
    throw std::invalid_argument(std::string(option) + " " + std::to_string(value) + ": must be " +
                                limit);
}

void check_options(const SamplerOptions& o, int32_t vocab_size) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  check(vocab_size > 0, "vocab_size", vocab_size, "positive");
  check(o.temperature >= 0 && o.temperature < kInfinity, "temperature", o.temperature, "0 or more");
  check(o.top_k >= 0, "top_k", o.top_k, "0 (off) or more");
  check(o.top_p > 0 && o.top_p <= 1, "top_p", o.top_p, "above 0 and at most 1 (off)");
  check(o.min_p >= 0 && o.min_p <= 1, "min_p", o.min_p, "in 0 (off)..1");
  check(o.repetition_penalty > 0 && o.repetition_penalty < kInfinity, "repetition_penalty",
        o.repetition_penalty, "above 0; 1 is off");
  check(o.penalty_last_n >= 0, "penalty_last_n", o.penalty_last_n, "0 (off) or more");
}

// libllama takes 32 bits and reads all ones as "any seed".
uint32_t fold(uint64_t seed) {
  const auto folded = static_cast<uint32_t>(seed ^ (seed >> 32));
  return folded == LLAMA_DEFAULT_SEED ? 0 : folded;
}

void check_finite(std::span<const float> logits) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isfinite(logits[i])) continue;
    throw std::runtime_error("logit " + std::to_string(i) + " of " + std::to_string(logits.size()) +
                             " is " + std::to_string(logits[i]) + ", so no token can be chosen");
  }
}

class ChainSampler final : public Sampler {
 public:
  ChainSampler(const SamplerOptions& o, int32_t vocab_size)
      : greedy_(o.temperature == 0), vocab_size_(vocab_size) {
    check_options(o, vocab_size);
    candidates_.resize(static_cast<size_t>(vocab_size));
    if (o.repetition_penalty != 1 && o.penalty_last_n > 0) {
      add(penalty_,
          llama_sampler_init_penalties(vocab_size, o.penalty_last_n, o.repetition_penalty, 0, 0));
    }
    if (greedy_) return;
    if (o.top_k > 0) add(draw_, llama_sampler_init_top_k(o.top_k));
    if (o.top_p < 1) add(draw_, llama_sampler_init_top_p(o.top_p, 1));
    if (o.min_p > 0) add(draw_, llama_sampler_init_min_p(o.min_p, 1));
    add(draw_, llama_sampler_init_temp(o.temperature));
    add(draw_, llama_sampler_init_dist(fold(o.seed)));
  }

  int32_t sample(std::span<const float> logits) override {
    if (logits.size() != candidates_.size()) {
      throw std::invalid_argument("sample: " + std::to_string(logits.size()) +
                                  " logits, the vocabulary has " +
                                  std::to_string(candidates_.size()));
    }
    check_finite(logits);
    if (greedy_ && !penalty_)
      return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    for (int32_t i = 0; i < vocab_size_; ++i) candidates_[i] = {i, logits[i], 0.0f};
    llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
    if (penalty_) llama_sampler_apply(penalty_.get(), &array);
    if (greedy_) return largest();
    llama_sampler_apply(draw_.get(), &array);
    if (array.selected < 0) throw std::runtime_error("sample: no token was chosen");
    return array.data[array.selected].id;
  }

  void accept(int32_t token) override {
    if (token < 0 || token >= vocab_size_) {
      throw std::invalid_argument("accept: token " + std::to_string(token) +
                                  ", the vocabulary has " + std::to_string(vocab_size_));
    }
    if (penalty_) llama_sampler_accept(penalty_.get(), token);
  }

 private:
  static void add(SamplerPtr& chain, llama_sampler* stage) {
    if (!chain) chain.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    llama_sampler_chain_add(chain.get(), stage);
  }

  // Penalties keep the candidates in the order of their tokens.
  int32_t largest() const {
    const auto by_logit = [](const llama_token_data& a, const llama_token_data& b) {
      return a.logit < b.logit;
    };
    return std::max_element(candidates_.begin(), candidates_.end(), by_logit)->id;
  }

  bool greedy_;
  int32_t vocab_size_;
  SamplerPtr penalty_, draw_;
  std::vector<llama_token_data> candidates_;
};

}  // namespace

std::unique_ptr<Sampler> make_sampler(const SamplerOptions& options, int32_t vocab_size) {
  return std::make_unique<ChainSampler>(options, vocab_size);
}

}  // namespace pagedkv
