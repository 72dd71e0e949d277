#include "models/ggml/weights.h"

#include <algorithm>
#include <set>
#include <span>
#include <string>

#include "ggml-cpu.h"
#include "ggml.h"
#include "models/ggml/family.h"
#include "models/ggml/gguf_file.h"
#include "models/ggml/hyperparameters.h"
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

int64_t size_of(Width width, const Hyperparameters& hp) {
  const int64_t queries = int64_t{hp.num_q_heads} * hp.key_head_dim;
  const int64_t keys = int64_t{hp.num_kv_heads} * hp.key_head_dim;
  const int64_t values = int64_t{hp.num_kv_heads} * hp.value_head_dim;
  switch (width) {
    case Width::kNone:
      return 1;
    case Width::kEmbedding:
      return hp.embedding_length;
    case Width::kKeyHead:
      return hp.key_head_dim;
    case Width::kQueries:
      return queries;
    case Width::kKeys:
      return keys;
    case Width::kValues:
      return values;
    case Width::kFused:
      return queries + keys + values;
    case Width::kAttended:
      return int64_t{hp.num_q_heads} * hp.value_head_dim;
    case Width::kFeedForward:
      return hp.feed_forward_length;
    case Width::kVocabulary:
      return hp.vocab_size;
    case Width::kRotations:
      return hp.rope.dimensions / 2;
  }
  return 0;
}

class Binder {
 public:
  Binder(const GgufFile& file, const Hyperparameters& hp) : file_(file), hp_(hp) {}

  template <class Owner>
  void bind(Owner& owner, std::span<const TensorRule<Owner>> rules, const std::string& prefix) {
    for (const auto& rule : rules) {
      if (rule.unless && owner.*rule.unless) continue;
      if (rule.with && !(owner.*rule.with)) continue;
      const std::string name = prefix + std::string(rule.name);
      ggml_tensor* t = file_.tensor(name);
      if (!t && rule.needed) file_.fail("tensor " + name + " is missing");
      if (t) check(*t, rule.in, rule.out);
      owner.*rule.role = t;
    }
  }

  void check_all_read() const {
    for (const ggml_tensor* t : file_.tensors()) {
      if (read_.contains(t)) continue;
      file_.fail(
          std::string("tensor ") + t->name +
          " is not known for this family and may change its results, so the model is not run");
    }
  }

 private:
  void check(const ggml_tensor& t, Width in, Width out) {
    const bool is_matrix = out != Width::kNone;
    const int64_t wanted[GGML_MAX_DIMS] = {size_of(in, hp_), size_of(out, hp_), 1, 1};
    if (!std::equal(wanted, wanted + GGML_MAX_DIMS, t.ne)) {
      file_.fail(std::string("tensor ") + t.name + " has shape " +
                 show_shape(t.ne, ggml_n_dims(&t)) + "; the file's keys ask for " +
                 show_shape(wanted, is_matrix ? 2 : 1));
    }
    if (is_matrix && !can_multiply(t.type)) {
      file_.fail(std::string("tensor ") + t.name + " is of type " + ggml_type_name(t.type) +
                 ", which has no product on the CPU");
    }
    if (!is_matrix && t.type != GGML_TYPE_F32) {
      file_.fail(std::string("tensor ") + t.name + " is of type " + ggml_type_name(t.type) +
                 "; f32 is needed");
    }
    read_.insert(&t);
  }

  const GgufFile& file_;
  const Hyperparameters& hp_;
  std::set<const ggml_tensor*> read_;
};

template <class Owner>
int64_t count_needed(std::span<const TensorRule<Owner>> rules, const Hyperparameters& hp) {
  int64_t sum = 0;
  for (const auto& rule : rules)
    if (rule.needed) sum += size_of(rule.in, hp) * size_of(rule.out, hp);
  return sum;
}

}  // namespace

int64_t count_parameters(const Family& family, const Hyperparameters& hp, bool own_output) {
  const int64_t model = count_needed(common_tensors(), hp) + count_needed(family.tensors, hp);
  const int64_t layer =
      count_needed(common_layer_tensors(), hp) + count_needed(family.layer_tensors, hp);
  return model + hp.num_layers * layer + (own_output ? hp.embedding_length * hp.vocab_size : 0);
}

std::vector<ggml_tensor*> Weights::matrices() const {
  std::vector<ggml_tensor*> out{output};
  for (const LayerWeights& l : layers) {
    for (ggml_tensor* t : {l.qkv, l.q, l.k, l.v, l.output, l.gate, l.up, l.down}) {
      if (t) out.push_back(t);
    }
  }
  return out;
}

Weights bind_weights(const GgufFile& file, const Family& family, const Hyperparameters& hp) {
  Binder binder(file, hp);
  Weights w{};
  binder.bind(w, common_tensors(), "");
  binder.bind(w, family.tensors, "");
  if (!w.output) w.output = w.token_embedding;
  for (int i = 0; i < hp.num_layers; ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    LayerWeights& layer = w.layers.emplace_back();
    binder.bind(layer, common_layer_tensors(), prefix);
    binder.bind(layer, family.layer_tensors, prefix);
  }
  binder.check_all_read();
  return w;
}

}  // namespace pagedkv
