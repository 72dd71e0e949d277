// ggml's graph of one step, for a number of token rows and output rows.
//
// Positions, pages and lengths are inputs, so a graph serves every step of its size; building one costs some
// hundred microseconds, so the last few are kept. One graph runs at a time: all compute in the same memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <list>
#include <memory>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "models/ggml/hyperparameters.h"
#include "models/ggml/paged_attention.h"
#include "models/ggml/weights.h"

namespace pagedkv {

struct FreeGgmlContext {
  void operator()(ggml_context* context) const noexcept { ggml_free(context); }
};
struct FreeBackendBuffer {
  void operator()(ggml_backend_buffer* buffer) const noexcept { ggml_backend_buffer_free(buffer); }
};
struct FreeMemory {
  void operator()(void* memory) const noexcept { std::free(memory); }
};
struct FreeThreadPool {
  void operator()(ggml_threadpool* pool) const noexcept { ggml_threadpool_free(pool); }
};

// Data of the tensors is valid until the next run. No output rows: the graph ends when the last layer's keys and
// values are stored, `out_rows` and `logits` are null.
struct StepGraph {
  int num_rows, num_outputs;
  std::vector<std::byte> memory;  // of `context`
  std::unique_ptr<ggml_context, FreeGgmlContext> context;
  size_t buffer_bytes;  // that it computes in
  ggml_cgraph* graph;
  ggml_cplan plan;
  ggml_tensor* tokens;     // int32 [num_rows]
  ggml_tensor* positions;  // int32 [num_rows]
  ggml_tensor* out_rows;   // int32 [num_outputs]: rows whose logits are wanted
  ggml_tensor* logits;     // float32 [vocab, num_outputs]
};

// About the compute buffer of a graph of num_rows tokens and one row of logits: what is alive at once where a layer is
// widest. ggml's allocator decides; tests hold this to it.
int64_t step_buffer_bytes(const Hyperparameters& hp, int64_t num_rows) noexcept;

class StepGraphs {
 public:
  // The references must outlive it. use_reference: ggml's row-by-row products only.
  StepGraphs(const Hyperparameters& hp, const Weights& weights, PagedAttention& attention,
             int num_threads, bool use_reference);

  // The graph of this size, built if it is not one of the last kMostGraphs. Valid until the next call.
  // Throws std::runtime_error when its memory cannot be had.
  StepGraph& get(int num_rows, int num_outputs);

  // Runs it. Throws std::runtime_error when ggml fails.
  void run(StepGraph& graph);

  static constexpr size_t kMostGraphs = 16;

 private:
  std::unique_ptr<StepGraph> build(int num_rows, int num_outputs);
  bool place(StepGraph& graph);
  bool provide(size_t bytes);

  const Hyperparameters& hp_;
  const Weights& weights_;
  PagedAttention& attention_;
  const int num_threads_;
  const bool use_reference_;
  std::unique_ptr<ggml_threadpool, FreeThreadPool> threads_;
  std::vector<uint8_t> work_;  // of the largest plan
  // What the graphs compute in, as large as the largest has needed.
  std::unique_ptr<std::byte, FreeMemory> memory_;
  std::unique_ptr<ggml_backend_buffer, FreeBackendBuffer> buffer_;  // for ggml, the same
  std::list<std::unique_ptr<StepGraph>> graphs_;                    // the last used first
};

}  // namespace pagedkv
