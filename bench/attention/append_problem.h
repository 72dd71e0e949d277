// Rows to store, with the pages they go to: what one layer's append costs.
#pragma once

#include <vector>

#include "apps/attention_problem.h"

namespace pagedkv::bench {

// The new tokens of the case's sequences are stored, from float rows, again and again into the same slots.
class AppendProblem {
 public:
  explicit AppendProblem(const apps::AttentionCase& c);

  // Stores, and compares the first rows as they read back with those that the reference stores. Throws
  // std::runtime_error where a bit differs.
  void check(const KernelSet& set, Executor& executor);
  apps::CallTimes time(const KernelSet& set, Executor& executor, int runs);

  int64_t rows() const;          // of K and of V
  int64_t source_bytes() const;  // floats read
  int64_t stored_bytes() const;

 private:
  std::vector<float> read_back(int64_t tokens);

  const apps::AttentionCase case_;
  PagePool pool_;
  std::vector<BlockTable> tables_;
  std::vector<int64_t> slots_;
  std::vector<float> keys_, values_;
  StoreArgs args_;
};

}  // namespace pagedkv::bench
