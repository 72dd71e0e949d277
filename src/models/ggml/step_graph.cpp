#include "models/ggml/step_graph.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ggml-alloc.h"

namespace pagedkv {
namespace {

struct FreeGraphAllocator {
  void operator()(ggml_gallocr* allocator) const noexcept { ggml_gallocr_free(allocator); }
};

// Tensors (with views) that build() makes at most for a layer, and outside the layers.
constexpr size_t kTensorsPerLayer = 56;
constexpr size_t kTensorsAround = 32;

// Source: llama.cpp, src/models/llama.cpp and llama-graph.cpp.
class Builder {
 public:
  Builder(const Hyperparameters& hp, const Weights& weights, PagedAttention& attention,
          StepGraph& out)
      : hp_(hp), weights_(weights), attention_(attention), g_(out), c_(out.context.get()) {}

  void build() {
    g_.tokens = input(g_.num_rows);
    g_.positions = input(g_.num_rows);
    g_.out_rows = g_.num_outputs > 0 ? input(g_.num_outputs) : nullptr;
    g_.logits = nullptr;
    ggml_tensor* x = ggml_get_rows(c_, weights_.token_embedding, g_.tokens);
    if (hp_.embedding_scale != 1.0f) x = ggml_scale(c_, x, hp_.embedding_scale);
    for (int i = 0; i < hp_.num_layers; ++i) {
      const bool last = i + 1 == hp_.num_layers;
      ggml_tensor* attended = attention(x, i, last && g_.num_outputs == 0);
      if (last && g_.num_outputs == 0) return ggml_build_forward_expand(g_.graph, attended);
      if (last) {  // from here on only the rows that are wanted
        attended = ggml_get_rows(c_, attended, g_.out_rows);
        x = ggml_get_rows(c_, x, g_.out_rows);
      }
      const LayerWeights& w = weights_.layers[i];
      ggml_tensor* gain = linear(w.output, attended, w.output_bias);
      x = ggml_add(c_, norm_if(gain, w.attn_post_norm), x);
      gain = feed_forward(norm(x, w.ffn_norm), w);
      x = ggml_add(c_, norm_if(gain, w.ffn_post_norm), x);
    }
    g_.logits = linear(weights_.output, norm(x, weights_.output_norm), weights_.output_bias);
    if (const float cap = hp_.final_logit_softcap; cap != 0.0f)
      g_.logits = ggml_scale(c_, ggml_tanh(c_, ggml_scale(c_, g_.logits, 1.0f / cap)), cap);
    ggml_set_output(g_.logits);
    ggml_build_forward_expand(g_.graph, g_.logits);
  }

 private:
  ggml_tensor* input(int64_t rows) {
    ggml_tensor* t = ggml_new_tensor_1d(c_, GGML_TYPE_I32, rows);
    ggml_set_input(t);
    return t;
  }

  ggml_tensor* norm(ggml_tensor* x, ggml_tensor* weight) {
    return ggml_mul(c_, ggml_rms_norm(c_, x, hp_.rms_epsilon), weight);
  }

  ggml_tensor* norm_if(ggml_tensor* x, ggml_tensor* weight) { return weight ? norm(x, weight) : x; }

  ggml_tensor* linear(ggml_tensor* weight, ggml_tensor* x, ggml_tensor* bias) {
    return plus(ggml_mul_mat(c_, weight, x), bias);
  }
  ggml_tensor* plus(ggml_tensor* x, ggml_tensor* bias) { return bias ? ggml_add(c_, x, bias) : x; }

  // Columns [first, first + dim * heads) of a fused product, or a product of its own, as heads.
  ggml_tensor* heads(ggml_tensor* fused, int64_t first, ggml_tensor* weight, ggml_tensor* bias,
                     ggml_tensor* x, int dim, int num_heads) {
    const int64_t width = int64_t{dim} * num_heads;
    ggml_tensor* y = fused ? ggml_cont(c_, ggml_view_2d(c_, fused, width, g_.num_rows, fused->nb[1],
                                                        static_cast<size_t>(first) * sizeof(float)))
                           : ggml_mul_mat(c_, weight, x);
    return ggml_reshape_3d(c_, plus(y, bias), dim, num_heads, g_.num_rows);
  }

