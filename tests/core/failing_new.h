// Memory that runs out, for tests that nothing leaks and nothing is left half done. Linking failing_new.cpp replaces
// operator new of the whole program.
//
//   for_each_failing_allocation([](Attempts& attempts) {
//     PagePool pool(...);
//     BlockTable table(pool);
//     attempts.watch([&] { pool.verify(); return std::vector<int64_t>{table.length()}; });
//     attempts.make([&] { table.append(5); });
//   });
//
// runs the scenario again and again, its n-th allocation within make() failing with std::bad_alloc, n = 1, 2, 3, … until
// none is left to fail. One thread; other threads' allocations are counted and never fail.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "pagedkv/base/function_ref.h"

namespace pagedkv::testing {

// Blocks of the whole program that operator new gave and operator delete has not got back.
int64_t live_allocations() noexcept;

// The calls of one run of a scenario, which must be the same calls in every run. In one of them an allocation fails.
class Attempts {
 public:
  using State = std::vector<int64_t>;
  struct Call {
    State before, after;
  };

  // failing: which allocation within make(), counted from 1; 0: none, and the calls' states are recorded in `calls`.
  Attempts(std::vector<Call>& calls, int64_t failing) noexcept
      : calls_(calls), recording_(failing == 0), left_(failing) {}

  // What a call that fails must leave as it was; may assert. From here on, in place of what was watched before.
  void watch(std::function<State()> state) { state_ = std::move(state); }

  // Makes a call. Where an allocation fails in it and std::bad_alloc leaves it, the state must be the recorded one from
  // before; then the call is made again and must succeed. The states after it and after the last call must be as
  // recorded.
  void make(FunctionRef<void()> call);

  bool failed() const noexcept { return failed_; }

 private:
  void record(FunctionRef<void()> call);
  bool fails(FunctionRef<void()> call);

  std::vector<Call>& calls_;
  const bool recording_;
  std::function<State()> state_ = [] { return State(); };
  size_t made_ = 0;
  int64_t left_;  // allocations until the failing one
  bool failed_ = false;
};

// Besides: each run ends with as many live allocations and open files as it began with.
void for_each_failing_allocation(FunctionRef<void(Attempts&)> scenario);

}  // namespace pagedkv::testing
