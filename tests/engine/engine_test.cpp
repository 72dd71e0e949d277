#include "engine/engine.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <stdexcept>

#include "engine/kv_settings.h"
#include "models/toy/toy_model.h"

namespace pagedkv {
namespace {

struct Recorder final : RequestSink {
  void on_start(int64_t n) override { num_cached = n; }
  void on_prompt(int64_t done, int64_t) override { chunks.push_back(done); }
  void on_prompt_logprob(int64_t index, double logprob) override {
    EXPECT_EQ(index, static_cast<int64_t>(prompt_logprobs.size()) + 1);
    prompt_logprobs.push_back(logprob);
  }
  void on_token(const TokenEvent& e) override {
    EXPECT_FALSE(finished);
    tokens.push_back(e.id);
    text += e.text;
    if (e.logprob) logprobs.push_back(*e.logprob);
  }
  void on_finish(FinishReason r, std::string_view rest, std::exception_ptr e) override {
    EXPECT_FALSE(finished) << "heard of the end twice";
    finished = true;
    reason = r;
    text += rest;
    error = e;
  }
  bool operator==(const Recorder& o) const {
    return tokens == o.tokens && text == o.text && logprobs == o.logprobs &&
           prompt_logprobs == o.prompt_logprobs && reason == o.reason;
  }
  int64_t num_cached = -1;
  std::vector<int64_t> chunks;
  std::vector<int32_t> tokens;
  std::vector<double> logprobs, prompt_logprobs;
  std::string text;
  bool finished = false;
  FinishReason reason = FinishReason::kError;
  std::exception_ptr error;
};

struct Fixture {
  explicit Fixture(KvSettings kv = {}, EngineOptions options = {}, ToyOptions toy = {})
      : model(make_toy_model(toy)),
        pool(pool_options(model->info(), kv)),
        engine(*model, *tokenizer, pool, make_toy_sampler, options) {}
  GenerationRequest request(const std::string& prompt, int64_t max_new_tokens) const {
    GenerationRequest r;
    r.prompt = tokenizer->tokenize(prompt, true, true);
    r.max_new_tokens = max_new_tokens;
    r.logprobs = r.prompt_logprobs = true;
    return r;
  }
  void run_all() {
    while (engine.step()) pool.verify();
  }
  std::unique_ptr<Tokenizer> tokenizer = make_toy_tokenizer();
  std::unique_ptr<Model> model;
  PagePool pool;
  Engine engine;
};

Recorder alone(const std::string& prompt, int64_t n, KvSettings kv = {},
               EngineOptions options = {}) {
  Fixture f(kv, options);
  Recorder r;
  f.engine.submit(f.request(prompt, n), r);
  f.run_all();
  return r;
}

TEST(Engine, TextDoesNotDependOnChunkingPagesOrFormat) {
  const std::string prompt(300, 'x');
  const Recorder want = alone(prompt, 50);
  EXPECT_EQ(want.tokens.size(), 50u);
  EXPECT_EQ(want.prompt_logprobs.size(), 299u);
  for (int chunk : {1, 7, 16, 511})
    for (int page_size : {1, 16, 64})
      for (auto format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kQ8})
        for (uint64_t shuffle : {0, 5}) {
          KvSettings kv;
          kv.page_size = page_size;
          kv.key_format = kv.value_format = format;
          kv.shuffle_seed = shuffle;
          EXPECT_TRUE(alone(prompt, 50, kv, {.prefill_chunk = chunk}) == want)
              << chunk << ' ' << page_size << ' ' << shuffle;
        }
}

TEST(Engine, BatchedRequestsGiveWhatTheyGiveAlone) {
  std::mt19937 random(3);
  std::vector<std::string> prompts;
  for (int i = 0; i < 20; ++i)
    prompts.push_back(std::string(1 + random() % 200, static_cast<char>('a' + i)));
  Fixture f({}, {.prefill_chunk = 64, .max_seqs = 8}, {.max_step_tokens = 100});
  std::vector<Recorder> got(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    f.engine.submit(f.request(prompts[i], 5 + static_cast<int64_t>(i)), got[i]);
    f.engine.step();
  }
  f.run_all();
  for (size_t i = 0; i < prompts.size(); ++i)
    EXPECT_TRUE(got[i] == alone(prompts[i], 5 + static_cast<int64_t>(i))) << i;
  EXPECT_EQ(f.pool.stats().pages_held, 0);
}

TEST(Engine, PromptChunksKeepToTheirLimit) {
  const Recorder r = alone(std::string(20, 'a'), 1, {}, {.prefill_chunk = 8});
  EXPECT_EQ(r.chunks, (std::vector<int64_t>{8, 16, 20}));
}

TEST(Engine, EndsAtTheModelsEndAtAStopTextAndAtTheContext) {
  Fixture ends({}, {}, {.end_after = 30});
  Recorder r;
  ends.engine.submit(ends.request("abc", -1), r);
  ends.run_all();
  EXPECT_EQ(r.reason, FinishReason::kStop);
  EXPECT_EQ(r.tokens.back(), kToyEnd);
  EXPECT_EQ(r.tokens.size(), 28u);  // 3 + 27 letters, then the end

  const std::string text = alone("abc", 40).text;
  Fixture stops;
  Recorder s;
  auto request = stops.request("abc", 40);
  request.stop = {text.substr(10, 4)};
  stops.engine.submit(std::move(request), s);
  stops.run_all();
  EXPECT_EQ(s.reason, FinishReason::kStop);
  EXPECT_EQ(s.text, text.substr(0, text.find(text.substr(10, 4))));

  const Recorder full = alone(std::string(500, 'a'), 100, {.context = 512}, {.context = 512});
  EXPECT_EQ(full.reason, FinishReason::kLength);
  EXPECT_EQ(full.tokens.size(), 12u);
}

TEST(Engine, RefusesAtOnceWhatCanNeverRun) {
  Fixture f({.context = 512}, {.context = 512});
  Recorder r;
  EXPECT_THROW(f.engine.submit(f.request("", 1), r), std::invalid_argument);
  auto foreign = f.request("a", 1);
  foreign.prompt[0] = kToyVocabSize;
  EXPECT_THROW(f.engine.submit(foreign, r), std::invalid_argument);
  auto stop = f.request("a", 1);
  stop.stop = {""};
  EXPECT_THROW(f.engine.submit(stop, r), std::invalid_argument);
  auto kept = f.request("a", 1);
  kept.retention.priority = 101;
  EXPECT_THROW(f.engine.submit(kept, r), std::invalid_argument);
  kept.retention = {.ttl_ns = -1};
  EXPECT_THROW(f.engine.submit(kept, r), std::invalid_argument);
  try {
    f.engine.submit(f.request(std::string(600, 'a'), 1), r);
    FAIL() << "600 tokens were taken";
  } catch (const CapacityError& e) {
    EXPECT_NE(std::string(e.what()).find("600"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("512"), std::string::npos) << e.what();
  }
  EXPECT_EQ(f.engine.num_requests(), 0u);
}

TEST(Engine, FailsARequestThatOutgrowsAFixedPoolAndServesTheNext) {
  KvSettings kv;
  kv.num_pages = 4;  // 64 tokens
  kv.dynamic = false;
  Fixture f(kv);
  Recorder big, small;
  f.engine.submit(f.request(std::string(60, 'a'), 100), big);
  f.run_all();
  EXPECT_EQ(big.reason, FinishReason::kError);
  EXPECT_EQ(big.tokens.size(), 5u);  // 64 stored tokens foretell one more
  EXPECT_THROW(std::rethrow_exception(big.error), CapacityError);
  EXPECT_EQ(f.pool.stats().pages_held, 0);
  f.engine.submit(f.request("abc", 10), small);
  f.run_all();
  EXPECT_TRUE(small == alone("abc", 10));
}

TEST(Engine, ARowThatIsNotFiniteFailsItsRequestAlone) {
  Fixture f({}, {}, {.poison_token = '!'});
  Recorder bad, good;
  auto request = f.request("abc!", 10);
  request.prompt_logprobs = false;
  f.engine.submit(std::move(request), bad);
  f.engine.submit(f.request("abc", 10), good);
  f.run_all();
  EXPECT_EQ(bad.reason, FinishReason::kError);
  EXPECT_THROW(std::rethrow_exception(bad.error), std::runtime_error);
  EXPECT_TRUE(good == alone("abc", 10));
}

TEST(Engine, WhatAFailedRequestComputedServesNobody) {
  Fixture f({}, {.prefill_chunk = 20}, {.poison_token = '!'});
  Recorder bad, good;
  auto request = f.request(std::string(100, 'a') + "!", 10);
  request.prompt_logprobs = false;
  f.engine.submit(request, bad);
  f.engine.step();
  f.engine.step();
  EXPECT_EQ(f.engine.prefix_index().stats().pages, 2);  // of 40 tokens
  f.run_all();
  EXPECT_EQ(bad.reason, FinishReason::kError);
  EXPECT_EQ(f.engine.prefix_index().stats().pages, 0);
  request.prompt.back() = 'b';
  f.engine.submit(std::move(request), good);
  f.run_all();
  EXPECT_EQ(good.num_cached, 0);
  EXPECT_EQ(good.text, alone(std::string(100, 'a') + "b", 10).text);
}

TEST(Engine, CancelFreesThePagesAtOnce) {
  Fixture f;
  Recorder a, b;
  const RequestId id = f.engine.submit(f.request(std::string(100, 'a'), -1), a);
  f.engine.submit(f.request("abc", 10), b);
  f.engine.step();
  EXPECT_GE(f.pool.stats().pages_held, 7);
  f.engine.cancel(id);
  EXPECT_LE(f.pool.stats().pages_held, 1);
  EXPECT_EQ(a.reason, FinishReason::kCancelled);
  f.engine.cancel(id);
  f.run_all();
  EXPECT_TRUE(b == alone("abc", 10));
}

TEST(Engine, SampledTextIsRepeatableBySeed) {
  const auto sampled = [](uint64_t seed) {
    Fixture f;
    Recorder r;
    auto request = f.request("abc", 60);
    request.sampler.temperature = 2;
    request.sampler.seed = seed;
    f.engine.submit(std::move(request), r);
    f.run_all();
    return r.text;
  };
  EXPECT_EQ(sampled(1), sampled(1));
  EXPECT_NE(sampled(1), sampled(2));
}

// What a model with a window says is what one step over prompt and answer says, before which nothing was given back.
TEST(Engine, AWindowGivesItsPagesBackAndTheTextStays) {
  const std::string prompt(300, 'x');
  for (const int page_size : {3, 16})
    for (const int chunk : {7, 16, 50, 0}) {
      KvSettings kv;
      kv.page_size = page_size;
      kv.shuffle_seed = 3;
      const ToyOptions toy{.max_step_tokens = 600, .sliding_window = 32};
      Fixture f(kv, {.prefill_chunk = chunk}, toy), whole({}, {}, toy);
      ASSERT_EQ(f.pool.num_groups(), 2);
      Recorder got, want;
      GenerationRequest request = f.request(prompt, 200);
      request.prompt_logprobs = false;
      f.engine.submit(std::move(request), got);
      f.run_all();
      ASSERT_EQ(got.tokens.size(), 200u);
      whole.engine.submit(whole.request(prompt + got.text, 1), want);
      whole.run_all();
      EXPECT_EQ(got.logprobs,
                std::vector<double>(want.prompt_logprobs.end() - 200, want.prompt_logprobs.end()))
          << page_size << ' ' << chunk;
      const int64_t all = (499 + page_size - 1) / page_size, step = chunk == 0 ? 300 : chunk;
      EXPECT_LE(f.pool.stats().pages_peak, all + most_pages_held(499, step, page_size, 32));
      EXPECT_EQ(f.pool.stats().pages_held, 0);
    }
}

TEST(Engine, ASequenceMayOutgrowAFixedPoolOfWindows) {
  KvSettings kv;
  kv.sliding_window = 32;
  kv.num_pages = 8;  // 128 tokens
  kv.dynamic = false;
  Fixture f(kv, {.prefill_chunk = 64});
  Recorder r;
  f.engine.submit(f.request(std::string(300, 'a'), 500), r);
  f.run_all();
  EXPECT_EQ(r.reason, FinishReason::kLength);
  EXPECT_EQ(r.tokens.size(), 500u);
  EXPECT_LE(f.pool.stats().pages_peak, most_pages_held(800, 64, 16, 32));

  Fixture long_steps(kv, {.prefill_chunk = 128});
  try {
    long_steps.engine.submit(f.request(std::string(300, 'a'), 1), r);
    FAIL() << "a step of 128 tokens was taken";
  } catch (const CapacityError& e) {
    EXPECT_STREQ(
        e.what(),
        "the prompt has 300 tokens, of which a window of 32 and steps of 128 need 11 pages "
        "at once; the pool can hold 8");
  }
}

// Fails, once everything is stored, whenever several sequences share a step.
class FailsTogether final : public Model {
 public:
  explicit FailsTogether(std::unique_ptr<Model> model) : model_(std::move(model)) {}
  const ModelInfo& info() const noexcept override { return model_->info(); }
  int max_step_tokens() const noexcept override { return model_->max_step_tokens(); }
  std::span<const float> step(const StepBatch& batch, PagePool& pool) override {
    const auto logits = model_->step(batch, pool);
    if (batch.sequences.size() > 1) throw std::runtime_error("together");
    return logits;
  }

 private:
  std::unique_ptr<Model> model_;
};

TEST(Engine, AStepThatFailsIsUndoneWithItsWindowStillThere) {
  const auto texts = [](std::unique_ptr<Model> model) {
    const auto tokenizer = make_toy_tokenizer();
    PagePool pool(pool_options(model->info(), {}));
    Engine engine(*model, *tokenizer, pool, make_toy_sampler, {.prefill_chunk = 20});
    Recorder answers[2];
    for (const char c : {'a', 'b'}) {
      GenerationRequest r;
      r.prompt = tokenizer->tokenize(std::string(90, c), true, true);
      r.max_new_tokens = 60;
      engine.submit(std::move(r), answers[c - 'a']);
    }
    while (engine.step()) pool.verify();
    EXPECT_EQ(answers[0].reason, FinishReason::kLength);
    EXPECT_EQ(answers[1].reason, FinishReason::kLength);
    return answers[0].text + ' ' + answers[1].text;
  };
  const ToyOptions toy{.sliding_window = 16};
  EXPECT_EQ(texts(std::make_unique<FailsTogether>(make_toy_model(toy))),
            texts(make_toy_model(toy)));
}

// A conversation: what each turn says is what a fresh request with the same prompt says.
struct Conversation {
  // Returns how many prompt tokens were computed.
  int64_t turn(const std::string& prompt, int64_t n, KvSettings kv = {}) {
    GenerationRequest request = f.request(prompt, n);
    request.prompt_logprobs = false;
    Recorder got, want = alone(prompt, n, kv);
    const int64_t before = f.engine.stats().prompt_tokens;
    f.engine.submit(std::move(request), got);
    f.run_all();
    EXPECT_EQ(got.text, want.text);
    EXPECT_EQ(got.logprobs, want.logprobs);
    said = prompt + got.text;
    const int64_t computed = f.engine.stats().prompt_tokens - before;
    EXPECT_EQ(got.num_cached, static_cast<int64_t>(prompt.size()) - computed);
    f.engine.prefix_index().verify();
    return computed;
  }
  Fixture f;
  std::string said;
};

EngineOptions every_hit() {
  EngineOptions o;
  o.prefix.min_hit_tokens = 1;
  return o;
}

TEST(Engine, WhatWasSaidIsNotComputedAgain) {
  Conversation c{Fixture({}, every_hit()), {}};
  EXPECT_EQ(c.turn("a first question?", 10), 17);
  const std::string second = c.said + " And then?";
  EXPECT_EQ(c.turn(second, 10), 11);  // the newest token is never stored
  EXPECT_EQ(c.turn(second, 10), 1);   // the last token of a prompt is computed, for its logits
  EXPECT_EQ(c.turn("a first quest", 5), 1);
  EXPECT_EQ(c.turn("a first quiz", 5), 2);
  EXPECT_EQ(c.turn("other", 5), 5);
  c.f.engine.prefix_index().clear();
  EXPECT_EQ(c.f.pool.stats().pages_cached, 0);
  EXPECT_EQ(c.turn("other", 5), 5);
}

TEST(Engine, WhatAWindowHasPassedServesAnEarlierPlace) {
  KvSettings kv;
  kv.sliding_window = 32;
  Conversation c{Fixture(kv), {}};
  const std::string prompt(100, 'a');
  EXPECT_EQ(c.turn(prompt, 50, kv), 100);
  EXPECT_EQ(c.turn(c.said + "!", 10, kv), 2);
  EXPECT_EQ(c.turn(prompt, 10, kv), 1);
  c.f.engine.prefix_index().evict(0, 1000);
  EXPECT_EQ(c.turn(prompt, 10, kv), 100);
}

TEST(Engine, WhatACancelledRequestHadComputedServes) {
  Conversation c;
  const std::string prompt(100, 'x');
  GenerationRequest request = c.f.request(prompt, 50);
  request.prompt_logprobs = false;
  Recorder r;
  const RequestId id = c.f.engine.submit(std::move(request), r);
  c.f.engine.step();
  c.f.engine.step();
  c.f.engine.cancel(id);
  EXPECT_EQ(r.tokens.size(), 2u);
  EXPECT_EQ(c.turn(prompt + r.text + "y", 5), 2);
}

// FC-07 on the toy model, whose text depends on every stored token.
TEST(Engine, WarmIsWhatColdIs) {
  for (const int page_size : {1, 3, 16, 64})
    for (const bool window : {false, true}) {
      KvSettings kv;
      kv.page_size = page_size;
      const ToyOptions toy{.sliding_window = window ? 20 : 0};
      for (int n = 1; n <= 80; ++n) {
        std::string prompt;
        for (int i = 0; i < n; ++i) prompt += static_cast<char>('a' + (i * i + n) % 26);
        Fixture f(kv, every_hit(), toy);
        Recorder first;
        for (int round = 0; round < 3; ++round) {
          Recorder r;
          auto request = f.request(prompt, 32);
          request.prompt_logprobs = false;
          f.engine.submit(std::move(request), r);
          f.run_all();
          EXPECT_EQ(r.num_cached, round == 0 ? 0 : n - 1) << page_size << ' ' << n;
          if (round == 0) first = r;
          EXPECT_TRUE(r == first) << page_size << ' ' << n;
        }
      }
    }
}

// FC-09, FC-31: the parts of the engine.
TEST(Engine, SaltsKeepTenantsApart) {
  Fixture f;
  std::vector<int64_t> cached;
  for (const char* salt : {"A", "A", "B", "", "A"}) {
    auto request = f.request(std::string(320, 'p'), 4);
    request.prompt_logprobs = false;
    request.cache_salt = salt;
    request.zero_freed_pages = true;
    Recorder r;
    f.engine.submit(std::move(request), r);
    f.run_all();
    cached.push_back(r.num_cached);
  }
  EXPECT_EQ(cached, (std::vector<int64_t>{0, 319, 0, 0, 319}));
  auto request = f.request(std::string(320, 'p'), 4);
  request.prompt_logprobs = request.cache_prompt = false;
  Recorder r;
  f.engine.submit(std::move(request), r);
  f.run_all();
  EXPECT_EQ(r.num_cached, 0);
}

TEST(Engine, APromptThatSeveralShareIsComputedOnce) {
  Fixture f({}, {.prefill_chunk = 64, .max_seqs = 64}, {.max_step_tokens = 200});
  const std::string shared(350, 's');
  std::vector<Recorder> got(64);
  for (size_t i = 0; i < got.size(); ++i) {
    auto request =
        f.request(shared + std::string(40, static_cast<char>('a' + i % 26)) + std::to_string(i), 8);
    request.prompt_logprobs = false;
    f.engine.submit(std::move(request), got[i]);
  }
  f.run_all();
  for (size_t i = 0; i < got.size(); ++i) {
    const Recorder want =
        alone(shared + std::string(40, static_cast<char>('a' + i % 26)) + std::to_string(i), 8);
    EXPECT_EQ(got[i].text, want.text) << i;
    EXPECT_GE(got[i].num_cached, i == 0 ? 0 : 336) << i;
  }
  EXPECT_LE(f.pool.stats().pages_peak, 21 + 64 * 5);
}

// FC-11
TEST(Engine, ConcurrentRequestsUnderEvictionSayWhatTheySayAlone) {
  KvSettings kv;
  kv.num_pages = 40;
  kv.dynamic = false;
  Fixture f(kv);
  const auto prompt = [](int i) {
    return "conversation " + std::to_string(i) + " marker" +
           std::string(1, static_cast<char>('A' + i % 26)) +
           std::string(static_cast<size_t>(60 + 7 * i % 90), static_cast<char>('a' + i % 20));
  };
  const auto submit = [&](int i, Recorder& r) {
    auto request = f.request(prompt(i), 20);
    request.prompt_logprobs = false;
    f.engine.submit(std::move(request), r);
  };
  for (int i = 0; i < 16; ++i) {
    Recorder r;
    submit(i, r);
    f.run_all();
  }
  for (int round = 0; round < 20; ++round) {
    Recorder both[2];
    for (int i = 0; i < 2; ++i) submit(100 + 2 * round + i, both[i]);
    f.run_all();
    for (int i = 0; i < 2; ++i) {
      const Recorder want = alone(prompt(100 + 2 * round + i), 20, kv);
      EXPECT_EQ(both[i].text, want.text);
      EXPECT_LE(both[i].num_cached, 16);  // "conversation 1.."
    }
    f.engine.prefix_index().verify();
  }
  EXPECT_GT(f.engine.prefix_index().stats().pages_evicted, 0);
}

TEST(Engine, AnswersToOnePromptShareItsPagesAndAreWhatTheyAreAlone) {
  const std::string prompt(330, 'x');
  const auto request = [&](const Fixture& f) {
    GenerationRequest r = f.request(prompt, 40);
    r.sampler.temperature = 1.5f;
    r.sampler.seed = 7;
    return r;
  };
  for (const int chunk : {0, 50}) {
    EngineOptions options;
    options.prefill_chunk = chunk;
    Fixture f({}, options);
    Recorder answers[4];
    RequestSink* sinks[] = {&answers[0], &answers[1], &answers[2], &answers[3]};
    const auto ids = f.engine.submit(request(f), sinks);
    EXPECT_EQ(ids.size(), 4u);
    f.run_all();
    const auto num_prompt = static_cast<int64_t>(f.request(prompt, 1).prompt.size());
    EXPECT_EQ(f.engine.stats().prompt_tokens, num_prompt + 3);
    const int64_t shared = (num_prompt - 1) / f.pool.page_size();
    EXPECT_LE(f.pool.stats().pages_peak, f.pool.num_groups() * (shared + 4 * 5));
    EXPECT_EQ(f.pool.stats().pages_held, 0);
    for (int i = 0; i < 4; ++i) {
      Fixture other;
      GenerationRequest r = request(other);
      r.sampler.seed += static_cast<uint64_t>(i);
      r.prompt_logprobs = i == 0;
      Recorder want;
      other.engine.submit(r, want);
      other.run_all();
      EXPECT_TRUE(answers[i] == want) << i;
      EXPECT_EQ(want.tokens.size(), 40u);
    }
    EXPECT_NE(answers[0].tokens, answers[1].tokens);
  }
}

TEST(Engine, AnswersShareWhatAWindowLeaves) {
  const ToyOptions toy{.sliding_window = 32};
  Fixture f({}, {.prefill_chunk = 50}, toy);
  const auto request = [](const Fixture& from) {
    GenerationRequest r = from.request(std::string(200, 'x'), 60);
    r.sampler.temperature = 1.5f;
    r.prompt_logprobs = false;
    return r;
  };
  Recorder answers[3];
  RequestSink* sinks[] = {&answers[0], &answers[1], &answers[2]};
  f.engine.submit(request(f), sinks);
  f.run_all();
  EXPECT_EQ(f.pool.stats().pages_held, 0);
  for (uint64_t i = 0; i < 3; ++i) {
    Fixture other({}, {}, toy);
    GenerationRequest r = request(other);
    r.sampler.seed += i;
    Recorder want;
    other.engine.submit(r, want);
    other.run_all();
    EXPECT_TRUE(answers[i] == want) << i;
  }
}

TEST(Engine, AnotherAnswerComputesThePromptWhenTheFirstIsCancelled) {
  EngineOptions options;
  options.prefill_chunk = 20;
  Fixture f({}, options);
  Recorder answers[3];
  RequestSink* sinks[] = {&answers[0], &answers[1], &answers[2]};
  const auto ids = f.engine.submit(f.request(std::string(100, 'y'), 10), sinks);
  ASSERT_TRUE(f.engine.step());
  f.engine.cancel(ids[0]);
  f.run_all();
  EXPECT_EQ(answers[0].reason, FinishReason::kCancelled);
  const Recorder want = alone(std::string(100, 'y'), 10);
  for (int i : {1, 2}) EXPECT_EQ(answers[i].tokens, want.tokens);
  EXPECT_EQ(f.pool.stats().pages_held, 0);
}

TEST(Engine, AnswersThatCannotRunAreRefusedTogether) {
  EngineOptions options;
  options.context = 50;
  Fixture f({}, options);
  Recorder a, b;
  RequestSink* sinks[] = {&a, &b};
  EXPECT_THROW(f.engine.submit(f.request(std::string(60, 'y'), 1), sinks), CapacityError);
  EXPECT_THROW(f.engine.submit(f.request("y", 1), std::span<RequestSink* const>()),
               std::invalid_argument);
  EXPECT_EQ(f.engine.num_requests(), 0u);
}

TEST(Engine, AnswersThatOutgrowAFixedPoolFailOneByOne) {
  KvSettings kv;
  kv.dynamic = false;
  kv.num_pages = 12;  // one whole answer takes 10, three together 18
  Fixture f(kv);
  Recorder answers[3];
  RequestSink* sinks[] = {&answers[0], &answers[1], &answers[2]};
  auto request = f.request(std::string(96, 'y'), 60);
  request.sampler.temperature = 1;  // equal answers would be kept once
  f.engine.submit(std::move(request), sinks);
  f.run_all();
  int whole = 0;
  for (const Recorder& r : answers) {
    EXPECT_TRUE(r.finished);
    if (r.reason == FinishReason::kLength)
      ++whole;
    else
      EXPECT_THROW(std::rethrow_exception(r.error), CapacityError);
  }
  EXPECT_GE(whole, 1);
  EXPECT_LT(whole, 3);
  EXPECT_EQ(f.pool.stats().pages_held, 0);
}

TEST(Engine, PromptProbabilitiesNeedEveryToken) {
  Conversation c;
  const std::string prompt = "hello world, and whoever reads this";
  c.turn(prompt, 5);
  Recorder r;
  c.f.engine.submit(c.f.request(prompt, 5), r);
  c.f.run_all();
  EXPECT_EQ(r.num_cached, 0);
  EXPECT_EQ(r.prompt_logprobs, alone(prompt, 5).prompt_logprobs);
}

TEST(Engine, ARequestThatCannotGoOnHoldsNothing) {
  KvSettings kv;
  kv.num_pages = 4;
  kv.dynamic = false;
  Fixture f(kv);
  Recorder r;
  f.engine.submit(f.request(std::string(60, 'a'), 100), r);
  f.run_all();
  EXPECT_EQ(r.reason, FinishReason::kError);
  EXPECT_EQ(f.pool.stats().pages_held, 0);
}

}  // namespace
}  // namespace pagedkv
