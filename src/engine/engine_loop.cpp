#include "engine/engine_loop.h"

#include <algorithm>
#include <string>
#include <utility>

#include "pagedkv/base/log.h"

namespace pagedkv {
namespace {

// How often an engine without requests looks after its pool: idle memory, pages whose time is over.
constexpr std::chrono::milliseconds kIdlePeriod{500};

}  // namespace

EngineLoop::EngineLoop(Engine& engine, EngineLoopOptions options)
    : engine_(engine), most_requests_(int64_t{engine.max_seqs()} + options.max_waiting) {
  if (options.max_waiting < 1)
    throw std::invalid_argument("max_waiting " + std::to_string(options.max_waiting) +
                                ": must be at least 1");
  thread_ = std::thread([this] { run(); });
}

EngineLoop::~EngineLoop() {
  {
    const std::lock_guard lock(mutex_);
    draining_ = ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::vector<RequestId> EngineLoop::submit(GenerationRequest request,
                                          std::span<RequestSink* const> sinks) {
  // std::function wants to be copied; what is prepared cannot be.
  auto prepared = std::make_shared<PreparedRequest>(engine_.prepare(std::move(request), sinks));
  const std::vector<RequestId> ids = prepared->ids();
  const auto count = static_cast<int64_t>(ids.size());
  {
    const std::lock_guard lock(mutex_);
    if (draining_) throw DrainingError("the server is shutting down and takes no new requests");
    if (num_requests_ + count > most_requests_)
      throw QueueFullError(std::to_string(num_requests_) + " requests run or wait; the limit is " +
                           std::to_string(most_requests_));
    tasks_.emplace_back([prepared](Engine& engine) { engine.queue(std::move(*prepared)); });
    num_requests_ += count;
    num_coming_ += count;
  }
  changed_.notify_all();
  return ids;
}

void EngineLoop::cancel(std::vector<RequestId> ids) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return;
    tasks_.emplace_back([ids = std::move(ids)](Engine& engine) {
      for (const RequestId id : ids) engine.cancel(id);
    });
  }
  changed_.notify_all();
}

void EngineLoop::drain() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
}

int64_t EngineLoop::num_requests() const {
  const std::lock_guard lock(mutex_);
  return num_requests_;
}

bool EngineLoop::wait_idle(std::chrono::milliseconds most) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, most, [&] { return num_requests_ == 0; });
}

void EngineLoop::post(Task task) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) throw DrainingError("the server has shut down");
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

// What there is to do between two steps; without requests, waits for it. False: the loop ends.
bool EngineLoop::take_tasks(std::deque<Task>& tasks) {
  std::unique_lock lock(mutex_);
  if (tasks_.empty() && !ending_ && engine_.num_requests() == 0)
    changed_.wait_for(lock, kIdlePeriod, [&] { return !tasks_.empty() || ending_; });
  tasks.swap(tasks_);
  num_coming_ = 0;
  return !ending_;
}

void EngineLoop::count_requests() {
  {
    const std::lock_guard lock(mutex_);
    num_requests_ = static_cast<int64_t>(engine_.num_requests()) + num_coming_;
  }
  changed_.notify_all();
}

// A step that fails as a whole, for want of memory say, ends the requests there are, not the server.
void EngineLoop::step() {
  try {
    engine_.step();
  } catch (const std::exception& error) {
    log(LogLevel::kError, std::string("a step failed: ") + error.what());
    engine_.fail_all(std::current_exception());
  }
}

void EngineLoop::run() {
  std::deque<Task> tasks;
  while (take_tasks(tasks)) {
    for (Task& task : tasks) task(engine_);
    tasks.clear();
    step();
    count_requests();
  }
  engine_.cancel_all();
  for (bool more = true; more;) {  // who asks meanwhile gets an answer too
    for (Task& task : tasks) task(engine_);
    engine_.cancel_all();
    tasks.clear();
    const std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
    more = !tasks.empty();
    ended_ = !more;
  }
  count_requests();
}

}  // namespace pagedkv
