#include "core/failing_new.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <new>
#include <string>
#include <utility>

namespace {

std::atomic<int64_t> live{0};
thread_local int64_t until_failure = 0;  // 0: none is to come

void* allocate(size_t bytes, size_t alignment) {
  if (until_failure > 0 && --until_failure == 0) throw std::bad_alloc();
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  void* const block = std::aligned_alloc(alignment, whole > 0 ? whole : alignment);
  if (block == nullptr) throw std::bad_alloc();
  live.fetch_add(1, std::memory_order_relaxed);
  return block;
}

void release(void* block) noexcept {
  if (block == nullptr) return;
  live.fetch_sub(1, std::memory_order_relaxed);
  std::free(block);
}

}  // namespace

// The other forms call these.
void* operator new(size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* block) noexcept { release(block); }
void operator delete(void* block, size_t) noexcept { release(block); }
void operator delete(void* block, std::align_val_t) noexcept { release(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { release(block); }

namespace pagedkv::testing {

int64_t live_allocations() noexcept { return live.load(std::memory_order_relaxed); }

void Attempts::make(FunctionRef<void()> call) {
  if (recording_) return record(call);
  const Call& recorded = calls_.at(made_++);
  const bool had_failed = failed_;
  if (fails(call)) {
    EXPECT_EQ(state_(), recorded.before) << "a call that failed has changed something";
    call();
  }
  const bool last = made_ == calls_.size();
  if (failed_ != had_failed || last) {
    EXPECT_EQ(state_(), recorded.after);
  }
}

void Attempts::record(FunctionRef<void()> call) {
  Call recorded;
  recorded.before = state_();
  call();
  recorded.after = state_();
  calls_.push_back(std::move(recorded));
}

// Whether std::bad_alloc left the call. An allocation may fail without: std::stable_sort does with less.
bool Attempts::fails(FunctionRef<void()> call) {
  const bool may_fail = left_ > 0;
  bool thrown = false;
  until_failure = left_;
  try {
    call();
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  left_ = std::exchange(until_failure, 0);
  if (may_fail && left_ == 0) failed_ = true;
  EXPECT_TRUE(!thrown || (may_fail && left_ == 0)) << "std::bad_alloc that nobody asked for";
  return thrown;
}

namespace {

int64_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

}  // namespace

void for_each_failing_allocation(FunctionRef<void(Attempts&)> scenario) {
  std::vector<Attempts::Call> calls;
  Attempts undisturbed(calls, 0);  // this run also makes what the program keeps
  scenario(undisturbed);
  for (int64_t n = 1;; ++n) {
    SCOPED_TRACE("allocation " + std::to_string(n) + " fails");
    const int64_t files = open_files(), live_before = live_allocations();
    bool failed;
    {
      Attempts attempts(calls, n);
      scenario(attempts);
      failed = attempts.failed();
    }
    if (::testing::Test::HasFailure()) return;  // whose text is live
    EXPECT_EQ(live_allocations(), live_before) << "leaked";
    EXPECT_EQ(open_files(), files);
    if (!failed) return;
  }
}

}  // namespace pagedkv::testing
