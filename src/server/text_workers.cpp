#include "server/text_workers.h"

#include <system_error>

namespace pagedkv {
namespace {

constexpr size_t kStackBytes = size_t{64} << 20;  // address space; memory comes as it is used

}  // namespace

TextWorkers::TextWorkers(int num_threads) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  int error = 0;
  for (int i = 0; i < num_threads && error == 0; ++i) {
    pthread_t thread;
    const auto run = [](void* self) -> void* {
      static_cast<TextWorkers*>(self)->work();
      return nullptr;
    };
    error = pthread_create(&thread, &attributes, run, this);
    if (error == 0) threads_.push_back(thread);
  }
  pthread_attr_destroy(&attributes);
  if (threads_.empty()) throw std::system_error(error, std::generic_category(), "a thread");
}

TextWorkers::~TextWorkers() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
}

void TextWorkers::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void TextWorkers::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !tasks_.empty() || ending_; });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace pagedkv
