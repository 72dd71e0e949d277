// Tokens as OpenAI's log-probabilities show them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/text.h"
#include "server/answer.h"
#include "server/api_error.h"

namespace pagedkv {

// JSON has no infinity: what is less likely than this, or not a number, is this.
inline constexpr double kLeastLogprob = -9999.0;
double shown_logprob(double logprob);

// The bytes of all of them, control tokens' too.
std::string text_of(const Tokenizer& tokenizer, std::span<const int32_t> tokens);

// The bytes as text. Those that are no UTF-8 are written "bytes:\xf0\x9f", so that different tokens differ.
std::string token_text(const std::string& bytes);

// An entry of a chat's logprobs.content.
Json chat_logprob(const Tokenizer& tokenizer, const AnsweredToken& token);

// The logprobs object of a completion, for `tokens` in order. The first of a prompt has none (logprob unset). text_offset
// counts characters, from `offset` on, which is moved behind them.
Json completion_logprobs(const Tokenizer& tokenizer, const std::vector<AnsweredToken>& tokens,
                         int64_t& offset);

// Holds tokens back until their text may be shown, so that log-probabilities tell nothing of a stop text.
class ShownTokens {
 public:
  explicit ShownTokens(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The tokens that a part's text releases. The rest of an answer that a stop text or an end ended never comes.
  std::vector<AnsweredToken> take(const AnswerPart& part);

 private:
  const Tokenizer& tokenizer_;
  std::vector<AnsweredToken> held_;
  size_t shown_bytes_ = 0;  // of text
  size_t begin_ = 0;        // of the first held token, in bytes of text
};

}  // namespace pagedkv
