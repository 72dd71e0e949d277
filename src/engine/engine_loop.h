// Runs an Engine on a thread of its own, for callers on many threads.
//
//   EngineLoop loop(engine, {.max_waiting = 256});
//   const auto ids = loop.submit(std::move(request), sinks);  // any thread; the sinks hear on the loop's
//   loop.cancel(ids);                                         // within one step
//
// Whatever touches the engine, its pool or its prefix index goes through call(): it runs between two steps.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <span>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "engine/engine.h"

namespace pagedkv {

struct EngineLoopOptions {
  int max_waiting = 256;  // requests (answers) that may wait to start; more are refused
};

// Too many requests wait: try again later. The text names their number and the limit.
struct QueueFullError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The loop takes no new requests: it drains.
struct DrainingError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class EngineLoop {
 public:
  // The engine must outlive it and be called by nobody else meanwhile. Throws std::invalid_argument for a max_waiting < 1.
  explicit EngineLoop(Engine& engine, EngineLoopOptions options = {});
  ~EngineLoop();  // cancels what is left: every sink has heard its end when this returns
  EngineLoop(const EngineLoop&) = delete;
  EngineLoop& operator=(const EngineLoop&) = delete;

  // One answer a sink (Engine::submit). The sinks must live until they have heard on_finish. Throws as Engine::submit does,
  // QueueFullError and DrainingError; then no sink hears anything.
  std::vector<RequestId> submit(GenerationRequest request, std::span<RequestSink* const> sinks);

  // Ends these requests within one step: their sinks hear kCancelled, unless they heard another end before. Returns at once.
  void cancel(std::vector<RequestId> ids);

  // What `function(engine)` returns or throws, run on the loop's thread between two steps. Not from within a sink. Throws
  // DrainingError once the loop has ended.
  template <class F>
  std::invoke_result_t<F, Engine&> call(F function) {
    std::packaged_task<std::invoke_result_t<F, Engine&>(Engine&)> task(std::move(function));
    auto result = task.get_future();
    post([&task](Engine& engine) { task(engine); });
    return result.get();
  }

  // No new requests from now on; those that are there go on.
  void drain();
  // Requests that have not ended, waiting ones included.
  int64_t num_requests() const;
  // Waits until none is left, or for so long; whether none is.
  bool wait_idle(std::chrono::milliseconds most) const;

 private:
  using Task = std::function<void(Engine&)>;
  void post(Task task);
  void run();
  void step();
  bool take_tasks(std::deque<Task>& tasks);
  void count_requests();

  Engine& engine_;
  const int64_t most_requests_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Task> tasks_;
  int64_t num_requests_ = 0;  // in the engine, and on the way to it
  int64_t num_coming_ = 0;    // of these, the latter
  bool draining_ = false, ending_ = false, ended_ = false;
  std::thread thread_;
};

}  // namespace pagedkv
