// The tensors of a model by the role they play, and the tables that say which tensors a family has.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

struct ggml_tensor;

namespace pagedkv {

class GgufFile;
struct Family;
struct Hyperparameters;

// Shapes in ggml's order, innermost first: a matrix [in, out] takes rows of `in` to rows of `out`.
// Null where a tensor is optional and absent.
struct LayerWeights {
  ggml_tensor* attn_norm;  // [embedding]
  ggml_tensor* qkv;        // [embedding, q + k + v], or
  ggml_tensor *q, *k, *v;  // [embedding, q], [embedding, k], [embedding, v]
  ggml_tensor* qkv_bias;   // [q + k + v], or
  ggml_tensor *q_bias, *k_bias, *v_bias;
  ggml_tensor *q_norm, *k_norm;  // [key_head_dim], of each head before RoPE
  ggml_tensor* output;           // [attended, embedding]
  ggml_tensor* output_bias;      // [embedding]
  ggml_tensor* attn_post_norm;   // [embedding], of what attention adds
  ggml_tensor* ffn_norm;         // [embedding]
  ggml_tensor *gate, *up;        // [embedding, feed_forward]
  ggml_tensor* down;             // [feed_forward, embedding]
  ggml_tensor *gate_bias, *up_bias, *down_bias;
  ggml_tensor* ffn_post_norm;  // [embedding], of what the feed-forward network adds
};

struct Weights {
  ggml_tensor* token_embedding;  // [embedding, vocabulary]
  ggml_tensor* output_norm;      // [embedding]
  ggml_tensor* output;       // [embedding, vocabulary]; the token embedding where there is no other
  ggml_tensor* output_bias;  // [vocabulary]
  ggml_tensor* rope_freqs;   // [rotations]
  std::vector<LayerWeights> layers;

  std::vector<ggml_tensor*> matrices() const;  // those that rows are multiplied with
};

// Sizes that depend on the file's keys.
enum class Width {
  kNone,  // as the second one: a vector, not a matrix
  kEmbedding,
  kKeyHead,   // key_head_dim
  kQueries,   // num_q_heads * key_head_dim
  kKeys,      // num_kv_heads * key_head_dim
  kValues,    // num_kv_heads * value_head_dim
  kFused,     // the three together
  kAttended,  // num_q_heads * value_head_dim
  kFeedForward,
  kVocabulary,
  kRotations,  // rope.dimensions / 2
};

// A tensor that a family has in Owner, a layer or the model, and what it is read into.
template <class Owner>
struct TensorRule {
  std::string_view name;  // a layer's after "blk.<layer>."
  ggml_tensor* Owner::* role;
  Width in, out = Width::kNone;
  bool needed = true;
  // Not read where the first of these is there, nor where the second is not; both stand before.
  ggml_tensor* Owner::* unless = nullptr;
  ggml_tensor* Owner::* with = nullptr;
};

// Elements of the tensors that a family needs, and of an output matrix where it is not the embedding.
int64_t count_parameters(const Family& family, const Hyperparameters& hp, bool own_output);

// Throws ModelError: a tensor is missing, has another shape or a type we cannot multiply with, or is
// in the file and read by nobody.
Weights bind_weights(const GgufFile& file, const Family& family, const Hyperparameters& hp);

}  // namespace pagedkv