  ggml_tensor* rope(ggml_tensor* x, int layer) {
    const RopeParameters& r = hp_.rope_of(layer);
    const int mode =
        r.pairs == RopePairs::kNeighbours ? GGML_ROPE_TYPE_NORMAL : GGML_ROPE_TYPE_NEOX;
    return ggml_rope_ext(c_, x, g_.positions, weights_.rope_freqs, r.dimensions, mode,
                         r.original_context, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor,
                         r.beta_fast, r.beta_slow);
  }

  ggml_tensor* attention(ggml_tensor* x, int layer, bool store_only) {
    const LayerWeights& w = weights_.layers[layer];
    const int64_t q_width = int64_t{hp_.num_q_heads} * hp_.key_head_dim;
    const int64_t k_width = int64_t{hp_.num_kv_heads} * hp_.key_head_dim;
    ggml_tensor* h = norm(x, w.attn_norm);
    ggml_tensor* fused = w.qkv ? linear(w.qkv, h, w.qkv_bias) : nullptr;
    ggml_tensor* k = heads(fused, q_width, w.k, w.k_bias, h, hp_.key_head_dim, hp_.num_kv_heads);
    k = rope(norm_if(k, w.k_norm), layer);
    ggml_tensor* v =
        heads(fused, q_width + k_width, w.v, w.v_bias, h, hp_.value_head_dim, hp_.num_kv_heads);
    ggml_tensor* stored = attention_.store_node(c_, layer, k, v);
    if (store_only) return stored;
    ggml_tensor* q = heads(fused, 0, w.q, w.q_bias, h, hp_.key_head_dim, hp_.num_q_heads);
    q = rope(norm_if(q, w.q_norm), layer);
    return attention_.attend_node(c_, layer, q, stored);
  }

  ggml_tensor* feed_forward(ggml_tensor* x, const LayerWeights& w) {
    ggml_tensor* up = linear(w.up, x, w.up_bias);
    ggml_tensor* gate = linear(w.gate, x, w.gate_bias);
    ggml_tensor* product = hp_.activation == Activation::kGelu ? ggml_geglu_split(c_, gate, up)
                                                               : ggml_swiglu_split(c_, gate, up);
    return linear(w.down, product, w.down_bias);
  }

