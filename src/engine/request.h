// What a caller asks of the engine and what it hears back.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/text.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv {

class Engine;

// The tokens of a conversation whose keys and values stay in the pool between its requests. One request at a time; the
// pool and a request under way must not outlive it.
class HeldSequence {
 public:
  int64_t length() const noexcept { return table_ ? table_->length() : 0; }
  void clear() { *this = {}; }  // gives the pages back

 private:
  friend Engine;
  std::optional<BlockTable> table_;
  std::vector<int32_t> tokens_;  // those in the table
};

struct GenerationRequest {
  std::vector<int32_t> prompt;  // token ids, at least one
  SamplerOptions sampler;
  int64_t max_new_tokens = -1;    // < 0: until the model ends or the context is full
  std::vector<std::string> stop;  // the text ends before the first of these; none may be empty
  bool ignore_end = false;        // go on after end-of-generation tokens
  bool logprobs = false;          // compute log-probabilities of generated tokens
  bool prompt_logprobs = false;   // and of the prompt's
  // Not null: what it holds and the prompt begins with is not computed again (but with prompt_logprobs, or where a
  // sliding window has passed what goes before it), and when the request ends, it holds what was computed.
  HeldSequence* held = nullptr;
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
