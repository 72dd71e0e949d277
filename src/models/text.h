// Text in and out of a model: tokenizer, chat template, sampler.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pagedkv {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual int32_t vocab_size() const noexcept = 0;
  // add_special: add what the model file asks for at the start and end. parse_special: texts of
  // control tokens become those tokens.
  virtual std::vector<int32_t> tokenize(std::string_view text, bool add_special,
                                        bool parse_special) const = 0;
  // The bytes of one token; may be part of a UTF-8 character. special: control tokens give their text,
  // else nothing.
  virtual std::string piece(int32_t token, bool special) const = 0;
  virtual bool is_end_of_generation(int32_t token) const noexcept = 0;
  // The token that the model file asks for at the start of a text, where it asks for one.
  virtual std::optional<int32_t> begin_token() const noexcept = 0;
};

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
};

// Variables of a template's own ("enable_thinking"), each value as JSON.
using TemplateKwargs = std::map<std::string, std::string>;

// How a prompt ends.
enum class PromptEnd {
  kAnswer,    // with the opening of the assistant's answer
  kMessages,  // with the last message
  kOpen,      // within the last message, whose text the answer goes on with
};

class ChatTemplate {
 public:
  virtual ~ChatTemplate() = default;
  // The prompt text. Any thread. Throws std::invalid_argument with the template's own message when it refuses the
  // messages or a variable.
  virtual std::string render(std::span<const ChatMessage> messages,
                             const TemplateKwargs& kwargs = {},
                             PromptEnd end = PromptEnd::kAnswer) const = 0;
};

struct SamplerOptions {
  float temperature = 0.0f;         // 0: greedy
  int32_t top_k = 0;                // 0: off
  float top_p = 1.0f;               // 1: off
  float min_p = 0.0f;               // 0: off
  float repetition_penalty = 1.0f;  // 1: off; over the last `penalty_last_n` tokens
  int32_t penalty_last_n = 64;
  // Of each token so far generated: what is taken off its logit once, and for each time. 0: off; over all of them.
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<std::pair<int32_t, float>> logit_bias = {};  // token, what is added to its logit
  uint64_t seed = 0;
};

class Sampler {
 public:
  virtual ~Sampler() = default;
  // Chooses a token from logits [vocab_size], none of `without`. Throws std::runtime_error when a logit is not finite.
  virtual int32_t sample(std::span<const float> logits, std::span<const int32_t> without) = 0;
  int32_t sample(std::span<const float> logits) { return sample(logits, {}); }
  // Tells the sampler of a token of the sequence, for penalties.
  virtual void accept(int32_t token, bool generated) = 0;
};

// log softmax(logits)[token], in double, the sum in index order.
double log_probability(std::span<const float> logits, int32_t token);

struct TokenLogprob {
  int32_t id = 0;
  double logprob = 0;
  bool operator==(const TokenLogprob&) const = default;
};

// The `count` most likely tokens with log_probability() of each, best first; of equal ones the lowest id first.
std::vector<TokenLogprob> top_logprobs(std::span<const float> logits, int count);

}  // namespace pagedkv