  const Hyperparameters& hp_;
  const Weights& weights_;
  PagedAttention& attention_;
  StepGraph& g_;
  ggml_context* c_;
};

}  // namespace

int64_t step_buffer_bytes(const Hyperparameters& hp, int64_t num_rows) noexcept {
  const int64_t queries = int64_t{hp.num_q_heads} * hp.key_head_dim;
  const int64_t attended = int64_t{hp.num_q_heads} * hp.value_head_dim;
  const int64_t stored = int64_t{hp.num_kv_heads} * (hp.key_head_dim + hp.value_head_dim);
  // Beside the residual, its norm and what is added to it: q, k and v, cut from one product in some files, and what
  // attention gives; or gate, up and their product.
  const int64_t widest = std::max(2 * (queries + stored) + attended, 3 * hp.feed_forward_length);
  const auto bytes = static_cast<int64_t>(sizeof(float));
  return bytes * (num_rows * (3 * hp.embedding_length + widest) + hp.vocab_size);
}

StepGraphs::StepGraphs(const Hyperparameters& hp, const Weights& weights, PagedAttention& attention,
                       int num_threads, bool use_reference)
    : hp_(hp),
      weights_(weights),
      attention_(attention),
      num_threads_(num_threads),
      use_reference_(use_reference) {
  ggml_threadpool_params params = ggml_threadpool_params_default(num_threads);
  threads_.reset(ggml_threadpool_new(&params));
  if (!threads_)
    throw std::runtime_error("ggml: no pool of " + std::to_string(num_threads) + " threads");
}

StepGraph& StepGraphs::get(int num_rows, int num_outputs) {
  const auto found = std::ranges::find_if(graphs_, [&](const auto& g) {
    return g->num_rows == num_rows && g->num_outputs == num_outputs;
  });
  if (found != graphs_.end()) {
    graphs_.splice(graphs_.begin(), graphs_, found);
  } else {
    if (graphs_.size() == kMostGraphs) graphs_.pop_back();
    graphs_.push_front(build(num_rows, num_outputs));
  }
  return *graphs_.front();
}

// Memory for all graphs. Where there is too little of it, the graphs that lie in it go.
bool StepGraphs::provide(size_t bytes) {
  if (buffer_ && ggml_backend_buffer_get_size(buffer_.get()) >= bytes) return true;
  graphs_.clear();
  buffer_.reset();
  memory_.reset();
  constexpr size_t kPage = 4096;
  bytes = (bytes + kPage - 1) / kPage * kPage;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, bytes)));
  if (!memory_) return false;
  buffer_.reset(ggml_backend_cpu_buffer_from_ptr(memory_.get(), bytes));
  return buffer_ != nullptr;
}

// ggml's allocator says where each tensor lies in a buffer of its own, which nobody writes to; the tensors are then moved
// into ours. False: no memory.
bool StepGraphs::place(StepGraph& graph) {
  const std::unique_ptr<ggml_gallocr, FreeGraphAllocator> allocator(
      ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  if (!allocator || !ggml_gallocr_alloc_graph(allocator.get(), graph.graph)) return false;
  ggml_backend_buffer* const planned = graph.tokens->buffer;
  graph.buffer_bytes = ggml_backend_buffer_get_size(planned);
  if (!provide(graph.buffer_bytes)) return false;
  auto* const base = static_cast<std::byte*>(ggml_backend_buffer_get_base(planned));
  for (ggml_tensor* t = ggml_get_first_tensor(graph.context.get()); t != nullptr;
       t = ggml_get_next_tensor(graph.context.get(), t)) {
    if (t->buffer != planned) continue;
    t->data = memory_.get() + (static_cast<std::byte*>(t->data) - base);
    t->buffer = buffer_.get();
  }
  return true;
}

std::unique_ptr<StepGraph> StepGraphs::build(int num_rows, int num_outputs) {
  auto g = std::make_unique<StepGraph>();
  g->num_rows = num_rows;
  g->num_outputs = num_outputs;
  const size_t most = static_cast<size_t>(hp_.num_layers) * kTensorsPerLayer + kTensorsAround;
  g->memory.resize(most * ggml_tensor_overhead() + ggml_graph_overhead_custom(most, false));
  g->context.reset(ggml_init({g->memory.size(), g->memory.data(), /*no_alloc=*/true}));
  g->graph = ggml_new_graph_custom(g->context.get(), most, false);
  Builder(hp_, weights_, attention_, *g).build();
  if (!place(*g)) {
    throw std::runtime_error("no memory for a step of " + std::to_string(num_rows) +
                             " tokens and " + std::to_string(num_outputs) + " rows of logits");
  }
  g->plan = ggml_graph_plan(g->graph, num_threads_, threads_.get());
  g->plan.use_ref = use_reference_;
  return g;
}

void StepGraphs::run(StepGraph& graph) {
  if (work_.size() < graph.plan.work_size) work_.resize(graph.plan.work_size);
  graph.plan.work_data = work_.data();
  if (ggml_graph_compute(graph.graph, &graph.plan) != GGML_STATUS_SUCCESS) {
    throw std::runtime_error("ggml could not compute a step of " + std::to_string(graph.num_rows) +
                             " tokens");
  }
}

}  // namespace pagedkv
