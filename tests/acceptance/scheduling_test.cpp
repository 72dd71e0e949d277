// What the scheduler does with a request leaves no trace in its answer: alone or among many, cold or warm, preempted or
// not, on real models.
#include <gtest/gtest.h>

#include <optional>

#include "acceptance/test_engine.h"
#include "acceptance/test_model.h"
#include "models/ggml/ggml_text.h"
#include "models/ggml/test_models.h"

namespace pagedkv::testing {
namespace {

constexpr const char* kSmall = "SmolLM2-135M-Instruct.Q4_1.gguf";

// A pool of num_pages pages and no more; 0: as many as it takes.
struct Fixture : TestEngine {
  Fixture(Model& model, const Tokenizer& tokenizer, int32_t num_pages, EngineOptions options = {},
          int page_size = 16)
      : TestEngine(model, tokenizer,
                   {.page_size = page_size,
                    .num_pages = num_pages > 0 ? std::optional(num_pages) : std::nullopt,
                    .dynamic = num_pages == 0},
                   std::move(options)) {}
};

GenerationRequest request_for(std::vector<int32_t> prompt, int64_t n, uint64_t seed) {
  GenerationRequest r;
  r.prompt = std::move(prompt);
  r.max_new_tokens = n;
  r.ignore_end = true;
  r.logprobs = true;
  r.sampler = {.temperature = seed % 2 ? 0.8f : 0.0f,
               .repetition_penalty = 1.1f,
               .presence_penalty = seed % 3 ? 0.0f : 0.2f,
               .seed = seed};
  return r;
}

// FC-12
TEST(Scheduling, PreemptionIsInvisibleOnSmolLM2) {
  const std::string path = model_file(kSmall);
  const auto model = test::load(path, 1, ExactMode::kAuto);
  ASSERT_TRUE(model->info().exact);
  const auto tokenizer = load_tokenizer(path);
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 4; ++i) {
    auto prompt = tokenizer->tokenize(english(300 * i, 400), true, false);
    prompt.resize(32);
    requests.push_back(request_for(std::move(prompt), 64, i));
  }
  Answer got[4], want[4];
  Fixture roomy(*model, *tokenizer, 0), tight(*model, *tokenizer, 12);
  for (size_t i = 0; i < 4; ++i) roomy.engine.submit(requests[i], want[i]);
  roomy.run();
  for (size_t i = 0; i < 4; ++i) tight.engine.submit(requests[i], got[i]);
  tight.run();
  EXPECT_EQ(roomy.engine.stats().preemptions, 0);
  EXPECT_GT(tight.engine.stats().preemptions, 0);
  EXPECT_EQ(tight.engine.stats().prompt_tokens, 4 * 32);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(got[i] == want[i]) << i;
    EXPECT_EQ(got[i].tokens.size(), 64u);
  }
}

// The same prompt alone, among 31 others, there again with its pages warm, and in a pool too small for all of them.
TEST(Scheduling, AnAnswerAmong31OthersIsWhatItIsAlone) {
  const std::string path = model_file(kSmall);
  const auto model = test::load(path, 1, ExactMode::kAuto);
  const auto tokenizer = load_tokenizer(path);
  std::vector<GenerationRequest> requests;
  for (uint64_t i = 0; i < 32; ++i) {
    auto prompt = tokenizer->tokenize(english(i % 4 * 700, 120 + 8 * i), true, false);
    if (i % 5 == 0) prompt.push_back(static_cast<int32_t>(100 + i));
    requests.push_back(request_for(std::move(prompt), 8, i));
  }
  std::vector<Answer> alone(32);
  for (size_t i = 0; i < 32; i += 5) {
    Fixture one(*model, *tokenizer, 0, {.prefix_cache = false});
    one.engine.submit(requests[i], alone[i]);
    one.run();
  }
  Fixture roomy(*model, *tokenizer, 0, {.prefill_chunk = 256}),
      tight(*model, *tokenizer, 96, {.prefill_chunk = 100}, 4);
  for (const bool warm : {false, true})
    for (Fixture* f : {&roomy, &tight}) {
      std::vector<Answer> got(32);
      for (size_t i = 0; i < 32; ++i) f->engine.submit(requests[i], got[i]);
      f->run();
      for (size_t i = 0; i < 32; i += 5)
        EXPECT_TRUE(got[i] == alone[i])
            << i << (warm ? " warm" : " cold") << (f == &tight ? ", small pool" : "");
    }
  EXPECT_GT(tight.engine.stats().preemptions, 0);
  EXPECT_GT(roomy.engine.stats().cached_tokens, 0);
}

}  // namespace
}  // namespace pagedkv::testing
