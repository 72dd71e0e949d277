// What a caller asks of the engine and what it hears back.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/text.h"
#include "pagedkv/core/prefix_index.h"

namespace pagedkv {

inline constexpr int kMostTopLogprobs = 20;

struct GenerationRequest {
  std::vector<int32_t> prompt;  // token ids, at least one
  SamplerOptions sampler;
  int64_t max_new_tokens = -1;       // < 0: until the model ends or the context is full
  std::vector<std::string> stop;     // the text ends before the first of these; none may be empty
  bool ignore_end = false;           // go on after end-of-generation tokens
  std::vector<int32_t> stop_tokens;  // end as end-of-generation tokens do, whatever ignore_end says
  int64_t min_new_tokens = 0;  // before so many no end: not of the model, stop tokens or stop texts
  bool logprobs = false;       // compute log-probabilities of generated tokens
  bool prompt_logprobs = false;  // and of the prompt's
  int top_logprobs = 0;          // with them, so many most likely tokens each; 0..kMostTopLogprobs
  // Those of the lowest number run first, of equal ones the first come.
  int32_t priority = 0;
  // Whether pages of other requests may serve it, and its pages others: those with the same salt, for as long as
  // `retention` says. With prompt_logprobs all of its prompt is computed.
  bool cache_prompt = true;
  std::string cache_salt;  // a tenant's; empty: shared by all who have none
  Retention retention = {};
  bool zero_freed_pages = false;  // its pages are zeroed when they become free
};

enum class FinishReason { kStop, kLength, kCancelled, kError };

// "stop", "length", "cancelled", "error".
std::string_view finish_reason_name(FinishReason reason) noexcept;

// One generated token. `text` is what may be shown now: whole UTF-8 characters, nothing of a stop text.
struct TokenEvent {
  int32_t id = 0;
  std::string_view text;          // newly released text, often empty
  std::optional<double> logprob;  // where asked for
  std::span<const TokenLogprob>
      top;  // the most likely tokens, best first; of equal ones the lowest id first
};

// Hears of one request, on the thread that calls Engine::step().
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // It starts to run; the first num_cached tokens of its prompt need not be computed.
  virtual void on_start(int64_t num_cached) { (void)num_cached; }
  // `done` of `total` prompt tokens are computed.
  virtual void on_prompt(int64_t done, int64_t total) { (void)done, (void)total; }
  // Log-probability of prompt token `index` (from 1: the first has none), and the most likely tokens there.
  virtual void on_prompt_logprob(int64_t index, double logprob, std::span<const TokenLogprob> top) {
    (void)index, (void)logprob, (void)top;
  }
  virtual void on_token(const TokenEvent& event) = 0;
  // Last call. `text`: what had been held back. `error` explains kError, else is null; it is the
  // exception that ended the request.
  virtual void on_finish(FinishReason reason, std::string_view text, std::exception_ptr error) = 0;
};

}  // namespace pagedkv
