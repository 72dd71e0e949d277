// An attention case with the memory it runs on: pages of a pool in shuffled order, filled. Whoever times attention
// (`pagedkv bench --attention`, bench/attention) sets up, checks and times here.
#pragma once

#include <memory>
#include <vector>

#include "apps/attention_case.h"
#include "apps/measure.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/kernels/attention.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {

// The pool that holds exactly the case's tokens, in a shuffled order of page ids.
PagePoolOptions pool_options(const AttentionCase& c);

class AttentionProblem {
 public:
  // Throws std::invalid_argument (more queries or pages than an int32 counts; what a pool refuses) and MemoryError.
  AttentionProblem(const AttentionCase& c, int num_threads);
  AttentionProblem(const AttentionProblem&) = delete;
  AttentionProblem& operator=(const AttentionProblem&) = delete;

  const AttentionCase& spec() const { return case_; }
  int num_threads() const { return threads_->num_workers(); }
  void use_threads(int num_threads);

  // Runs the case and compares each sequence's first and last row with the reference, bit for bit. Throws
  // std::runtime_error where one differs.
  void check(const KernelSet& set);
  CallTimes time(const KernelSet& set, int runs);

  int64_t bytes() const;  // of K and V, scales included, each once

 private:
  void append(int sequence);
  void attend(const KernelSet& set) noexcept;
  std::vector<float> reference_row(int sequence, int row) const;

  const AttentionCase case_;
  PagePool pool_;
  std::unique_ptr<ThreadPool> threads_;
  std::vector<BlockTable> tables_;
  std::vector<int32_t> query_start_{0}, seq_lens_;
  std::vector<PageId> block_table_;
  std::vector<float> queries_, sinks_, out_;
  AttentionArgs args_;
  AttentionPlan plan_;
  std::vector<std::vector<float>> expected_;  // first and last row of each sequence, once asked for
};

}  // namespace pagedkv::apps
