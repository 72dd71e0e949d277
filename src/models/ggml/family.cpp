#include "models/ggml/family.h"

#include <algorithm>

#include "models/model.h"

namespace pagedkv {
namespace {

// What llama.cpp's load_hparams reads for every family, and what its converter writes beside it.
// Not in the table because llama.cpp does not honour them for these families and a file that has them
// means something else: attention.scale, logit_scale, embedding_scale, residual_scale, the soft cap of scores,
// attention.clamp_kqv, attention.temperature_*, longrope's factors, rope.dimension_sections.
constexpr KeyRule kCommonKeys[] = {
    {"context_length", KeyUse::kRead},
    {"embedding_length", KeyUse::kRead},
    {"block_count", KeyUse::kRead},
    {"feed_forward_length", KeyUse::kRead},
    {"vocab_size", KeyUse::kHarmless},  // the embedding's rows decide
    {"attention.head_count", KeyUse::kRead},
    {"attention.head_count_kv", KeyUse::kRead},
    {"attention.key_length", KeyUse::kRead},
    {"attention.value_length", KeyUse::kRead},
    {"attention.layer_norm_rms_epsilon", KeyUse::kRead},
    {"attention.causal", KeyUse::kOnly, 1},
    {"attention.sliding_window", KeyUse::kRead},
    {"rope.dimension_count", KeyUse::kRead},
    {"rope.freq_base", KeyUse::kRead},
    {"rope.scale_linear", KeyUse::kRead},
    {"rope.scaling.type", KeyUse::kRead},
    {"rope.scaling.factor", KeyUse::kRead},
    {"rope.scaling.original_context_length", KeyUse::kRead},
    {"rope.scaling.attn_factor", KeyUse::kRead},
    {"rope.scaling.finetuned", KeyUse::kHarmless},
    {"rope.scaling.yarn_beta_fast", KeyUse::kRead},
    {"rope.scaling.yarn_beta_slow", KeyUse::kRead},
    {"rope.scaling.yarn_log_multiplier", KeyUse::kRead},
    {"rope.scaling.yarn_ext_factor", KeyUse::kOnly, 1},
    {"rope.scaling.yarn_attn_factor", KeyUse::kOnly, 1},
    {"rope.scaling.alpha", KeyUse::kOnly, 0},
    {"expert_count", KeyUse::kOnly, 0},
    {"expert_used_count", KeyUse::kOnly, 0},
    {"nextn_predict_layers", KeyUse::kOnly, 0},
    {"pooling_type", KeyUse::kHarmless},        // of embeddings, which we do not make
    {"tensor_data_layout", KeyUse::kHarmless},  // a remark
};

constexpr bool kOptional = false;

constexpr KeyRule kGemma3Keys[] = {
    {"attention.sliding_window_pattern", KeyUse::kRead},
    {"rope.freq_base_swa", KeyUse::kRead},
    {"final_logit_softcapping", KeyUse::kRead},
    {"mm.tokens_per_image", KeyUse::kHarmless},  // of images, which we do not read
};

constexpr TensorRule<Weights> kCommonTensors[] = {
    {"token_embd.weight", &Weights::token_embedding, Width::kEmbedding, Width::kVocabulary},
    {"output_norm.weight", &Weights::output_norm, Width::kEmbedding},
    {"output.weight", &Weights::output, Width::kEmbedding, Width::kVocabulary, kOptional},
};
constexpr TensorRule<Weights> kLlamaTensors[] = {
    {"rope_freqs.weight", &Weights::rope_freqs, Width::kRotations, Width::kNone, kOptional},
};
constexpr TensorRule<Weights> kQwen2Tensors[] = {
    {"output.bias", &Weights::output_bias, Width::kVocabulary, Width::kNone, kOptional},
};

using Layer = LayerWeights;
constexpr TensorRule<Layer> kCommonLayerTensors[] = {
    {"attn_norm.weight", &Layer::attn_norm, Width::kEmbedding},
    {"attn_qkv.weight", &Layer::qkv, Width::kEmbedding, Width::kFused, kOptional},
    {"attn_qkv.bias", &Layer::qkv_bias, Width::kFused, Width::kNone, kOptional, nullptr,
     &Layer::qkv},
    {"attn_q.weight", &Layer::q, Width::kEmbedding, Width::kQueries, true, &Layer::qkv},
    {"attn_k.weight", &Layer::k, Width::kEmbedding, Width::kKeys, true, &Layer::qkv},
    {"attn_v.weight", &Layer::v, Width::kEmbedding, Width::kValues, true, &Layer::qkv},
    {"attn_q.bias", &Layer::q_bias, Width::kQueries, Width::kNone, kOptional, &Layer::qkv_bias},
    {"attn_k.bias", &Layer::k_bias, Width::kKeys, Width::kNone, kOptional, &Layer::qkv_bias},
    {"attn_v.bias", &Layer::v_bias, Width::kValues, Width::kNone, kOptional, &Layer::qkv_bias},
    {"attn_output.weight", &Layer::output, Width::kAttended, Width::kEmbedding},
    {"attn_output.bias", &Layer::output_bias, Width::kEmbedding, Width::kNone, kOptional},
    {"ffn_norm.weight", &Layer::ffn_norm, Width::kEmbedding},
    {"ffn_gate.weight", &Layer::gate, Width::kEmbedding, Width::kFeedForward},
    {"ffn_up.weight", &Layer::up, Width::kEmbedding, Width::kFeedForward},
    {"ffn_down.weight", &Layer::down, Width::kFeedForward, Width::kEmbedding},
    {"ffn_gate.bias", &Layer::gate_bias, Width::kFeedForward, Width::kNone, kOptional},
    {"ffn_up.bias", &Layer::up_bias, Width::kFeedForward, Width::kNone, kOptional},
    {"ffn_down.bias", &Layer::down_bias, Width::kEmbedding, Width::kNone, kOptional},
};

constexpr TensorRule<Layer> kQwen3LayerTensors[] = {
    {"attn_q_norm.weight", &Layer::q_norm, Width::kKeyHead},
    {"attn_k_norm.weight", &Layer::k_norm, Width::kKeyHead},
};
constexpr TensorRule<Layer> kGemma3LayerTensors[] = {
    {"attn_q_norm.weight", &Layer::q_norm, Width::kKeyHead},
    {"attn_k_norm.weight", &Layer::k_norm, Width::kKeyHead},
    {"post_attention_norm.weight", &Layer::attn_post_norm, Width::kEmbedding},
    {"post_ffw_norm.weight", &Layer::ffn_post_norm, Width::kEmbedding},
};

constexpr Family kFamilies[] = {
    {.name = "llama",
     .models = "Llama 1 to 3, SmolLM, Mistral 7B and others of that shape",
     .graph = {.rope_pairs = RopePairs::kNeighbours},
     .tensors = kLlamaTensors},
    {.name = "qwen2",
     .models = "Qwen 2 and 2.5, dense",
     .graph = {.rope_pairs = RopePairs::kHalves},
     .tensors = kQwen2Tensors},
    {.name = "qwen3",
     .models = "Qwen 3, dense",
     .graph = {.rope_pairs = RopePairs::kHalves},
     .layer_tensors = kQwen3LayerTensors},
    {.name = "gemma3",
     .models = "Gemma 3, text",
     .graph = {.rope_pairs = RopePairs::kHalves,
               .activation = Activation::kGelu,
               .scales_embedding = true,
               .full_period = 6,
               .wide_scale_layers = 62},
     .keys = kGemma3Keys,
     .layer_tensors = kGemma3LayerTensors},
};

std::string supported() {
  std::string out;
  for (const Family& f : kFamilies) {
    out += out.empty() ? "" : "; ";
    out += std::string(f.name) + " (" + std::string(f.models) + ")";
  }
  return out;
}

void check_key(const GgufFile& file, const Family& family, const std::string& key) {
  const std::string_view name = std::string_view(key).substr(family.name.size() + 1);
  const KeyRule* rule = nullptr;
  for (const std::span<const KeyRule> keys : {std::span<const KeyRule>(kCommonKeys), family.keys})
    for (const KeyRule& r : keys)
      if (r.name == name) rule = &r;
  if (!rule) {
    file.fail(key +
              " is not known for this family and may change its results, so the model is not run");
  }
  if (rule->use != KeyUse::kOnly) return;
  const double value = *file.number(key);
  if (value == rule->only) return;
  if (name == "expert_count") {
    file.fail(key + " is " + std::to_string(value) +
              ": mixtures of experts are not supported; try a dense model of the same family");
  }
  file.fail(key + " is " + std::to_string(value) + "; only " + std::to_string(rule->only) +
            " is supported");
}

}  // namespace

std::span<const Family> families() noexcept { return kFamilies; }
std::span<const TensorRule<Weights>> common_tensors() noexcept { return kCommonTensors; }
std::span<const TensorRule<LayerWeights>> common_layer_tensors() noexcept {
  return kCommonLayerTensors;
}

const Family& find_family(const GgufFile& file) {
  const auto type = file.text("general.type");
  if (type && *type != "model") file.fail("general.type is " + *type + "; only a model can be run");
  const auto name = file.text("general.architecture");
  if (!name) file.fail("general.architecture is missing; supported: " + supported());
  for (const Family& family : kFamilies) {
    if (family.name != *name) continue;
    for (const std::string& key : file.keys()) {
      if (key.starts_with(*name + ".")) check_key(file, family, key);
    }
    return family;
  }
  file.fail("architecture " + *name + " is not supported; supported: " + supported() +
            ". Try a GGUF file of one of these, such as SmolLM2-135M-Instruct");
}

}  // namespace pagedkv
