#include "models/ggml/hyperparameters.h"

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "ggml.h"
#include "models/model.h"

namespace pagedkv {
namespace {

constexpr double kMaxFactor = 1e6;

class Reader {
 public:
  Reader(const GgufFile& file, const Family& family)
      : file_(file), prefix_(std::string(family.name) + ".") {}

  int64_t needed(const char* name, int64_t most) const {
    const auto value = file_.integer(prefix_ + name, 1, most);
    if (!value) file_.fail(prefix_ + name + " is missing");
    return *value;
  }
  int64_t integer(const char* name, int64_t least, int64_t most, int64_t otherwise) const {
    return file_.integer(prefix_ + name, least, most).value_or(otherwise);
  }
  float real(const char* name, double least, double most, float otherwise) const {
    return static_cast<float>(file_.real(prefix_ + name, least, most).value_or(otherwise));
  }
  bool has(const char* name) const { return file_.has(prefix_ + name); }
  // Empty where the key is absent or no list of booleans.
  std::optional<std::vector<bool>> booleans(const char* name) const {
    return file_.boolean_array(prefix_ + name);
  }
  std::string text(const char* name, const char* otherwise) const {
    return file_.text(prefix_ + name).value_or(otherwise);
  }
  [[noreturn]] void fail(const std::string& name, const std::string& what) const {
    file_.fail(prefix_ + name + " " + what);
  }

