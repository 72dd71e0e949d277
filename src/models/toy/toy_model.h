// A model without weights, for tests of everything above it: each next token is a hash of what every
// layer sees before it (all tokens, or a window), read back from the pages. So a lost, foreign or
// reordered page changes the text, and a step takes microseconds.
//
// Tokens are bytes 0..255 and kToyEnd; it writes letters and spaces.
#pragma once

#include <memory>

#include "models/model.h"
#include "models/text.h"

namespace pagedkv {

inline constexpr int32_t kToyEnd = 256;
inline constexpr int32_t kToyVocabSize = 257;

struct ToyOptions {
  int context_length = 4096;
  int max_step_tokens = 512;
  int sliding_window = 0;     // > 0: a second layer group with this window
  int64_t end_after = 0;      // > 0: the model ends its text when the sequence has this many tokens
  int32_t poison_token = -1;  // a logit row after this token holds a NaN
};

std::unique_ptr<Model> make_toy_model(const ToyOptions& options = {});
std::unique_ptr<Tokenizer> make_toy_tokenizer();
std::unique_ptr<ChatTemplate> make_toy_chat_template();  // the last message's text
// Greedy at temperature 0; else the seeded choice among the logits' softmax.
std::unique_ptr<Sampler> make_toy_sampler(const SamplerOptions& options);

}  // namespace pagedkv
