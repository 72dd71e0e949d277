// A few threads with deep stacks for tokenizers and chat templates, which recurse on what clients send. A connection's thread
// has a small stack, and there are many of them.
#pragma once

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace pagedkv {

class TextWorkers {
 public:
  // Throws std::system_error when there are no threads.
  explicit TextWorkers(int num_threads = 2);
  ~TextWorkers();
  TextWorkers(const TextWorkers&) = delete;
  TextWorkers& operator=(const TextWorkers&) = delete;

  // What `function()` returns or throws, run on one of them. Any thread but theirs.
  template <class F>
  std::invoke_result_t<F> run(F function) {
    auto task =
        std::make_shared<std::packaged_task<std::invoke_result_t<F>()>>(std::move(function));
    auto result = task->get_future();
    post([task] { (*task)(); });
    return result.get();
  }

 private:
  void post(std::function<void()> task);
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ending_ = false;
  std::vector<pthread_t> threads_;
};

}  // namespace pagedkv
