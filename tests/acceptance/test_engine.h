// An engine over a model, with a pool of its own, and the answers it gives.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/kv_settings.h"
#include "models/ggml/ggml_text.h"

namespace pagedkv::testing {

// What is compared is what a client reads: all but num_cached.
struct Answer final : RequestSink {
  void on_start(int64_t n) override { num_cached = n; }
  void on_token(const TokenEvent& e) override {
    tokens.push_back(e.id);
    logprobs.push_back(e.logprob.value());
    text += e.text;
  }
  void on_finish(FinishReason why, std::string_view rest, std::exception_ptr e) override {
    EXPECT_EQ(e, nullptr);
    text += rest;
    reason = why;
  }
  bool operator==(const Answer& o) const {
    return tokens == o.tokens && logprobs == o.logprobs && text == o.text && reason == o.reason;
  }
  int64_t num_cached = -1;
  std::vector<int32_t> tokens;
  std::vector<double> logprobs;
  std::string text;
  FinishReason reason = FinishReason::kError;
};

// The model and the tokenizer must outlive it.
struct TestEngine {
  TestEngine(Model& model, const Tokenizer& tokenizer, const KvSettings& kv, EngineOptions options)
      : pool(pool_options(model.info(), kv)),
        engine(
            model, tokenizer, pool,
            [&model](const SamplerOptions& s) { return make_sampler(s, model.info().vocab_size); },
            std::move(options)) {}
  // Until every request has ended.
  void run() {
    while (engine.step()) {
    }
    pool.verify();
    engine.prefix_index().verify();
    EXPECT_EQ(pool.stats().pages_held, 0);
  }
  PagePool pool;
  Engine engine;
};

}  // namespace pagedkv::testing
