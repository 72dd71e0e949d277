// Greedy text equals llama.cpp's, built from the same sources, on float32 weights. Two implementations add in different
// orders, so a near tie may flip: tokens must be equal up to the first place where llama.cpp's two best log-probabilities are
// less than 0.05 apart, and log-probabilities up to there within 0.02. A comparison must cover 8 tokens to count.
#include <gtest/gtest.h>

#include <llama.h>
#include <cstdlib>

#include <algorithm>
#include <cmath>
#include <ostream>

#include "acceptance/test_model.h"
#include "models/ggml/ggml_text.h"

namespace pagedkv::testing {
namespace {

constexpr int kNewTokens = 24;

struct Peer {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs, gaps;  // of the best token; to the second best
};

class LlamaCpp {
 public:
  explicit LlamaCpp(const std::string& path) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    model_ = llama_model_load_from_file(path.c_str(), llama_model_default_params());
    if (!model_) throw std::runtime_error(path + ": llama.cpp cannot load it");
  }
  ~LlamaCpp() { llama_model_free(model_); }

  Peer greedy(const std::vector<int32_t>& prompt, ggml_type kv_type) {
    auto params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(prompt.size()) + kNewTokens;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = 2;
    params.type_k = params.type_v = kv_type;
    llama_context* context = llama_init_from_model(model_, params);
    if (!context) throw std::runtime_error("llama.cpp: no context");
    Peer out;
    auto tokens = prompt;
    size_t done = 0;
    while (out.tokens.size() < kNewTokens) {
      while (done < tokens.size()) {
        const auto n = static_cast<int32_t>(std::min<size_t>(512, tokens.size() - done));
        if (llama_decode(context, llama_batch_get_one(tokens.data() + done, n)) != 0)
          throw std::runtime_error("llama.cpp: decode failed");
        done += n;
      }
      const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model_));
      const float* logits = llama_get_logits_ith(context, -1);
      const int best = static_cast<int>(std::max_element(logits, logits + vocab) - logits);
      float second = -INFINITY;
      for (int i = 0; i < vocab; ++i)
        if (i != best) second = std::max(second, logits[i]);
      out.tokens.push_back(best);
      out.logprobs.push_back(log_probability({logits, static_cast<size_t>(vocab)}, best));
      out.gaps.push_back(static_cast<double>(logits[best]) - second);
      tokens.push_back(best);
    }
    llama_free(context);
    return out;
  }

 private:
  llama_model* model_;
};

// Tokens compared before a near tie; fails the test where one differs.
int covered(const Peer& peer, const Generation& ours) {
  for (int i = 0; i < kNewTokens; ++i) {
    if (peer.gaps[i] < 0.05) return i;
    EXPECT_EQ(ours.tokens[i], peer.tokens[i]) << "token " << i << ", gap " << peer.gaps[i];
    if (ours.tokens[i] != peer.tokens[i]) return kNewTokens;
    EXPECT_NEAR(ours.logprobs[i], peer.logprobs[i], 0.02) << "token " << i;
  }
  return kNewTokens;
}

struct Prompt {
  const char* model;
  int tokens;
};
void PrintTo(const Prompt& prompt, std::ostream* out) {  // the name of the test, for ctest
  *out << prompt.model << ", " << prompt.tokens << " tokens";
}

class SameAsLlamaCpp : public ::testing::TestWithParam<Prompt> {};

TEST_P(SameAsLlamaCpp, GreedyText) {
  const std::string path = model_file(std::string(GetParam().model) + ".F32.gguf");
  const auto count = static_cast<size_t>(GetParam().tokens);
  LlamaCpp peer(path);
  GgmlModelOptions options;
  options.num_threads = 2;
  const auto model = load_ggml_model(path, options);
  const auto tokenizer = load_tokenizer(path);
  // Long prompts take a minute a format: with PAGEDKV_TEST_SCALE of 10 or more both.
  const char* scale = std::getenv("PAGEDKV_TEST_SCALE");
  const bool both = count <= 1000 || (scale && std::atoi(scale) >= 10);
  for (const auto& [format, type] :
       {std::pair{PageFormat::kF16, GGML_TYPE_F16}, {PageFormat::kF32, GGML_TYPE_F32}}) {
    if (format != PageFormat::kF16 && !both) continue;
    int most = 0;
    for (size_t offset = 0; most < 8 && offset < 5;
         ++offset) {  // another prompt where a near tie comes too soon
      auto prompt = tokenizer->tokenize(english(offset * 977, count * 6 + 100), true, false);
      ASSERT_GE(prompt.size(), count);
      prompt.resize(count);
      RunConfig config;
      config.kv.key_format = config.kv.value_format = format;
      config.max_new_tokens = kNewTokens;
      config.prompt_logprobs = false;
      const Generation ours = generate(*model, prompt, config);
      ASSERT_EQ(ours.error, "");
      most = std::max(most, covered(peer.greedy(prompt, type), ours));
    }
    EXPECT_GE(most, 8) << "no prompt gave 8 tokens without a near tie, "
                       << page_format_name(format);
  }
}

constexpr const char* kSmall = "SmolLM2-135M-Instruct";
constexpr const char* kGemma = "gemma-3-270m";
INSTANTIATE_TEST_SUITE_P(SmolLM2, SameAsLlamaCpp,
                         ::testing::Values(Prompt{kSmall, 20}, Prompt{kSmall, 700},
                                           Prompt{kSmall, 4000}),
                         [](const auto& info) { return std::to_string(info.param.tokens); });
INSTANTIATE_TEST_SUITE_P(Gemma3, SameAsLlamaCpp,
                         ::testing::Values(Prompt{kGemma, 20}, Prompt{kGemma, 700},
                                           Prompt{kGemma, 3000}),
                         [](const auto& info) { return std::to_string(info.param.tokens); });

}  // namespace
}  // namespace pagedkv::testing
