#include "models/ggml/weights.h"

#include <initializer_list>
#include <set>
#include <string>

#include "ggml-cpu.h"
#include "ggml.h"
#include "models/model.h"

namespace pagedkv {
namespace {

std::string show_shape(const int64_t* ne, int dims) {
  std::string out = "[";
  for (int i = 0; i < dims; ++i) out += (i ? ", " : "") + std::to_string(ne[i]);
  return out + "]";
}

bool can_multiply(ggml_type type) {
  return type == GGML_TYPE_F32 || ggml_get_type_traits_cpu(type)->vec_dot != nullptr;
}

class Binder {
 public:
  explicit Binder(const GgufFile& file) : file_(file) {}

  ggml_tensor* matrix(const std::string& name, int64_t in, int64_t out) {
    ggml_tensor* t = optional_matrix(name, in, out);
    if (!t) missing(name);
    return t;
  }
  ggml_tensor* optional_matrix(const std::string& name, int64_t in, int64_t out) {
    ggml_tensor* t = take(name, {in, out});
    if (t && !can_multiply(t->type)) {
      file_.fail("tensor " + name + " is of type " + ggml_type_name(t->type) +
                 ", which has no product on the CPU");
    }
    return t;
  }
  ggml_tensor* vector(const std::string& name, int64_t size) {
    ggml_tensor* t = optional_vector(name, size);
    if (!t) missing(name);
    return t;
  }
  ggml_tensor* optional_vector(const std::string& name, int64_t size) {
    ggml_tensor* t = take(name, {size});
    if (t && t->type != GGML_TYPE_F32) {
      file_.fail("tensor " + name + " is of type " + ggml_type_name(t->type) + "; f32 is needed");
    }
    return t;
  }
  void check_all_read() const {
    for (const ggml_tensor* t : file_.tensors()) {
      if (!read_.contains(t)) {
        file_.fail(std::string("tensor ") + t->name +
                   " is not known for this family and may change its results, " +
                   "so the model is not run");
      }
    }
  }

 private:
  ggml_tensor* take(const std::string& name, std::initializer_list<int64_t> shape) {
    ggml_tensor* t = file_.tensor(name);
    if (!t) return nullptr;
    int64_t wanted[GGML_MAX_DIMS] = {1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), wanted);
    if (!std::equal(wanted, wanted + GGML_MAX_DIMS, t->ne)) {
      file_.fail("tensor " + name + " has shape " + show_shape(t->ne, ggml_n_dims(t)) +
                 "; the file's keys ask for " + show_shape(wanted, static_cast<int>(shape.size())));
    }
    read_.insert(t);
    return t;
  }
  [[noreturn]] void missing(const std::string& name) const {
    file_.fail("tensor " + name + " is missing");
  }

  const GgufFile& file_;
  std::set<const ggml_tensor*> read_;
};

LayerWeights bind_layer(Binder& bind, const Hyperparameters& hp, int layer) {
  const std::string p = "blk." + std::to_string(layer) + ".";
  const int64_t e = hp.embedding_length, f = hp.feed_forward_length;
  const int64_t q = int64_t{hp.num_q_heads} * hp.key_head_dim;
  const int64_t k = int64_t{hp.num_kv_heads} * hp.key_head_dim;
  const int64_t v = int64_t{hp.num_kv_heads} * hp.value_head_dim;
  LayerWeights w{};
  w.attn_norm = bind.vector(p + "attn_norm.weight", e);
  w.qkv = bind.optional_matrix(p + "attn_qkv.weight", e, q + k + v);
  if (w.qkv) {
    w.qkv_bias = bind.optional_vector(p + "attn_qkv.bias", q + k + v);
  } else {
    w.q = bind.matrix(p + "attn_q.weight", e, q);
    w.k = bind.matrix(p + "attn_k.weight", e, k);
    w.v = bind.matrix(p + "attn_v.weight", e, v);
  }
  if (!w.qkv_bias) {
    w.q_bias = bind.optional_vector(p + "attn_q.bias", q);
    w.k_bias = bind.optional_vector(p + "attn_k.bias", k);
    w.v_bias = bind.optional_vector(p + "attn_v.bias", v);
  }
  w.output = bind.matrix(p + "attn_output.weight", int64_t{hp.num_q_heads} * hp.value_head_dim, e);
  w.output_bias = bind.optional_vector(p + "attn_output.bias", e);
  w.ffn_norm = bind.vector(p + "ffn_norm.weight", e);
  w.gate = bind.matrix(p + "ffn_gate.weight", e, f);
  w.up = bind.matrix(p + "ffn_up.weight", e, f);
  w.down = bind.matrix(p + "ffn_down.weight", f, e);
  w.gate_bias = bind.optional_vector(p + "ffn_gate.bias", f);
  w.up_bias = bind.optional_vector(p + "ffn_up.bias", f);
  w.down_bias = bind.optional_vector(p + "ffn_down.bias", e);
  return w;
}

}  // namespace

std::vector<ggml_tensor*> Weights::matrices() const {
  std::vector<ggml_tensor*> out{output};
  for (const LayerWeights& l : layers) {
    for (ggml_tensor* t : {l.qkv, l.q, l.k, l.v, l.output, l.gate, l.up, l.down}) {
      if (t) out.push_back(t);
    }
  }
  return out;
}

Weights bind_weights(const GgufFile& file, const Hyperparameters& hp) {
  Binder bind(file);
  Weights w{};
  w.token_embedding = bind.matrix("token_embd.weight", hp.embedding_length, hp.vocab_size);
  w.output_norm = bind.vector("output_norm.weight", hp.embedding_length);
  w.output = bind.optional_matrix("output.weight", hp.embedding_length, hp.vocab_size);
  if (!w.output) w.output = w.token_embedding;
  w.rope_freqs = bind.optional_vector("rope_freqs.weight", hp.rope.dimensions / 2);
  for (int i = 0; i < hp.num_layers; ++i) w.layers.push_back(bind_layer(bind, hp, i));
  bind.check_all_read();
  return w;
}

}  // namespace pagedkv
