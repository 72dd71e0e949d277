// The same bits whichever way they are reached: prompt and generated log-probabilities compare with ==.
#include <gtest/gtest.h>
#include <llama.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "acceptance/test_model.h"
#include "models/ggml/ggml_text.h"
#include "models/ggml/test_models.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::testing {
namespace {

constexpr const char* kSmall = "SmolLM2-135M-Instruct.Q4_1.gguf";
constexpr const char* kGemma = "gemma-3-270m.Q4_K_M.gguf";

// Past the border of the attention's first partition and of gemma3's window (512 tokens both), and no multiple of a page.
constexpr int kPromptTokens = 531;

std::vector<int32_t> prompt_tokens(const std::string& model) {
  auto tokens = load_tokenizer(model)->tokenize(english(0, 4000), true, false);
  tokens.resize(kPromptTokens);
  return tokens;
}

// With PAGEDKV_TEST_SCALE of 10 or more each way is taken with each format; else the formats share them out.
bool every_way() {
  const char* scale = std::getenv("PAGEDKV_TEST_SCALE");
  return scale && std::atof(scale) >= 10;
}

class Ways {
 public:
  // Without prompt_logprobs (the logits of 531 tokens in a large vocabulary take long) only those of generated tokens
  // are compared, which depend on all keys and values.
  Ways(const std::string& path, ExactMode exact, bool prompt_logprobs)
      : prompt_logprobs_(prompt_logprobs),
        prompt_(prompt_tokens(path)),
        one_(test::load(path, 1, exact)),
        two_(test::load(path, 2, exact)) {}

  const ModelInfo& info() const { return two_->info(); }

  void start(PageFormat format) {
    base_ = RunConfig{};
    base_.prompt_logprobs = prompt_logprobs_;
    base_.kv.key_format = base_.kv.value_format = format;
    want_ = generate(*two_, prompt_, base_);
    ASSERT_EQ(want_.error, "");
    ASSERT_EQ(want_.tokens.size(), 16u);
    ASSERT_EQ(want_.prompt_logprobs.size(), prompt_logprobs_ ? prompt_.size() - 1 : 0);
  }
  void chunks_of(int tokens) {
    RunConfig c = base_;
    c.prefill_chunk = tokens;
    EXPECT_TRUE(generate(*two_, prompt_, c) == want_) << "chunks of " << tokens;
  }
  void pages_of(int tokens) {
    RunConfig c = base_;
    c.kv.page_size = tokens;
    EXPECT_TRUE(generate(*two_, prompt_, c) == want_) << "pages of " << tokens;
  }
  void shuffled_pages() {
    RunConfig c = base_;
    c.kv.shuffle_seed = 7;
    EXPECT_TRUE(generate(*two_, prompt_, c) == want_) << "shuffled pages";
  }
  void one_thread() { EXPECT_TRUE(generate(*one_, prompt_, base_) == want_) << "1 thread"; }
  void kernel_set(const char* name) {
    const std::string before = kernels().name;
    select_kernels(name);
    EXPECT_TRUE(generate(*two_, prompt_, base_) == want_) << name;
    select_kernels(before);
  }

 private:
  const bool prompt_logprobs_;
  std::vector<int32_t> prompt_;
  std::unique_ptr<Model> one_, two_;
  RunConfig base_;
  Generation want_;
};

void check_all_ways(const std::string& path, ExactMode exact, bool reference) {
  Ways ways(path, exact, /*prompt_logprobs=*/true);
  ASSERT_TRUE(ways.info().exact) << ways.info().exact_reason;
  for (const auto format : {PageFormat::kF16, PageFormat::kF32, PageFormat::kQ8}) {
    SCOPED_TRACE(page_format_name(format));
    const bool f16 = format == PageFormat::kF16, f32 = format == PageFormat::kF32,
               all = every_way();
    ASSERT_NO_FATAL_FAILURE(ways.start(format));
    ways.chunks_of(7);
    if (all || f16) ways.chunks_of(1);
    if (all || f32) ways.chunks_of(16);
    if (all || f32) ways.pages_of(1);
    if (all || !f32) ways.pages_of(64);
    if (all || !f16) ways.shuffled_pages();
    if (all || !f32) ways.one_thread();
    for (const auto& set : kernel_sets()) {
      const bool slow = std::string_view(set.name) == "reference";
      if (set.supported() && (!slow || all || (reference && !f32))) ways.kernel_set(set.name);
    }
  }
}

// A few ways with two formats; all where every_way().
void check_some_ways(const std::string& path, ExactMode exact) {
  if (every_way()) return check_all_ways(path, exact, false);
  Ways ways(path, exact, /*prompt_logprobs=*/false);
  ASSERT_TRUE(ways.info().exact) << ways.info().exact_reason;
  ASSERT_NO_FATAL_FAILURE(ways.start(PageFormat::kF16));
  ways.chunks_of(7);
  ways.one_thread();
  ASSERT_NO_FATAL_FAILURE(ways.start(PageFormat::kQ8));
  ways.pages_of(64);
  ways.shuffled_pages();
}

TEST(OneArithmetic, SmolLM2Q4_1InAutoMode) {
  check_all_ways(model_file(kSmall), ExactMode::kAuto, true);
}

TEST(OneArithmetic, Gemma3Q4_K_MWithExactOn) {
  check_some_ways(model_file(kGemma), ExactMode::kOn);
}

// SmolLM2 in other weight types, made from float32, since the model comes as Q4_1 only.
std::string small_as(llama_ftype type, const std::string& name) {
  const std::string path = model_file("SmolLM2-135M-Instruct." + name + ".gguf");
  if (std::filesystem::exists(path)) return path;
  const std::string source = model_file("SmolLM2-135M-Instruct.F32.gguf");
  const std::string part = path + "." + std::to_string(getpid()) + ".part";
  auto params = llama_model_quantize_default_params();
  params.ftype = type;
  params.nthread = 2;
  if (llama_model_quantize(source.c_str(), part.c_str(), &params) != 0)
    throw std::runtime_error(source + ": cannot be quantised to " + name);
  std::filesystem::rename(part, path);
  return path;
}

TEST(OneArithmetic, SmolLM2Q4_K_MWithExactOn) {
  check_some_ways(small_as(LLAMA_FTYPE_MOSTLY_Q4_K_M, "Q4_K_M"), ExactMode::kOn);
}
TEST(OneArithmetic, SmolLM2Q8_0InAutoMode) {
  check_some_ways(small_as(LLAMA_FTYPE_MOSTLY_Q8_0, "Q8_0"), ExactMode::kAuto);
}
TEST(OneArithmetic, SmolLM2F16InAutoMode) {
  check_some_ways(small_as(LLAMA_FTYPE_MOSTLY_F16, "F16"), ExactMode::kAuto);
}
TEST(OneArithmetic, SmolLM2BF16InAutoMode) {
  check_some_ways(small_as(LLAMA_FTYPE_MOSTLY_BF16, "BF16"), ExactMode::kAuto);
}

}  // namespace
}  // namespace pagedkv::testing
