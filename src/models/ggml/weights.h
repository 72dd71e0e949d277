// The tensors of a model, each checked for its shape and type, by the role they play.
#pragma once

#include <vector>

#include "models/ggml/gguf_file.h"
#include "models/ggml/hyperparameters.h"

struct ggml_tensor;

namespace pagedkv {

// Shapes in ggml's order, innermost first: a weight [in, out] takes rows of `in` to rows of `out`.
// q = num_q_heads * key_head_dim, k = num_kv_heads * key_head_dim, v = num_kv_heads * value_head_dim.
// Null where a tensor is optional and absent.
struct LayerWeights {
  ggml_tensor* attn_norm;  // [embedding]
  ggml_tensor* qkv;        // [embedding, q + k + v], or
  ggml_tensor *q, *k, *v;  // [embedding, q], [embedding, k], [embedding, v]
  ggml_tensor* qkv_bias;   // [q + k + v], or
  ggml_tensor *q_bias, *k_bias, *v_bias;
  ggml_tensor* output;       // [num_q_heads * value_head_dim, embedding]
  ggml_tensor* output_bias;  // [embedding]
  ggml_tensor* ffn_norm;     // [embedding]
  ggml_tensor *gate, *up;    // [embedding, feed_forward]
  ggml_tensor* down;         // [feed_forward, embedding]
  ggml_tensor *gate_bias, *up_bias, *down_bias;
};

struct Weights {
  ggml_tensor* token_embedding;  // [embedding, vocab]
  ggml_tensor* output_norm;      // [embedding]
  ggml_tensor* output;      // [embedding, vocab]; the token embedding where the file has no other
  ggml_tensor* rope_freqs;  // [rope.dimensions / 2], optional
  std::vector<LayerWeights> layers;

  std::vector<ggml_tensor*> matrices() const;  // those that rows are multiplied with
};

// Throws ModelError: a tensor is missing, has another shape or a type we cannot multiply with, or is
// in the file and read by nobody.
Weights bind_weights(const GgufFile& file, const Hyperparameters& hp);

}  // namespace pagedkv
