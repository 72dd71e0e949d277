#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
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
  void on_prompt_logprob(int64_t index, double logprob, std::span<const TokenLogprob>) override {
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

TEST(Engine, AnswersThatTogetherOutgrowAFixedPoolTakeTurns) {
  KvSettings kv;
  kv.dynamic = false;
  kv.num_pages = 12;  // one whole answer takes 10, three together 18
  Fixture f(kv);
  Recorder answers[3];
  RequestSink* sinks[] = {&answers[0], &answers[1], &answers[2]};
  auto request = f.request(std::string(96, 'y'), 60);
  request.sampler.temperature = 1;  // equal answers would be kept once
  f.engine.submit(request, sinks);
  f.run_all();
  EXPECT_GT(f.engine.stats().preemptions, 0);
  EXPECT_EQ(f.pool.stats().pages_held, 0);
  for (uint64_t i = 0; i < 3; ++i) {
    Fixture roomy;
    GenerationRequest one = request;
    one.sampler.seed += i;
    one.prompt_logprobs = i == 0;
    Recorder want;
    roomy.engine.submit(one, want);
    roomy.run_all();
    EXPECT_TRUE(answers[i] == want) << i;
  }
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

// ---- scheduling

KvSettings fixed_pool(int32_t num_pages, int page_size = 16) {
  KvSettings kv;
  kv.num_pages = num_pages;
  kv.page_size = page_size;
  kv.dynamic = false;
  return kv;
}

std::string varied(int seed, size_t length) {
  std::string out(1, static_cast<char>('A' + seed % 26));
  for (size_t i = 1; i < length; ++i)
    out += static_cast<char>('a' + (i * i + i * static_cast<size_t>(seed) + 7) % 26);
  return out;
}

// FC-12 on the toy model: what was preempted says what it says with all the room there is, in every format, with a
// window and without, warm or not, with the prompt's log-probabilities or not.
TEST(Scheduler, PreemptionIsInvisible) {
  int64_t preemptions = 0, recomputed = 0;
  for (const bool window : {false, true})
    for (const bool cache : {false, true})
      for (const bool prompt_logprobs : {false, true})
        for (const int page_size : {3, 16})
          for (const int chunk : {0, 7}) {
            const ToyOptions toy{.sliding_window = window ? 20 : 0};
            EngineOptions options = every_hit();
            options.prefix_cache = cache;
            options.prefill_chunk = chunk;
            Fixture tight(fixed_pool(192 / page_size, page_size), options, toy);
            Recorder got[4], want[4];
            for (int i = 0; i < 4; ++i) {
              auto request = tight.request(varied(i, 32), 64);
              request.prompt_logprobs = prompt_logprobs;
              request.top_logprobs = 2;
              request.sampler.temperature = 0.8f;
              request.sampler.seed = static_cast<uint64_t>(i);
              Fixture roomy({}, {}, toy);
              roomy.engine.submit(request, want[i]);
              roomy.run_all();
              tight.engine.submit(std::move(request), got[i]);
            }
            tight.run_all();
            for (int i = 0; i < 4; ++i) {
              EXPECT_TRUE(got[i] == want[i]) << i << ' ' << window << cache << page_size << chunk;
              EXPECT_EQ(got[i].tokens.size(), 64u);
              EXPECT_EQ(got[i].num_cached, 0);  // what is computed again was no hit
              EXPECT_TRUE(std::ranges::is_sorted(got[i].chunks));
            }
            const EngineStats stats = tight.engine.stats();
            EXPECT_EQ(stats.prompt_tokens, 4 * 32);
            EXPECT_EQ(stats.generated_tokens, 4 * 64);
            EXPECT_EQ(tight.pool.stats().pages_held, 0);
            EXPECT_GT(stats.preemptions, 0);
            tight.engine.prefix_index().verify();
            preemptions += stats.preemptions;
            recomputed += stats.recomputed_tokens;
          }
  EXPECT_GT(recomputed, 0);
  std::printf("[ COUNT    ] %lld preemptions, %lld tokens computed again\n",
              static_cast<long long>(preemptions), static_cast<long long>(recomputed));
}

TEST(Scheduler, RandomLoadInASmallPoolSaysWhatEachSaysAlone) {
  const char* scale = std::getenv("PAGEDKV_TEST_SCALE");
  const int rounds = 12 * (scale ? std::atoi(scale) : 1);
  std::mt19937 random(11);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  int64_t preemptions = 0;
  for (int round = 0; round < rounds; ++round) {
    const ToyOptions toy{.max_step_tokens = 20 + below(80), .sliding_window = below(2) * 24};
    EngineOptions options = every_hit();
    options.prefill_chunk = 1 + below(30);
    options.max_seqs = 1 + below(12);
    Fixture f(fixed_pool(14 + below(20), 8), options, toy);
    struct One {
      GenerationRequest request;
      Recorder got;
      RequestId id = 0;
      bool cancelled = false;
    };
    std::list<One> all;
    for (int i = 0; i < 40; ++i) {
      One& one = all.emplace_back();
      one.request = f.request(varied(below(4), 1 + static_cast<size_t>(below(60))), below(40));
      one.request.prompt_logprobs = below(4) == 0;
      one.request.priority = below(3);
      one.request.sampler.temperature = static_cast<float>(below(2));
      one.request.sampler.seed = random();
      if (below(5) == 0) one.request.cache_salt.assign(1, 's');
      one.id = f.engine.submit(one.request, one.got);
      for (int steps = below(4); steps > 0; --steps) f.engine.step();
      if (below(10) == 0) {
        One& victim = *std::next(all.begin(), below(static_cast<int>(all.size())));
        victim.cancelled |= !victim.got.finished;
        f.engine.cancel(victim.id);
      }
      f.pool.verify();
    }
    f.run_all();
    f.engine.prefix_index().verify();
    EXPECT_EQ(f.pool.stats().pages_held, 0);
    preemptions += f.engine.stats().preemptions;
    for (One& one : all) {
      ASSERT_TRUE(one.got.finished);
      if (one.cancelled) {
        EXPECT_EQ(one.got.reason, FinishReason::kCancelled);
        continue;
      }
      Fixture roomy({}, {}, toy);
      Recorder want;
      roomy.engine.submit(one.request, want);
      roomy.run_all();
      EXPECT_TRUE(one.got == want) << round;
    }
  }
  EXPECT_GT(preemptions, 0);
}

TEST(Scheduler, ThoseOfTheLowestNumberRunFirst) {
  Fixture f({}, {.max_seqs = 1});
  std::vector<int> order;
  struct Told final : RequestSink {
    std::vector<int>* order;
    int name;
    Told(std::vector<int>* o, int n) : order(o), name(n) {}
    void on_start(int64_t) override { order->push_back(name); }
    void on_token(const TokenEvent&) override {}
    void on_finish(FinishReason, std::string_view, std::exception_ptr) override {}
  };
  std::list<Told> sinks;
  for (const int priority : {5, 5, -1, 0, -1}) {
    auto request = f.request(varied(static_cast<int>(sinks.size()), 40), 3);
    request.prompt_logprobs = false;
    request.priority = priority;
    f.engine.submit(std::move(request), sinks.emplace_back(&order, static_cast<int>(sinks.size())));
  }
  f.run_all();
  EXPECT_EQ(order, (std::vector<int>{2, 4, 3, 0, 1}));
}

TEST(Scheduler, AnUrgentRequestTakesThePagesOfOthers) {
  Fixture f(fixed_pool(8));  // 128 tokens
  Recorder slow, urgent;
  auto request = f.request(varied(1, 60), 60);
  request.prompt_logprobs = false;
  f.engine.submit(request, slow);
  for (int i = 0; i < 20; ++i) f.engine.step();
  EXPECT_EQ(slow.tokens.size(), 20u);
  request = f.request(varied(2, 60), 20);
  request.prompt_logprobs = false;
  request.priority = -1;
  f.engine.submit(request, urgent);
  while (!urgent.finished) ASSERT_TRUE(f.engine.step());
  EXPECT_FALSE(slow.finished);
  f.run_all();
  EXPECT_EQ(slow.text, alone(varied(1, 60), 60).text);
  EXPECT_EQ(urgent.text, alone(varied(2, 60), 20).text);
}

// A long prompt that must wait for its pages is passed by short ones, but not for ever.
TEST(Scheduler, ALongPromptNeitherBlocksNorStarves) {
  Fixture f(fixed_pool(20), {.prefill_chunk = 64, .max_seqs = 8});
  Recorder first, big;
  auto request = f.request(varied(0, 100), 40);  // 9 pages
  request.prompt_logprobs = false;
  f.engine.submit(request, first);
  f.engine.step();
  request = f.request(varied(1, 250), 20);  // 17 pages
  request.prompt_logprobs = false;
  f.engine.submit(request, big);
  std::list<Recorder> small;
  int before_big = 0;
  for (int i = 0; i < 400 && !big.finished; ++i) {
    auto next = f.request(varied(2 + i, 20), 4);
    next.prompt_logprobs = false;
    f.engine.submit(next, small.emplace_back());
    f.engine.step();
    if (big.num_cached < 0)
      before_big = static_cast<int>(std::ranges::count_if(small, &Recorder::finished));
  }
  EXPECT_TRUE(big.finished);
  EXPECT_GT(before_big, 0);
  f.run_all();
  EXPECT_EQ(big.text, alone(varied(1, 250), 20).text);
  EXPECT_TRUE(std::ranges::all_of(small, &Recorder::finished));
}

// FC-17: each chunk of the long prompt costs the running answer one token's time, not the prompt's.
TEST(Scheduler, ALongPromptDoesNotStallRunningAnswers) {
  Fixture f({}, {.prefill_chunk = 32});
  Recorder victim, big;
  auto request = f.request(varied(0, 10), 200);
  request.prompt_logprobs = false;
  f.engine.submit(request, victim);
  for (int i = 0; i < 10; ++i) f.engine.step();
  request = f.request(varied(1, 960), 1);
  request.prompt_logprobs = false;
  f.engine.submit(request, big);
  const size_t before = victim.tokens.size();
  while (big.tokens.empty()) f.engine.step();
  EXPECT_EQ(victim.tokens.size() - before, 30u);
  f.run_all();
}

// FC-15: the context is what the pool can hold of one sequence.
TEST(Scheduler, NoRequestIsTakenThatThePoolCanNeverHold) {
  Fixture f(fixed_pool(64), {.within_pool = true});
  EXPECT_EQ(f.engine.context(), 1024);
  Recorder big, fits;
  Recorder small[3];
  try {
    f.engine.submit(f.request(varied(0, 1500), 1), big);
    FAIL() << "1500 tokens were taken";
  } catch (const CapacityError& e) {
    EXPECT_STREQ(e.what(), "the prompt has 1500 tokens, the context holds 1024");
  }
  for (int i = 0; i < 3; ++i) f.engine.submit(f.request(varied(i, 20), 5), small[i]);
  f.engine.submit(f.request(varied(9, 1000), 500), fits);
  f.run_all();
  EXPECT_EQ(fits.reason, FinishReason::kLength);
  EXPECT_EQ(fits.tokens.size(), 24u);
  for (const Recorder& r : small) EXPECT_EQ(r.tokens.size(), 5u);
}

TEST(Scheduler, ManyMoreRequestsThanSequencesAllEnd) {
  Fixture f(fixed_pool(24), {.max_seqs = 4});
  std::vector<Recorder> got(200);
  for (size_t i = 0; i < got.size(); ++i) {
    auto request =
        f.request("shared beginning of all of them " + varied(static_cast<int>(i), 9), 6);
    request.prompt_logprobs = false;
    f.engine.submit(std::move(request), got[i]);
  }
  EXPECT_EQ(f.engine.num_waiting(), 200);
  f.engine.step();
  EXPECT_LE(f.engine.num_running(), 4);
  f.run_all();
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(got[i].text,
              alone("shared beginning of all of them " + varied(static_cast<int>(i), 9), 6).text);
}

// ---- what ends an answer, and what is told of it

TEST(Engine, StopTokensEndItAndMinNewTokensForbidIt) {
  const Recorder whole = alone("abc", 40);
  Fixture f({}, {}, {.end_after = 10});
  Recorder stopped, long_enough, ends;
  auto request = f.request("abc", 40);
  request.stop_tokens = {whole.tokens[4]};
  f.engine.submit(request, stopped);
  request.stop_tokens = {};
  request.min_new_tokens = 20;
  f.engine.submit(request, long_enough);
  request.stop = {std::string(1, static_cast<char>(whole.tokens[0]))};
  f.engine.submit(request, ends);
  f.run_all();
  EXPECT_EQ(stopped.reason, FinishReason::kStop);
  EXPECT_EQ(stopped.text, whole.text.substr(0, 4));
  EXPECT_EQ(long_enough.tokens.size(), 21u);
  EXPECT_EQ(long_enough.tokens.back(), kToyEnd);
  EXPECT_EQ(std::ranges::count(long_enough.tokens, kToyEnd), 1);
  EXPECT_GE(ends.tokens.size(), 20u);
  EXPECT_EQ(ends.text.substr(0, 10), whole.text.substr(0, 10));
  request.stop_tokens = {kToyVocabSize};
  EXPECT_THROW(f.engine.submit(request, ends), std::invalid_argument);
  request.stop_tokens = {};
  request.top_logprobs = kMostTopLogprobs + 1;
  EXPECT_THROW(f.engine.submit(request, ends), std::invalid_argument);
}

TEST(Engine, TheMostLikelyTokensComeBestFirst) {
  struct Tops final : RequestSink {
    void on_prompt_logprob(int64_t, double, std::span<const TokenLogprob> top) override {
      prompt.emplace_back(top.begin(), top.end());
    }
    void on_token(const TokenEvent& e) override {
      ids.push_back(e.id);
      logprobs.push_back(e.logprob.value());
      tops.emplace_back(e.top.begin(), e.top.end());
    }
    void on_finish(FinishReason, std::string_view, std::exception_ptr) override {}
    std::vector<int32_t> ids;
    std::vector<double> logprobs;
    std::vector<std::vector<TokenLogprob>> tops, prompt;
  } sink;
  Fixture f;
  auto request = f.request("abcdef", 8);
  request.top_logprobs = 5;
  f.engine.submit(std::move(request), sink);
  f.run_all();
  ASSERT_EQ(sink.tops.size(), 8u);
  EXPECT_EQ(sink.prompt.size(), 5u);
  for (size_t i = 0; i < sink.tops.size(); ++i) {
    ASSERT_EQ(sink.tops[i].size(), 5u);
    EXPECT_EQ(sink.tops[i][0], (TokenLogprob{sink.ids[i], sink.logprobs[i]}));
    EXPECT_TRUE(std::ranges::is_sorted(sink.tops[i], std::greater{}, &TokenLogprob::logprob));
  }
}

}  // namespace
}  // namespace pagedkv
