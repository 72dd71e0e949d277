// The numbers of a model: sizes, constants and how positions enter.
#pragma once

#include <cstdint>
#include <vector>

#include "models/ggml/family.h"
#include "models/ggml/gguf_file.h"

namespace pagedkv {

// Arguments of ggml_rope_ext, resolved as llama.cpp resolves them (llama-model.cpp load_hparams and
// llama-context.cpp, YaRN: https://arxiv.org/abs/2309.00071).
struct RopeParameters {
  RopePairs pairs = RopePairs::kNeighbours;
  int dimensions = 0;        // elements of a head that turn, the first ones
  int original_context = 0;  // tokens, for YaRN
  float freq_base = 10000.0f;
  float freq_scale = 1.0f;  // 1 / factor
  float ext_factor = 0.0f;  // 1: YaRN
  float attn_factor = 1.0f;
  float beta_fast = 32.0f;
  float beta_slow = 1.0f;
};

struct Hyperparameters {
  int num_layers = 0;
  int num_q_heads = 0;
  int num_kv_heads = 0;    // divides num_q_heads
  int key_head_dim = 0;    // 1..512
  int value_head_dim = 0;  // 1..512
  int64_t embedding_length = 0;
  int64_t feed_forward_length = 0;
  int64_t vocab_size = 0;      // rows of the token embedding
  int64_t context_length = 0;  // tokens the model was trained for
  float rms_epsilon = 0.0f;
  float attention_scale = 0.0f;
  RopeParameters rope;
  // Layers that see the last `sliding_window` tokens alone, up to their own, and turn by their own angles.
  int sliding_window = 0;         // tokens; 0: no layer
  std::vector<bool> is_windowed;  // by layer
  RopeParameters windowed_rope;
  float embedding_scale = 1.0f;
  float final_logit_softcap = 0.0f;  // 0: none
  Activation activation = Activation::kSilu;

  const RopeParameters& rope_of(int layer) const {
    return is_windowed[static_cast<size_t>(layer)] ? windowed_rope : rope;
  }
};

// Far above every model there is, and low enough that no product of them overflows.
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxHeads = 4096;
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int64_t kMaxWidth = int64_t{1} << 20;
inline constexpr int64_t kMaxContext = int64_t{1} << 30;

// All layers but every period-th have a window; with period 0 all have.
std::vector<bool> windowed_layers(int num_layers, int64_t period);

// Throws ModelError naming the key, its value and the limit.
Hyperparameters read_hyperparameters(const GgufFile& file, const Family& family);

}  // namespace pagedkv
