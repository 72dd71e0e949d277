// What another request computed serves a prompt, and no bit of the answer tells: warm is cold, on real models and small
// ones with random weights.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>

#include "acceptance/test_engine.h"
#include "acceptance/test_model.h"
#include "models/ggml/ggml_text.h"
#include "models/ggml/test_models.h"
#include "models/toy/toy_model.h"

namespace pagedkv::testing {
namespace {

constexpr const char* kSmall = "SmolLM2-135M-Instruct.Q4_1.gguf";
constexpr const char* kGemma = "gemma-3-270m.Q4_K_M.gguf";
constexpr PageFormat kFormats[] = {PageFormat::kF16, PageFormat::kF32, PageFormat::kBF16,
                                   PageFormat::kQ8,  PageFormat::kQ6,  PageFormat::kQ4};

// Greedy, beyond end-of-generation tokens; its text is not looked at. Where a number of pages is given, the pool has no more.
class Server {
 public:
  Server(Model& model, PageFormat format, std::optional<int32_t> num_pages = std::nullopt,
         int min_hit_tokens = 1)
      : engine_(model, *tokenizer_,
                {.key_format = format,
                 .value_format = format,
                 .num_pages = num_pages,
                 .dynamic = !num_pages},
                {.prefix = {.min_hit_tokens = min_hit_tokens}}) {}
  void submit(const std::vector<int32_t>& prompt, int64_t max_new_tokens, Answer& answer) {
    GenerationRequest request;
    request.prompt = prompt;
    request.max_new_tokens = max_new_tokens;
    request.ignore_end = true;
    request.logprobs = true;
    engine_.engine.submit(std::move(request), answer);
  }
  void run() { engine_.run(); }
  Answer ask(const std::vector<int32_t>& prompt, int64_t max_new_tokens) {
    Answer answer;
    submit(prompt, max_new_tokens, answer);
    run();
    return answer;
  }
  PrefixIndex& index() { return engine_.engine.prefix_index(); }

 private:
  std::unique_ptr<Tokenizer> tokenizer_ = make_toy_tokenizer();
  TestEngine engine_;
};

// FC-07 without its restart.
void check_three_times(const std::string& path, ExactMode exact) {
  const auto model = test::load(path, 2, exact);
  ASSERT_TRUE(model->info().exact) << model->info().exact_reason;
  const auto text = load_tokenizer(path)->tokenize(english(500, 1000), true, false);
  for (const PageFormat format : kFormats) {
    SCOPED_TRACE(page_format_name(format));
    Server server(*model, format);
    for (const int n : {64, 65, 79, 80}) {
      server.index().clear();
      const std::vector<int32_t> prompt(text.begin(), text.begin() + n);
      const int64_t answer = format == PageFormat::kF16 ? 32 : 6;
      const Answer cold = server.ask(prompt, answer);
      EXPECT_EQ(cold.num_cached, 0);
      EXPECT_EQ(cold.tokens.size(), static_cast<size_t>(answer));
      for (int again = 0; again < 2; ++again) {
        const Answer warm = server.ask(prompt, answer);
        EXPECT_EQ(warm.num_cached, n - 1);
        EXPECT_TRUE(warm == cold) << n << " tokens";
      }
    }
  }
}

TEST(Sharing, ThePromptSentThreeTimesGetsOneAnswerFromSmolLM2) {
  check_three_times(model_file(kSmall), ExactMode::kAuto);
}

TEST(Sharing, ThePromptSentThreeTimesGetsOneAnswerFromGemma3) {
  const auto model = test::load(model_file(kGemma), 2, ExactMode::kOn);
  const auto text = load_tokenizer(model_file(kGemma))->tokenize(english(0, 4000), true, false);
  const std::vector<int32_t> prompt(text.begin(), text.begin() + 700);  // beyond its window of 512
  Server server(*model, PageFormat::kQ8);
  const Answer cold = server.ask(prompt, 8), warm = server.ask(prompt, 8);
  EXPECT_EQ(warm.num_cached, 699);
  EXPECT_TRUE(warm == cold);
}

// Every beginning of 1 to 80 tokens, whatever follows it, in each page format.
TEST(Sharing, EveryBeginningServesWithItsBits) {
  for (const char* name : {"gqa3_dim64.gguf", "gemma3_pattern.gguf"}) {
    const auto model = test::load(test::model_path(std::string("model-variants/") + name));
    ASSERT_TRUE(model->info().exact) << model->info().exact_reason;
    const auto first = test::random_tokens(80, 1), other = test::random_tokens(9, 2);
    for (const PageFormat format : kFormats) {
      SCOPED_TRACE(std::string(name) + " " + std::string(page_format_name(format)));
      Server warm(*model, format);
      warm.ask(first, 1);
      for (int n = 1; n <= 80; ++n) {
        std::vector<int32_t> prompt(first.begin(), first.begin() + n);
        prompt.push_back((n < 80 ? first[static_cast<size_t>(n)] + 1 : 0) % 256);
        prompt.insert(prompt.end(), other.begin(), other.end());
        const Answer got = warm.ask(prompt, 3);
        EXPECT_GE(got.num_cached, n);
        EXPECT_TRUE(got == Server(*model, format).ask(prompt, 3)) << n;
      }
    }
  }
}

// FC-11
TEST(Sharing, UnderEvictionNobodySpeaksOfOthers) {
  const auto model = test::load(model_file(kSmall), 2);
  const auto tokenizer = load_tokenizer(model_file(kSmall));
  std::mt19937 random(11);
  const auto conversation = [&](int i) {
    const auto text = tokenizer->tokenize(english(static_cast<size_t>(977 * i), 400), true, false);
    return std::vector<int32_t>(text.begin(), text.begin() + 20 + static_cast<int>(random() % 20));
  };
  Server server(*model, PageFormat::kF16, 8, 16);
  for (int i = 0; i < 16; ++i) server.ask(conversation(i), 4);
  for (int round = 0; round < 20; ++round) {
    const auto one = conversation(100 + 2 * round), two = conversation(101 + 2 * round);
    Answer answers[2];
    server.submit(one, 4, answers[0]);
    server.submit(two, 4, answers[1]);
    server.run();
    EXPECT_TRUE(answers[0] == Server(*model, PageFormat::kF16, 8).ask(one, 4)) << round;
    EXPECT_TRUE(answers[1] == Server(*model, PageFormat::kF16, 8).ask(two, 4)) << round;
    EXPECT_EQ(answers[0].num_cached + answers[1].num_cached, 0);  // nothing of theirs was there
  }
  EXPECT_GT(server.index().stats().pages_evicted, 50);
}

}  // namespace
}  // namespace pagedkv::testing
