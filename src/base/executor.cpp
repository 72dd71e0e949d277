#include "pagedkv/base/executor.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedkv {
namespace {

void pause_cpu() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Long enough to bridge the gap between the calls of a decode step, short enough to leave the core
// free.
constexpr int kSpins = 4000;

// One turn of a spin. Now and then the core is offered to others: where a pool has fewer cores than
// threads, the thread waited for may be one of them.
void spin(int turn) noexcept {
  if (turn % 64 == 63)
    std::this_thread::yield();
  else
    pause_cpu();
}

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(int n) : num_threads(n) {
    try {
      for (int w = 1; w < n; ++w) threads.emplace_back([this, w] { work_loop(w); });
    } catch (...) {  // no memory, or no thread: those that run must end
      end_threads();
      throw;
    }
  }
  ~Impl() { end_threads(); }

  void end_threads() {
    stop = true;
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (auto& t : threads) t.join();
  }

  void draw_items(int worker) {
    for (;;) {
      const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) return;
      (*fn)(item, worker);
    }
  }

  void work_loop(int worker) {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation.load(std::memory_order_acquire) == seen; ++i)
        spin(i);
      generation.wait(seen, std::memory_order_acquire);
      ++seen;
      if (stop) return;
      draw_items(worker);
      if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) busy.notify_one();
    }
  }

  const int num_threads;
  std::vector<std::thread> threads;
  std::atomic<uint32_t> generation{0};
  std::atomic<int> busy{0};
  std::atomic<bool> stop{false};
  alignas(64) std::atomic<int64_t> next{0};
  int64_t num_items = 0;
  const FunctionRef<void(int64_t, int)>* fn = nullptr;
};

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1 || num_threads > 1024)
    throw std::invalid_argument("num_threads " + std::to_string(num_threads) +
                                ": must be in 1..1024");
  impl_ = std::make_unique<Impl>(num_threads);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_workers() const noexcept { return impl_->num_threads; }

void ThreadPool::run(int64_t num_items, FunctionRef<void(int64_t, int)> fn) {
  Impl& p = *impl_;
  p.num_items = num_items;
  p.fn = &fn;
  p.next.store(0, std::memory_order_relaxed);
  if (p.num_threads == 1 || num_items <= 1) {
    p.draw_items(0);
    return;
  }
  p.busy.store(p.num_threads - 1, std::memory_order_relaxed);
  p.generation.fetch_add(1, std::memory_order_release);
  p.generation.notify_all();
  p.draw_items(0);
  for (int i = 0;; ++i) {
    const int left = p.busy.load(std::memory_order_acquire);
    if (left == 0) return;
    if (i < kSpins)
      spin(i);
    else
      p.busy.wait(left, std::memory_order_acquire);
  }
}

}  // namespace pagedkv
