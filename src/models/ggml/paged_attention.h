// Our two nodes in each layer of ggml's graph: store the new keys and values in pages, then attend over
// the pages. Between them stands the barrier that ggml puts after every node; a custom node has none inside.
//
// All of ggml's threads run a node's kernel call at once and draw its work from one counter. The counter of a
// node is reset by the node before it (store and attend alternate), so that the barrier orders the reset too.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "models/ggml/hyperparameters.h"
#include "models/model.h"
#include "pagedkv/kernels/attention.h"

struct ggml_context;
struct ggml_tensor;

namespace pagedkv {

// The layers of a model as a page pool has them.
struct LayerGroups {
  // Layers with full attention, then those with a window; formats are the default (f16).
  std::vector<LayerGroupSpec> groups;
  std::vector<int> pool_layers;  // the pool's number of each layer
};

LayerGroups layer_groups(const Hyperparameters& hp);

class PagedAttention {
 public:
  PagedAttention(const Hyperparameters& hp, int num_workers);
  PagedAttention(const PagedAttention&) = delete;  // nodes point into it
  PagedAttention& operator=(const PagedAttention&) = delete;

  // Last thing before each step: reads slots, pages and lengths of the batch and plans the work. Throws
  // std::invalid_argument when the pool is not of this model's shape.
  void prepare(const StepBatch& batch, const PagePool& pool);

  // Nodes of one layer. k [key_head_dim, num_kv_heads, rows] and v are contiguous; rows past those of the step are
  // padding and are stored nowhere.
  ggml_tensor* store_node(ggml_context* context, int layer, ggml_tensor* k, ggml_tensor* v);
  // q [key_head_dim, num_q_heads, rows] to [value_head_dim * num_q_heads, rows], zeros in rows of padding.
  ggml_tensor* attend_node(ggml_context* context, int layer, ggml_tensor* q, ggml_tensor* stored);

  // After each step: throws std::runtime_error when a key or value could not be stored.
  void check() const;

 private:
  struct Node {  // what a custom node is given
    PagedAttention* owner;
    int layer;
  };
  // Layers of one group and page format share their work.
  struct Work {
    int group;
    PageFormat key_format, value_format;
    AttentionPlan plan;
    AttentionArgs args;               // without queries, out and pages
    std::vector<int64_t> slots;       // [tokens]
    std::vector<PageId> block_table;  // [sequences, args.block_table_stride]
  };

  static void run_store(ggml_tensor* out, int worker, int num_workers, void* node);
  static void run_attend(ggml_tensor* out, int worker, int num_workers, void* node);
  void check_pool(const PagePool& pool) const;
  size_t find_work(int group, const LayerPages& pages);
  void prepare_work(Work& work, const LayerPages& pages, const StepBatch& batch,
                    const PagePool& pool);

  const Hyperparameters& hp_;
  const int num_workers_;
  const LayerGroups layers_;
  std::vector<Node> nodes_;           // by layer
  std::vector<Work> works_;           // kept between steps, for their memory
  std::vector<int32_t> query_start_;  // [sequences + 1]
  std::vector<int32_t> seq_lens_;     // [sequences]
  std::vector<LayerPages> pages_;     // by layer
  std::vector<size_t> work_of_layer_;
  alignas(64) std::atomic<int64_t> next_store_{0};
  alignas(64) std::atomic<int64_t> next_attend_{0};
  alignas(64) std::atomic<int> failed_layer_{-1};
  std::atomic<uint32_t> finished_{0};  // calls of nodes, and of prepare()
};

}  // namespace pagedkv
