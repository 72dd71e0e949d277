// What a caller asks of the engine and what it hears back.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/text.h"

namespace pagedkv {

struct GenerationRequest {
  std::vector<int32_t> prompt;  // token ids, at least one
  SamplerOptions sampler;
  int64_t max_new_tokens = -1;    // < 0: until the model ends or the context is full
  std::vector<std::string> stop;  // the text ends before the first of these; none may be empty
  bool ignore_end = false;        // go on after end-of-generation tokens
  bool logprobs = false;          // compute log-probabilities of generated tokens
  bool prompt_logprobs = false;   // and of the prompt's
};

enum class FinishReason { kStop, kLength, kCancelled, kError };

// "stop", "length", "cancelled", "error".
std::string_view finish_reason_name(FinishReason reason) noexcept;

// One generated token. `text` is what may be shown now: whole UTF-8 characters, nothing of a stop text.
struct TokenEvent {
  int32_t id = 0;
  std::string_view text;          // newly released text, often empty
  std::optional<double> logprob;  // where asked for
};

// Hears of one request, on the thread that calls Engine::step().
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // `done` of `total` prompt tokens are computed.
  virtual void on_prompt(int64_t done, int64_t total) { (void)done, (void)total; }
  // Log-probability of prompt token `index` (from 1: the first has none).
  virtual void on_prompt_logprob(int64_t index, double logprob) { (void)index, (void)logprob; }
  virtual void on_token(const TokenEvent& event) = 0;
  // Last call. `text`: what had been held back. `error` explains kError, else is null; it is the
  // exception that ended the request.
  virtual void on_finish(FinishReason reason, std::string_view text, std::exception_ptr error) = 0;
};

}  // namespace pagedkv
