// What is measured of requests while they run.
#pragma once

#include <chrono>
#include <cstdint>

#include "engine/request.h"

namespace pagedkv {

// How far one answer has come. The clock's epoch as a time: not yet.
struct RequestProgress {
  using Clock = std::chrono::steady_clock;
  Clock::time_point queued, started, first_token, last_token;
  int64_t num_prompt = 0;               // tokens
  int64_t num_cached = 0;               // of them, need not be computed
  int64_t num_generated = 0;            // tokens
  MissReason miss = MissReason::kNone;  // why not more of the prompt was cached
  bool asks_cache = false;              // whether it could have been
};

// Hears of every answer, on the thread that calls Engine::step(): what it does delays every token.
class RequestObserver {
 public:
  virtual ~RequestObserver() = default;
  // It starts to run for the first time.
  virtual void on_start(const RequestProgress& progress) noexcept = 0;
  // A token came at `now`; `before` does not know of it yet.
  virtual void on_token(const RequestProgress& before,
                        RequestProgress::Clock::time_point now) noexcept = 0;
  virtual void on_finish(const RequestProgress& progress, FinishReason reason) noexcept = 0;
};

}  // namespace pagedkv
