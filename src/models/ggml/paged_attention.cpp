#include "models/ggml/paged_attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ggml.h"

namespace pagedkv {
namespace {

// One of the workers that make the same kernel call at the same time.
class NodeExecutor final : public Executor {
 public:
  NodeExecutor(std::atomic<int64_t>& next, int worker, int num_workers)
      : next_(next), worker_(worker), num_workers_(num_workers) {}
  int num_workers() const noexcept override { return num_workers_; }
  void run(int64_t num_items, FunctionRef<void(int64_t, int)> fn) override {
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= num_items) return;
      fn(item, worker_);
    }
  }

 private:
  std::atomic<int64_t>& next_;
  int worker_;
  int num_workers_;
};

std::string shape(int num_kv_heads, int key_dim, int value_dim) {
  return std::to_string(num_kv_heads) + " heads of " + std::to_string(key_dim) + " and " +
         std::to_string(value_dim) + " elements";
}

}  // namespace

LayerGroups layer_groups(const Hyperparameters& hp) {
  LayerGroups out;
  out.pool_layers.resize(static_cast<size_t>(hp.num_layers));
  const LayerSpec spec{.num_kv_heads = hp.num_kv_heads,
                       .key_head_dim = hp.key_head_dim,
                       .value_head_dim = hp.value_head_dim};
  int next = 0;  // a pool counts layers group by group
  for (const bool windowed : {false, true}) {
    LayerGroupSpec group{.sliding_window = windowed ? hp.sliding_window : 0};
    for (size_t i = 0; i < out.pool_layers.size(); ++i) {
      if (hp.is_windowed[i] != windowed) continue;
      out.pool_layers[i] = next++;
      group.layers.push_back(spec);
    }
    if (!group.layers.empty()) out.groups.push_back(std::move(group));
  }
  return out;
}

PagedAttention::PagedAttention(const Hyperparameters& hp, int num_workers)
    : hp_(hp), num_workers_(num_workers), layers_(layer_groups(hp)) {
  for (int i = 0; i < hp.num_layers; ++i) nodes_.push_back({this, i});
}

void PagedAttention::check_pool(const PagePool& pool) const {
  if (pool.num_groups() != static_cast<int>(layers_.groups.size()) ||
      pool.num_layers() != hp_.num_layers) {
    throw std::invalid_argument("page pool of " + std::to_string(pool.num_layers()) +
                                " layers in " + std::to_string(pool.num_groups()) +
                                " groups: the model has " + std::to_string(hp_.num_layers) +
                                " in " + std::to_string(layers_.groups.size()));
  }
  for (int layer = 0; layer < hp_.num_layers; ++layer) {
    const LayerPages p = pool.layer_pages(layer);
    if (p.num_kv_heads == hp_.num_kv_heads && p.keys.head_dim == hp_.key_head_dim &&
        p.values.head_dim == hp_.value_head_dim) {
      continue;
    }
    throw std::invalid_argument("page pool: layer " + std::to_string(layer) + " has " +
                                shape(p.num_kv_heads, p.keys.head_dim, p.values.head_dim) +
                                "; the model has " +
                                shape(hp_.num_kv_heads, hp_.key_head_dim, hp_.value_head_dim));
  }
}

void PagedAttention::prepare(const StepBatch& batch, const PagePool& pool) {
  check_pool(pool);
  query_start_.assign(1, 0);
  seq_lens_.clear();
  for (const auto& s : batch.sequences) {
    query_start_.push_back(query_start_.back() + static_cast<int32_t>(s.tokens.size()));
    seq_lens_.push_back(static_cast<int32_t>(s.table->length()));
  }
  pages_.clear();
  work_of_layer_.clear();
  for (const int layer : layers_.pool_layers) {
    const LayerPages& pages = pages_.emplace_back(pool.layer_pages(layer));
    const size_t work = find_work(pool.group_of_layer(layer), pages);
    if (!std::ranges::count(work_of_layer_, work)) prepare_work(works_[work], pages, batch, pool);
    work_of_layer_.push_back(work);
  }
  next_store_.store(0, std::memory_order_relaxed);
  next_attend_.store(0, std::memory_order_relaxed);
  failed_layer_.store(-1, std::memory_order_relaxed);
  finished_.fetch_add(1, std::memory_order_release);
}

size_t PagedAttention::find_work(int group, const LayerPages& pages) {
  for (size_t i = 0; i < works_.size(); ++i) {
    const Work& w = works_[i];
    if (w.group == group && w.key_format == pages.keys.format &&
        w.value_format == pages.values.format) {
      return i;
    }
  }
  Work& added = works_.emplace_back();
  added.group = group;
  added.key_format = pages.keys.format;
  added.value_format = pages.values.format;
  return works_.size() - 1;
}

