// How a kernel call is spread over threads.
//
// A kernel makes exactly one run() and does nothing after it, so that one interface serves two ways
// of calling: ThreadPool, where one thread calls and run() returns when all items are done; and a
// graph runtime (ggml), where every worker makes the same kernel call at the same time with an
// executor that shares one counter, and the runtime's own barrier follows.
#pragma once

#include <cstdint>
#include <memory>

#include "pagedkv/base/function_ref.h"

namespace [[gnu::visibility("default")]] pagedkv {

class Executor {
 public:
  virtual ~Executor() = default;
  // At least 1. Scratch is sized by it.
  virtual int num_workers() const noexcept = 0;
  // Calls fn(item, worker) once for each item in [0, num_items), in increasing order of item on each
  // worker; worker is in [0, num_workers()) and no two running calls share one. fn must not throw.
  virtual void run(int64_t num_items, FunctionRef<void(int64_t item, int worker)> fn) = 0;
};

// A fixed set of std::threads; the calling thread is worker 0. run() may not be called by two
// threads at once nor from inside fn. Threads sleep between calls after spinning briefly.
class ThreadPool final : public Executor {
 public:
  // num_threads in 1..1024, else std::invalid_argument.
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  int num_workers() const noexcept override;
  void run(int64_t num_items, FunctionRef<void(int64_t, int)> fn) override;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
