// The same bits whichever way they are reached: prompt and generated log-probabilities compare with ==.
#include <gtest/gtest.h>
#include <llama.h>

#include <cstdlib>
#include <filesystem>

#include "acceptance/test_model.h"
#include "models/ggml/ggml_text.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::testing {
namespace {

constexpr const char* kSmall = "SmolLM2-135M-Instruct.Q4_1.gguf";
constexpr const char* kSmallF32 = "SmolLM2-135M-Instruct.F32.gguf";

// Past the border of the attention's first partition (512 tokens), and no multiple of a page.
constexpr int kPromptTokens = 531;

std::vector<int32_t> prompt_tokens(const std::string& model) {
  auto tokens = load_tokenizer(model)->tokenize(english(0, 4000), true, false);
  tokens.resize(kPromptTokens);
  return tokens;
}

std::unique_ptr<Model> load(const std::string& path, int num_threads, ExactMode exact) {
  GgmlModelOptions options;
  options.num_threads = num_threads;
  options.exact = exact;
  return load_ggml_model(path, options);
}

struct RestoreKernels {
  std::string name = kernels().name;
  ~RestoreKernels() { select_kernels(name); }
};

void check_all_ways(const std::string& path, ExactMode exact) {
  const auto prompt = prompt_tokens(path);
  auto one = load(path, 1, exact), two = load(path, 2, exact);
  ASSERT_TRUE(one->info().exact) << one->info().exact_reason;
  RestoreKernels restore;
  for (const auto format : {PageFormat::kF16, PageFormat::kF32, PageFormat::kQ8}) {
    SCOPED_TRACE(page_format_name(format));
    RunConfig base;
    base.kv.key_format = base.kv.value_format = format;
    const Generation want = generate(*two, prompt, base);
    ASSERT_EQ(want.error, "");
    ASSERT_EQ(want.tokens.size(), 16u);
    ASSERT_EQ(want.prompt_logprobs.size(), prompt.size() - 1);

    EXPECT_TRUE(generate(*one, prompt, base) == want) << "1 thread";
    for (int chunk : {7, 16}) {
      RunConfig c = base;
      c.prefill_chunk = chunk;
      EXPECT_TRUE(generate(*two, prompt, c) == want) << "chunks of " << chunk;
    }
    for (int page_size : {1, 64}) {
      RunConfig c = base;
      c.kv.page_size = page_size;
      EXPECT_TRUE(generate(*two, prompt, c) == want) << "pages of " << page_size;
    }
    RunConfig shuffled = base;
    shuffled.kv.shuffle_seed = 7;
    EXPECT_TRUE(generate(*two, prompt, shuffled) == want) << "shuffled pages";
    for (const auto& set : kernel_sets()) {
      if (!set.supported()) continue;
      select_kernels(set.name);
      EXPECT_TRUE(generate(*two, prompt, base) == want) << set.name;
      select_kernels(restore.name);
    }
    if (format == PageFormat::kF16) {
      RunConfig c = base;
      c.prefill_chunk = 1;
      EXPECT_TRUE(generate(*two, prompt, c) == want) << "chunks of 1";
    }
  }
}

TEST(OneArithmetic, SmolLM2Q4_1InAutoMode) { check_all_ways(model_file(kSmall), ExactMode::kAuto); }

TEST(OneArithmetic, SmolLM2Q4_K_MWithExactOn) {
  // Quantised anew from float32, since the model comes as Q4_1 only.
  const std::string path = model_file("SmolLM2-135M-Instruct.Q4_K_M.gguf");
  if (!std::filesystem::exists(path)) {
    auto params = llama_model_quantize_default_params();
    params.ftype = LLAMA_FTYPE_MOSTLY_Q4_K_M;
    params.nthread = 2;
    ASSERT_EQ(
        llama_model_quantize(model_file(kSmallF32).c_str(), (path + ".part").c_str(), &params), 0u);
    std::filesystem::rename(path + ".part", path);
  }
  check_all_ways(path, ExactMode::kOn);
}

}  // namespace
}  // namespace pagedkv::testing