void PagedAttention::prepare_work(Work& work, const LayerPages& pages, const StepBatch& batch,
                                  const PagePool& pool) {
  work.slots.resize(static_cast<size_t>(query_start_.back()));
  size_t stride = 1;
  for (const auto& s : batch.sequences) {
    stride = std::max(stride, s.table->pages(work.group).size());
  }
  work.block_table.assign(batch.sequences.size() * stride, kNoPage);
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const BlockTable& table = *batch.sequences[i].table;
    const auto count = static_cast<int64_t>(batch.sequences[i].tokens.size());
    table.slot_mapping(
        work.group, table.length() - count,
        std::span(work.slots)
            .subspan(static_cast<size_t>(query_start_[i]), static_cast<size_t>(count)));
    std::ranges::copy(table.pages(work.group),
                      work.block_table.begin() + static_cast<int64_t>(i * stride));
  }
  AttentionArgs& a = work.args;
  a = AttentionArgs{};
  a.pages = pages;
  a.num_q_heads = hp_.num_q_heads;
  a.num_seqs = static_cast<int>(batch.sequences.size());
  a.query_start = query_start_.data();
  a.seq_lens = seq_lens_.data();
  a.block_table = work.block_table.data();
  a.block_table_stride = static_cast<int64_t>(stride);
  a.scale = hp_.attention_scale;
  a.sliding_window = pool.sliding_window(work.group);
  work.plan.prepare(a, num_workers_);
}

ggml_tensor* PagedAttention::store_node(ggml_context* context, int layer, ggml_tensor* k,
                                        ggml_tensor* v) {
  GGML_ASSERT(ggml_is_contiguous(k) && ggml_is_contiguous(v));
  ggml_tensor* inputs[] = {k, v};
  return ggml_custom_4d(context, GGML_TYPE_F32, 1, 1, 1, 1, inputs, 2, run_store, GGML_N_TASKS_MAX,
                        &nodes_[layer]);
}

ggml_tensor* PagedAttention::attend_node(ggml_context* context, int layer, ggml_tensor* q,
                                         ggml_tensor* stored) {
  GGML_ASSERT(ggml_is_contiguous(q));
  ggml_tensor* inputs[] = {q, stored};  // `stored` only orders the two
  return ggml_custom_4d(context, GGML_TYPE_F32, int64_t{hp_.num_q_heads} * hp_.value_head_dim,
                        q->ne[2], 1, 1, inputs, 2, run_attend, GGML_N_TASKS_MAX, &nodes_[layer]);
}

void PagedAttention::run_store(ggml_tensor* out, int worker, int num_workers, void* node) {
  const Node& n = *static_cast<Node*>(node);
  PagedAttention& self = *n.owner;
  self.finished_.load(std::memory_order_acquire);
  const Work& work = self.works_[self.work_of_layer_[n.layer]];
  StoreArgs args;
  args.keys = static_cast<const float*>(out->src[0]->data);
  args.values = static_cast<const float*>(out->src[1]->data);
  args.pages = self.pages_[n.layer];
  args.slot_mapping = work.slots.data();
  args.num_tokens = static_cast<int>(work.slots.size());
  NodeExecutor executor(self.next_store_, worker, num_workers);
  if (!store(args, executor)) self.failed_layer_.store(n.layer, std::memory_order_relaxed);
  if (worker == 0) {
    *static_cast<float*>(out->data) = 0.0f;
    self.next_attend_.store(0, std::memory_order_relaxed);
  }
  self.finished_.fetch_add(1, std::memory_order_release);
}

void PagedAttention::run_attend(ggml_tensor* out, int worker, int num_workers, void* node) {
  const Node& n = *static_cast<Node*>(node);
  PagedAttention& self = *n.owner;
  self.finished_.load(std::memory_order_acquire);
  Work& work = self.works_[self.work_of_layer_[n.layer]];
  AttentionArgs args = work.args;
  args.queries = static_cast<const float*>(out->src[0]->data);
  args.out = static_cast<float*>(out->data);
  args.pages = self.pages_[n.layer];
  NodeExecutor executor(self.next_attend_, worker, num_workers);
  attend(args, work.plan, executor);
  if (worker == 0) {
    const int64_t row = out->ne[0], used = self.query_start_.back();
    std::memset(args.out + used * row, 0,
                sizeof(float) * static_cast<size_t>((out->ne[1] - used) * row));
    self.next_store_.store(0, std::memory_order_relaxed);
  }
  self.finished_.fetch_add(1, std::memory_order_release);
}

void PagedAttention::check() const {
  finished_.load(std::memory_order_acquire);
  const int layer = failed_layer_.load(std::memory_order_relaxed);
  if (layer < 0) return;
  throw std::runtime_error("layer " + std::to_string(layer) +
                           ": a key or value is not finite and cannot be stored in " +
                           std::string(page_format_name(pages_[layer].keys.format)) + "/" +
                           std::string(page_format_name(pages_[layer].values.format)) + " pages");
}

}  // namespace pagedkv
