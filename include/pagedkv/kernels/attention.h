// Paged attention: softmax(scale * q K^T) V over keys and values that live in pages, for the new
// tokens of many sequences, prefill and decode mixed in one call.
//
// One arithmetic (docs/decisions/0001): the bits of an output row depend on its query, on the tokens its
// sequence holds up to it and on the page format only; not on the batch, the chunking, the page size,
// the page ids, the threads or the kernel set. src/kernels/reference/attention.cpp is its definition.
//
// Source: PagedAttention, Kwon et al. 2023, section 4.1; online softmax, Milakov and Gimelshein 2018.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "pagedkv/base/executor.h"
#include "pagedkv/kernels/pages.h"

namespace [[gnu::visibility("default")]] pagedkv {

// Sequence s owns query rows [query_start[s], query_start[s+1]); they are its newest tokens, already
// stored, so that row i sits at position seq_lens[s] - query_len + i.
struct AttentionArgs {
  const float* queries = nullptr;  // [num_tokens, num_q_heads, keys.head_dim]
  float* out = nullptr;  // [num_tokens, num_q_heads, values.head_dim], must not overlap queries
  // Optional [num_tokens, num_q_heads]; -inf where no token is visible.
  float* log_sum_exp = nullptr;
  LayerPages pages;
  int num_q_heads = 0;  // a multiple of pages.num_kv_heads
  int num_seqs = 0;
  const int32_t* query_start = nullptr;  // [num_seqs + 1], starts at 0, not decreasing
  const int32_t* seq_lens = nullptr;     // [num_seqs] tokens held; 0 gives rows of zeros
  // [num_seqs, block_table_stride]; entries past ceil(seq_len / page_size) or wholly before the window
  // are not read.
  const PageId* block_table = nullptr;
  int64_t block_table_stride = 0;
  float scale = 0.0f;      // usually 1 / sqrt(head_dim)
  bool causal = true;      // a row at position p sees tokens [0, p]; else all seq_len tokens
  int sliding_window = 0;  // > 0: of those, only the last `sliding_window` up to the row's position
  float logit_softcap = 0.0f;  // > 0: scores become cap * tanh(score / cap)
  // Optional [num_q_heads]: a logit without a value, joined to every row.
  const float* sinks = nullptr;
  // Optional [num_tokens, mask_stride], beside the rules above: 0 hides token t of the row's sequence.
  const uint8_t* mask = nullptr;
  int64_t mask_stride = 0;  // at least the largest seq_len
  // Optional [num_tokens, bias_stride]: added to the scaled (and capped) scores of every head; -inf hides
  // a token as the mask does.
  const float* bias = nullptr;
  int64_t bias_stride = 0;  // at least the largest seq_len
};

// The work list of a step and the scratch it needs. One plan serves every layer that has the same
// shapes, lengths, block table and window. Not to be shared by two calls that run at once.
class AttentionPlan {
 public:
  AttentionPlan();
  ~AttentionPlan();
  AttentionPlan(AttentionPlan&&) noexcept;
  AttentionPlan& operator=(AttentionPlan&&) noexcept;

  // Reads shapes, lengths, window and block table of `args` (not its pointers to queries, out and pages) and
  // prepares the work for `num_workers`: pages that several decoding sequences share are read once for all of
  // them. Allocates only what a larger call has not allocated before.
  // Throws std::invalid_argument when shapes disagree, naming the value and the limit; the plan is as it was then. Where
  // memory runs out (std::bad_alloc) it has no work.
  void prepare(const AttentionArgs& args, int num_workers);

  int64_t num_items() const noexcept;  // of work, after prepare()

  struct [[gnu::visibility("hidden")]] Impl;
  Impl& impl() const noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// Runs prepared attention with the active kernel set. `args` may differ from those prepared in
// queries, out, log_sum_exp, sinks and the pages' addresses only. executor.num_workers() must not exceed the
// plan's. That block_table holds valid ids is the caller's promise. Neither allocates nor locks.
void attend(const AttentionArgs& args, AttentionPlan& plan, Executor& executor) noexcept;

// Stores new tokens: row t of keys and values goes to slot_mapping[t] = page * page_size + offset.
struct StoreArgs {
  const float* keys = nullptr;    // [num_tokens, num_kv_heads, keys.head_dim]
  const float* values = nullptr;  // [num_tokens, num_kv_heads, values.head_dim]
  LayerPages pages;
  const int64_t* slot_mapping = nullptr;  // [num_tokens]; -1 is padding and is written nowhere
  int num_tokens = 0;
};

// Encodes and stores rows with the active kernel set. Whole tokens are handed out as work, so chunking never
// changes a stored bit. A row with an infinity or a NaN cannot be quantised: such a row is left as it
// was, and the call returns false on the worker that met it (on every worker of a ThreadPool call).
[[nodiscard]] bool store(const StoreArgs& args, Executor& executor) noexcept;

// True when every row can be stored: what a caller asks before store() if nothing may be half done.
[[nodiscard]] bool storable(const StoreArgs& args) noexcept;

// Reads tokens back: keys and values of slot_mapping[t] become row t, code * scale with one rounding.
struct FetchArgs {
  LayerPages pages;
  const int64_t* slot_mapping = nullptr;  // [num_tokens]; none is negative
  int num_tokens = 0;
  float* keys = nullptr;    // [num_tokens, num_kv_heads, keys.head_dim]; null: not wanted
  float* values = nullptr;  // [num_tokens, num_kv_heads, values.head_dim]; null: not wanted
};

// With the active kernel set. Neither allocates nor locks.
void fetch(const FetchArgs& args, Executor& executor) noexcept;

}  // namespace pagedkv
