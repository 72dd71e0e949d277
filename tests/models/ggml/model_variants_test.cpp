// Every family, and every way in which its files may differ, beside llama.cpp on the same file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>

#include "llama.h"
#include "models/ggml/ggml_log.h"
#include "models/ggml/test_models.h"

namespace pagedkv::test {
namespace {

constexpr int kPositions = 300;

// Logits [tokens, vocab] of llama.cpp with float32 keys and values and without flash attention, which rounds.
std::vector<float> llama_cpp_logits(const std::string& path, std::span<const int32_t> tokens) {
  const LogCapture quiet;
  llama_model_params model_params = llama_model_default_params();
  model_params.use_extra_bufts = false;
  const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(
      llama_model_load_from_file(path.c_str(), model_params), llama_model_free);
  if (!model) throw std::runtime_error("llama.cpp cannot load " + path);
  const auto count = static_cast<uint32_t>(tokens.size());
  llama_context_params params = llama_context_default_params();
  params.n_ctx = params.n_batch = params.n_ubatch = count;
  params.n_threads = params.n_threads_batch = 1;
  params.type_k = params.type_v = GGML_TYPE_F32;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.no_perf = true;
  const std::unique_ptr<llama_context, decltype(&llama_free)> context(
      llama_init_from_model(model.get(), params), llama_free);
  if (!context) throw std::runtime_error("llama.cpp cannot run " + path);
  llama_batch batch = llama_batch_init(static_cast<int32_t>(count), 0, 1);
  for (int32_t i = 0; i < static_cast<int32_t>(count); ++i) {
    batch.token[i] = tokens[static_cast<size_t>(i)];
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  batch.n_tokens = static_cast<int32_t>(count);
  const int32_t status = llama_decode(context.get(), batch);
  llama_batch_free(batch);
  if (status != 0) throw std::runtime_error("llama.cpp cannot decode " + path);
  const int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
  std::vector<float> out;
  for (int32_t i = 0; i < static_cast<int32_t>(count); ++i) {
    const float* row = llama_get_logits_ith(context.get(), i);
    out.insert(out.end(), row, row + vocab);
  }
  return out;
}

double deviation(std::span<const float> values) {
  double sum = 0, squares = 0;
  for (const float v : values) sum += v, squares += static_cast<double>(v) * v;
  const auto n = static_cast<double>(values.size());
  return std::sqrt(squares / n - sum / n * (sum / n));
}

double largest_difference(std::span<const float> a, std::span<const float> b) {
  double out = 0;
  for (size_t i = 0; i < a.size(); ++i)
    out = std::max(out, std::abs(static_cast<double>(a[i]) - b[i]));
  return out;
}

class ModelVariant : public testing::TestWithParam<std::string> {};

TEST_P(ModelVariant, HasLlamaCppsLogits) {
  const std::string path = model_path("model-variants/" + GetParam() + ".gguf");
  const std::string twin = path.substr(0, path.size() - 5) + ".twin.gguf";
  const auto tokens = random_tokens(kPositions, 1);
  const auto ours = all_logits(*load(path), tokens);
  const auto theirs = llama_cpp_logits(std::filesystem::exists(twin) ? twin : path, tokens);
  ASSERT_EQ(ours.size(), theirs.size());
  const double unit = deviation(theirs);
  ASSERT_GT(unit, 0.1);  // else the bound below would say nothing
  EXPECT_LE(largest_difference(ours, theirs), 1e-3 * unit);
}

// Only the variants that the maker knows; each is here, so that one that is missing fails.
const std::string kVariants[] = {"tied",
                                 "untied",
                                 "gqa3_dim64",
                                 "gqa4_dim64",
                                 "gqa7_dim36",
                                 "gqa1_dim80",
                                 "attention_biases",
                                 "all_biases",
                                 "fused",
                                 "fused_bias",
                                 "fused_split_biases",
                                 "rope_freqs",
                                 "linear",
                                 "linear_old_key",
                                 "no_scaling",
                                 "yarn",
                                 "yarn_attn_factor",
                                 "yarn_betas",
                                 "yarn_rope_freqs",
                                 "partial_rope",
                                 "key_length",
                                 "short_values",
                                 "long_values",
                                 "window",
                                 "k_quants",
                                 "qwen2",
                                 "qwen2_untied",
                                 "qwen2_yarn",
                                 "qwen3",
                                 "qwen3_untied",
                                 "qwen3_fused",
                                 "qwen3_yarn",
                                 "gemma3",
                                 "gemma3_untied",
                                 "gemma3_old_keys",
                                 "gemma3_pattern",
                                 "gemma3_period",
                                 "gemma3_all_windows",
                                 "gemma3_no_window",
                                 "gemma3_linear",
                                 "gemma3_softcap",
                                 "gemma3_wide_scale"};

INSTANTIATE_TEST_SUITE_P(All, ModelVariant, testing::ValuesIn(kVariants),
                         [](const auto& info) { return info.param; });

TEST(ModelVariants, AreAllCompared) {
  std::vector<std::string> compared(std::begin(kVariants), std::end(kVariants));
  std::ranges::sort(compared);
  EXPECT_EQ(model_variants(), compared);
}

}  // namespace
}  // namespace pagedkv::test
