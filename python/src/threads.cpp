#include "threads.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

namespace pagedkv::python {

class SharedExecutor final : public Executor {
 public:
  explicit SharedExecutor(int num_threads) : threads_(new ThreadPool(num_threads)) {}
  // In a forked child the pool's threads are not there to be joined.
  ~SharedExecutor() override {
    if (getpid() == process_) delete threads_;
  }
  int num_workers() const noexcept override { return threads_->num_workers(); }
  void run(int64_t num_items, FunctionRef<void(int64_t, int)> fn) override {
    if (getpid() == process_) {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock()) return threads_->run(num_items, fn);
    }
    for (int64_t item = 0; item < num_items; ++item) fn(item, 0);
  }

 private:
  ThreadPool* threads_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
};

namespace {

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::clamp(CPU_COUNT(&set), 1, 16);
}

// Never destroyed: a daemon thread may be in a kernel when the process ends.
std::mutex& mutex = *new std::mutex;
std::shared_ptr<Executor>& current = *new std::shared_ptr<Executor>;  // null: not used yet

}  // namespace

std::shared_ptr<Executor> shared_executor() {
  const std::lock_guard lock(mutex);
  if (!current) current = std::make_shared<SharedExecutor>(usable_cpus());
  return current;
}

int num_threads() { return shared_executor()->num_workers(); }

void set_num_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024)
    throw std::invalid_argument("num_threads " + std::to_string(num_threads) +
                                ": must be in 1..1024");
  auto next = std::make_shared<SharedExecutor>(num_threads);
  const std::lock_guard lock(mutex);
  current = std::move(next);
}

}  // namespace pagedkv::python
