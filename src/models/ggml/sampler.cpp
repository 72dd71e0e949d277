#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
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
  check(std::isfinite(o.presence_penalty), "presence_penalty", o.presence_penalty, "finite");
  check(std::isfinite(o.frequency_penalty), "frequency_penalty", o.frequency_penalty, "finite");
  for (const auto& [token, bias] : o.logit_bias) {
    check(token >= 0 && token < vocab_size, "logit_bias: token", token, "in the vocabulary");
    check(std::isfinite(bias), "logit_bias", bias, "finite");
  }
}

// libllama takes 32 bits and reads all ones as "any seed".
uint32_t fold(uint64_t seed) {
  const auto folded = static_cast<uint32_t>(seed ^ (seed >> 32));
  return folded == LLAMA_DEFAULT_SEED ? 0 : folded;
}

[[noreturn]] void refuse_not_finite(std::span<const float> logits) {
  size_t i = 0;
  while (std::isfinite(logits[i])) ++i;
  throw std::runtime_error("logit " + std::to_string(i) + " of " + std::to_string(logits.size()) +
                           " is " + std::to_string(logits[i]) + ", so no token can be chosen");
}

// Ordered as the logits are, and as vectors of whole numbers compilers keep track of the largest without branches.
int32_t order_key(float logit) {
  const auto bits = std::bit_cast<int32_t>(logit + 0.0f);  // one zero
  return bits ^ ((bits >> 31) & INT32_MAX);
}

// The first of the largest. Throws std::runtime_error when a logit is not finite. A vocabulary of 49,152 takes a quarter of
// the time of std::max_element and a look at each logit.
int32_t first_largest(std::span<const float> logits) {
  constexpr size_t kBlock = 1024;  // the first with the largest is then searched
  int32_t best = INT32_MIN, largest_magnitude = 0;
  std::span<const float> best_block;
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const auto block = logits.subspan(begin, std::min(kBlock, logits.size() - begin));
    int32_t most = INT32_MIN;
    for (const float x : block) {
      most = std::max(most, order_key(x));
      largest_magnitude = std::max(largest_magnitude, std::bit_cast<int32_t>(x) & INT32_MAX);
    }
    if (most > best) {
      best = most;
      best_block = block;
    }
  }
  constexpr auto kInfinity = std::bit_cast<int32_t>(std::numeric_limits<float>::infinity());
  if (largest_magnitude >= kInfinity) refuse_not_finite(logits);
  const auto found = std::ranges::find(best_block, best, order_key);
  return static_cast<int32_t>(&*found - logits.data());
}

class ChainSampler final : public Sampler {
 public:
  ChainSampler(const SamplerOptions& o, int32_t vocab_size)
      : greedy_(o.temperature == 0),
        vocab_size_(vocab_size),
        presence_penalty_(o.presence_penalty),
        frequency_penalty_(o.frequency_penalty),
        logit_bias_(o.logit_bias) {
    check_options(o, vocab_size);
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

  using Sampler::sample;
  int32_t sample(std::span<const float> logits, std::span<const int32_t> without) override {
    if (logits.size() != static_cast<size_t>(vocab_size_)) {
      throw std::invalid_argument("sample: " + std::to_string(logits.size()) +
                                  " logits, the vocabulary has " + std::to_string(vocab_size_));
    }
    const int32_t first_choice = first_largest(logits);
    if (greedy_ && !penalty_ && logit_bias_.empty() && counts_.empty() && without.empty())
      return first_choice;
    // Of the thread, not of each sampler: a hundred requests would keep a hundred vocabularies.
    thread_local std::vector<llama_token_data> candidates;
    candidates.resize(logits.size());
    for (int32_t i = 0; i < vocab_size_; ++i) candidates[i] = {i, logits[i], 0.0f};
    for (const auto& [token, bias] : logit_bias_) candidates[token].logit += bias;
    llama_token_data_array array{candidates.data(), candidates.size(), -1, false};
    if (penalty_) llama_sampler_apply(penalty_.get(), &array);
    for (const auto& [token, count] : counts_)
      candidates[token].logit -= presence_penalty_ + frequency_penalty_ * static_cast<float>(count);
    for (const int32_t token : without)
      candidates.at(static_cast<size_t>(token)).logit = -std::numeric_limits<float>::infinity();
    if (greedy_) return largest(candidates);
    llama_sampler_apply(draw_.get(), &array);
    if (array.selected < 0) throw std::runtime_error("sample: no token was chosen");
    return array.data[array.selected].id;
  }

  void accept(int32_t token, bool generated) override {
    if (token < 0 || token >= vocab_size_) {
      throw std::invalid_argument("accept: token " + std::to_string(token) +
                                  ", the vocabulary has " + std::to_string(vocab_size_));
    }
    if (penalty_) llama_sampler_accept(penalty_.get(), token);
    if (generated && (presence_penalty_ != 0 || frequency_penalty_ != 0)) ++counts_[token];
  }

 private:
  static void add(SamplerPtr& chain, llama_sampler* stage) {
    if (!chain) chain.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    llama_sampler_chain_add(chain.get(), stage);
  }

  // Penalties keep the candidates in the order of their tokens.
  static int32_t largest(const std::vector<llama_token_data>& candidates) {
    const auto by_logit = [](const llama_token_data& a, const llama_token_data& b) {
      return a.logit < b.logit;
    };
    return std::max_element(candidates.begin(), candidates.end(), by_logit)->id;
  }

  bool greedy_;
  int32_t vocab_size_;
  float presence_penalty_, frequency_penalty_;
  std::vector<std::pair<int32_t, float>> logit_bias_;
  std::map<int32_t, int64_t> counts_;  // of each generated token, where a penalty asks for it
  SamplerPtr penalty_, draw_;
};

}  // namespace

std::unique_ptr<Sampler> make_sampler(const SamplerOptions& options, int32_t vocab_size) {
  return std::make_unique<ChainSampler>(options, vocab_size);
}

}  // namespace pagedkv
