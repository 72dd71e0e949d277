// An attention case with the memory it runs on: pages of a pool in shuffled order, filled. Whoever times attention
// (`pagedkv bench --attention`, bench/attention) sets up, checks and times here.
#pragma once

#include <memory>
#include <span>
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

  // Runs the case. [num_queries, num_q_heads, value_dim], valid until the next run.
  std::span<const float> run(const KernelSet& set) noexcept;

  int64_t bytes() const;  // of K and V, scales included, each once: those of a shared page, too

 private:
  void append(int sequence);
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

// A case of shared tokens, and beside it the same tokens with a copy of the shared ones in each sequence.
class SharingProblem {
 public:
  // Throws as AttentionProblem does. Takes the memory of the case and that of one that shares nothing.
  SharingProblem(const AttentionCase& c, int num_threads);

  AttentionProblem& shared() { return shared_; }
  void use_threads(int num_threads);
  // AttentionProblem::check() of the case, and that the copies give the same bits in every row. Throws
  // std::runtime_error where one differs.
  void check(const KernelSet& set);
  PairTimes time(const KernelSet& set, int runs);  // first: with copies; second: shared

 private:
  AttentionProblem shared_, copied_;
};

}  // namespace pagedkv::apps