 private:
  const GgufFile& file_;
  std::string prefix_;
};

// Growth of the logits' scale that YaRN asks for (llama-context.cpp, get_mscale).
float yarn_scale(float factor, float multiplier) {
  return factor <= 1.0f ? 1.0f : 0.1f * multiplier * std::log(factor) + 1.0f;
}

void read_yarn(const Reader& in, RopeParameters& rope) {
  rope.ext_factor = 1.0f;
  rope.beta_fast = in.real("rope.scaling.yarn_beta_fast", 1e-3, 1e6, rope.beta_fast);
  rope.beta_slow = in.real("rope.scaling.yarn_beta_slow", 1e-3, 1e6, rope.beta_slow);
  const float factor = 1.0f / rope.freq_scale;
  if (factor < 1.0f) in.fail("rope.scaling.factor", "is below 1, which YaRN does not define");
  const float multiplier = in.real("rope.scaling.yarn_log_multiplier", 0, 1e3, 0.0f);
  rope.attn_factor = yarn_scale(factor, 1.0f);
  if (multiplier != 0.0f) rope.attn_factor /= yarn_scale(factor, multiplier);
  // ggml_rope_ext multiplies by this once more, so llama.cpp takes it out first.
  rope.attn_factor *= 1.0f / (1.0f + 0.1f * std::log(factor));
}

RopeParameters read_rope(const Reader& in, const Hyperparameters& hp) {
  RopeParameters rope;
  rope.dimensions =
      static_cast<int>(in.integer("rope.dimension_count", 2, hp.key_head_dim, hp.key_head_dim));
  if (rope.dimensions % 2 != 0)
    in.fail("rope.dimension_count", "is " + std::to_string(rope.dimensions) + "; it must be even");
  rope.freq_base = in.real("rope.freq_base", 1.0, 1e12, rope.freq_base);
  rope.original_context = static_cast<int>(
      in.integer("rope.scaling.original_context_length", 1, kMaxContext, hp.context_length));
  const char* factor_key =
      in.has("rope.scaling.factor") ? "rope.scaling.factor" : "rope.scale_linear";
  const float factor = in.real(factor_key, 0, kMaxFactor, 0.0f);
  if (factor != 0.0f && factor < 1e-3f) in.fail(factor_key, "is below 0.001");
  rope.freq_scale = factor == 0.0f ? 1.0f : 1.0f / factor;  // 0: unset, in llama.cpp too

  const std::string type = in.text("rope.scaling.type", "linear");
  if (type == "none") {
    rope.freq_scale = 1.0f;
  } else if (type == "yarn") {
    read_yarn(in, rope);
  } else if (type != "linear") {
    in.fail("rope.scaling.type", "is " + type + "; supported: none, linear, yarn");
  }
  rope.attn_factor *= in.real("rope.scaling.attn_factor", 1e-3, 1e3, 1.0f);
  return rope;
}

// Which layers have a window. llama.cpp reads none for llama and qwen2 files; ours is what the key says (Mistral 7B
// 0.1: 4,096 tokens in every layer).
void read_windows(const Reader& in, const FamilyGraph& graph, Hyperparameters& hp) {
  constexpr const char* kPattern = "attention.sliding_window_pattern";
  const auto num_layers = static_cast<size_t>(hp.num_layers);
  hp.is_windowed.assign(num_layers, false);
  hp.windowed_rope = hp.rope;
  hp.sliding_window = static_cast<int>(in.integer("attention.sliding_window", 0, kMaxContext, 0));
  if (hp.sliding_window == 0) return;
  if (const auto listed = in.booleans(kPattern)) {
    if (listed->size() != num_layers)
      in.fail(kPattern, "has " + std::to_string(listed->size()) + " entries; there are " +
                            std::to_string(num_layers) + " layers");
    hp.is_windowed = *listed;
  } else {
    hp.is_windowed =
        windowed_layers(hp.num_layers, in.integer(kPattern, 0, kMaxLayers, graph.full_period));
  }
  if (graph.full_period > 0) {  // as llama.cpp: a base and no scaling of their own
    hp.windowed_rope.freq_base = in.real("rope.freq_base_swa", 1.0, 1e12, 10000.0f);
    hp.windowed_rope.freq_scale = 1.0f;
  }
}

}  // namespace

std::vector<bool> windowed_layers(int num_layers, int64_t period) {
  std::vector<bool> out(static_cast<size_t>(num_layers), true);
  for (size_t i = 0; period > 0 && i < out.size(); ++i)
    out[i] = static_cast<int64_t>(i) % period < period - 1;
  return out;
}

Hyperparameters read_hyperparameters(const GgufFile& file, const Family& family) {
  const Reader in(file, family);
  Hyperparameters hp;
  hp.num_layers = static_cast<int>(in.needed("block_count", kMaxLayers));
  hp.embedding_length = in.needed("embedding_length", kMaxWidth);
  hp.feed_forward_length = in.needed("feed_forward_length", kMaxWidth);
  hp.context_length = in.needed("context_length", kMaxContext);
  hp.num_q_heads = static_cast<int>(in.needed("attention.head_count", kMaxHeads));
  hp.num_kv_heads =
      static_cast<int>(in.integer("attention.head_count_kv", 1, kMaxHeads, hp.num_q_heads));
  if (hp.num_q_heads % hp.num_kv_heads != 0) {
    in.fail("attention.head_count",
            "is " + std::to_string(hp.num_q_heads) + "; it must be a multiple of " +
                "attention.head_count_kv, " + std::to_string(hp.num_kv_heads));
  }
  const bool explicit_dims = in.has("attention.key_length") && in.has("attention.value_length");
  if (!explicit_dims && hp.embedding_length < hp.num_q_heads) {
    in.fail("embedding_length", "is " + std::to_string(hp.embedding_length) +
                                    ", less than one element for each of " +
                                    std::to_string(hp.num_q_heads) + " heads");
  }
  const int64_t head_dim = hp.embedding_length / hp.num_q_heads;
  hp.key_head_dim = static_cast<int>(in.integer("attention.key_length", 1, kMaxHeadDim, head_dim));
  hp.value_head_dim =
      static_cast<int>(in.integer("attention.value_length", 1, kMaxHeadDim, head_dim));
  if (hp.key_head_dim > kMaxHeadDim || hp.value_head_dim > kMaxHeadDim) {
    in.fail("attention.head_count",
            "gives heads of " + std::to_string(head_dim) + " elements; at most 512 are supported");
  }
  hp.rms_epsilon = static_cast<float>(
      file.real(std::string(family.name) + ".attention.layer_norm_rms_epsilon", 0, 1).value_or(-1));
  if (hp.rms_epsilon < 0) in.fail("attention.layer_norm_rms_epsilon", "is missing");
  const bool wide_scale = hp.num_layers == family.graph.wide_scale_layers;
  hp.attention_scale =
      1.0f / std::sqrt(static_cast<float>(wide_scale ? head_dim : hp.key_head_dim));
  hp.rope = read_rope(in, hp);
  hp.rope.pairs = family.graph.rope_pairs;
  read_windows(in, family.graph, hp);
  if (family.graph.scales_embedding)
    hp.embedding_scale = std::sqrt(static_cast<float>(hp.embedding_length));
  hp.final_logit_softcap = in.real("final_logit_softcapping", 0.0, 1e6, 0.0f);
  hp.activation = family.graph.activation;

  const ggml_tensor* embedding = file.tensor("token_embd.weight");
  if (!embedding) file.fail("tensor token_embd.weight is missing");
  if (embedding->ne[1] > kMaxWidth * 16)
    file.fail("tensor token_embd.weight has " + std::to_string(embedding->ne[1]) + " rows");
  hp.vocab_size = embedding->ne[1];
  const auto tokens = file.array_length("tokenizer.ggml.tokens");
  if (tokens && *tokens != hp.vocab_size) {
    file.fail("tokenizer.ggml.tokens has " + std::to_string(*tokens) +
              " entries; token_embd.weight has " + std::to_string(hp.vocab_size) + " rows");
  }
  return hp;
}

}  // namespace pagedkv
