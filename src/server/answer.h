// Answers on their way from the engine's thread to a connection's: the first pushes, the second takes what has come since.
// What is not taken is merged, so a slow reader costs no more memory than its answer.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_loop.h"

namespace pagedkv {

struct AnsweredToken {
  int32_t id = 0;
  std::optional<double> logprob;  // where asked for
  std::vector<TokenLogprob> top;
};

// What has come of an answer since it was last asked.
struct AnswerPart {
  std::string text;
  std::vector<AnsweredToken> tokens;
  bool finished = false;
  FinishReason reason = FinishReason::kError;
  std::exception_ptr error;
};

class Answers;

// One answer.
class Answer final : public RequestSink {
 public:
  using Clock = std::chrono::steady_clock;
  Answer(Answers& all, bool keep_tokens) : all_(all), keep_tokens_(keep_tokens) {}

  // The engine's thread.
  void on_start(int64_t num_cached) override;
  void on_prompt_logprob(int64_t index, double logprob, std::span<const TokenLogprob> top) override;
  void on_token(const TokenEvent& event) override;
  void on_finish(FinishReason reason, std::string_view text, std::exception_ptr error) override;

  // The connection's thread.
  AnswerPart take();
  std::vector<AnsweredToken> prompt_tokens()
      const;  // from the second on; complete when tokens have come, or its end

  // What is known when it has finished.
  struct Counts {
    int64_t cached = 0, generated = 0;
    std::optional<Clock::time_point> started, first_token, last_token;
  };
  Counts counts() const;

 private:
  friend class Answers;
  Answers& all_;
  const bool keep_tokens_;
  // All below: under all_.mutex_.
  AnswerPart part_;
  bool ended_ = false;
  std::vector<AnsweredToken> prompt_;
  Counts counts_;
};

// The answers to one HTTP request: n to each of its prompts, prompt by prompt. Going ends what still runs.
class Answers {
 public:
  // `streams`: wait() wakes for each text, else for ends alone.
  Answers(EngineLoop& loop, int64_t context, bool streams)
      : loop_(loop), context_(context), streams_(streams) {}
  ~Answers();  // cancels what has not ended, and waits for its end
  Answers(const Answers&) = delete;
  Answers& operator=(const Answers&) = delete;

  // Adds `n` answers to a prompt. Throws what EngineLoop::submit does, and ApiError for a prompt that is too long.
  void add(GenerationRequest request, int n, bool keep_tokens);
  void cancel();

  // Waits for something to take, or for so long.
  void wait(std::chrono::milliseconds most);
  size_t size() const noexcept { return answers_.size(); }
  Answer& operator[](size_t i) noexcept { return *answers_[i]; }

 private:
  friend class Answer;
  EngineLoop& loop_;
  const int64_t context_;
  const bool streams_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool news_ = false;
  size_t num_open_ = 0;  // have not heard their end
  std::vector<std::unique_ptr<Answer>> answers_;
  std::vector<RequestId> ids_;
};

}  // namespace pagedkv
