#include "engine/metrics.h"

#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <thread>

#include "engine/engine_loop.h"
#include "engine/kv_settings.h"
#include "models/toy/toy_model.h"

namespace pagedkv {
namespace {

struct Ignore final : RequestSink {
  void on_token(const TokenEvent&) override {}
  void on_finish(FinishReason why, std::string_view, std::exception_ptr) override { reason = why; }
  std::optional<FinishReason> reason;
};

struct Fixture {
  explicit Fixture(MetricsOptions options = {.model_name = "toy", .kv_format = "f16"},
                   KvSettings kv = {}, EngineOptions engine_options = {}, ToyOptions toy = {})
      : model(make_toy_model(toy)),
        pool(pool_options(model->info(), kv)),
        metrics(std::move(options)),
        engine(*model, *tokenizer, pool, make_toy_sampler, with(engine_options, &metrics)) {}
  static EngineOptions with(EngineOptions options, RequestObserver* observer) {
    options.observer = observer;
    return options;
  }
  void submit(const std::string& prompt, int64_t max_new_tokens, RequestSink& sink,
              const std::string& salt = "") {
    GenerationRequest r;
    r.prompt = tokenizer->tokenize(prompt, true, true);
    r.max_new_tokens = max_new_tokens;
    r.cache_salt = salt;
    engine.submit(std::move(r), sink);
  }
  void serve(const std::string& prompt, int64_t max_new_tokens, const std::string& salt = "") {
    Ignore sink;
    submit(prompt, max_new_tokens, sink, salt);
    while (engine.step()) {
    }
  }
  std::string text() { return metrics.text(engine_state(engine)); }
  // Every sample, by its name and labels as they are written.
  std::map<std::string, double> samples() {
    std::map<std::string, double> out;
    std::istringstream lines(text());
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line[0] == '#') continue;
      const size_t space = line.rfind(' ');
      EXPECT_TRUE(out.emplace(line.substr(0, space), std::stod(line.substr(space + 1))).second)
          << line << " comes twice";
    }
    return out;
  }
  std::unique_ptr<Tokenizer> tokenizer = make_toy_tokenizer();
  std::unique_ptr<Model> model;
  PagePool pool;
  Metrics metrics;
  Engine engine;
};

double sum_of(const std::map<std::string, double>& samples, const std::string& name) {
  double sum = 0;
  for (const auto& [key, value] : samples)
    if (key.starts_with(name + "{")) sum += value;
  return sum;
}

TEST(Metrics, EveryFamilyHasHelpAndType) {
  Fixture f;
  f.serve(std::string(40, 'a'), 3);
  std::string named, typed;
  std::istringstream lines(f.text());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash, what, name;
    words >> hash;
    if (hash == "#") {
      words >> what >> name;
      ASSERT_TRUE(what == "HELP" || what == "TYPE") << line;
      (what == "HELP" ? named : typed) = name;
      std::string help;
      EXPECT_TRUE(std::getline(words >> std::ws, help)) << line;
      continue;
    }
    EXPECT_EQ(named, typed) << line;
    EXPECT_TRUE(line.starts_with(typed)) << line;
    EXPECT_TRUE(line.starts_with("pagedkv_") || line.starts_with("vllm:")) << line;
  }
}

TEST(Metrics, PagesByStateSumToTheCommittedOnes) {
  for (const int window : {0, 64}) {
    Fixture f({.model_name = "toy"}, {}, {.prefill_chunk = 48}, {.sliding_window = window});
    std::vector<Ignore> sinks(6);
    for (size_t i = 0; i < sinks.size(); ++i)
      f.submit(std::string(90 * i + 10, static_cast<char>('a' + i / 2)), 20, sinks[i]);
    for (bool more = true; more;) {
      more = f.engine.step();
      const auto samples = f.samples();
      for (int g = 0; g < f.pool.num_groups(); ++g) {
        const auto pages = [&](const char* state) {
          return samples.at("pagedkv_pool_pages{group=\"" + std::to_string(g) + "\",state=\"" +
                            state + "\"}");
        };
        EXPECT_EQ(pages("free") + pages("held") + pages("cached"), f.pool.committed(g));
        EXPECT_EQ(pages("held"), f.pool.pages_held(g));
        EXPECT_GE(pages("free"), 0);
      }
      EXPECT_EQ(samples.at("pagedkv_requests_running"), f.engine.num_running());
    }
    EXPECT_EQ(f.samples().at("pagedkv_pool_pages{group=\"0\",state=\"held\"}"), 0);
  }
}

TEST(Metrics, AFixedPoolIsUsedByWhatIsHeldOfIt) {
  KvSettings kv;
  kv.num_pages = 256;
  kv.dynamic = false;
  Fixture f({.model_name = "toy"}, kv);
  Ignore sink;
  f.submit(std::string(500, 'x'), 12, sink);
  f.engine.step();
  auto samples = f.samples();
  EXPECT_EQ(samples.at("pagedkv_pool_pages{group=\"0\",state=\"held\"}"), 32);
  EXPECT_DOUBLE_EQ(samples.at("pagedkv_usage_ratio"), 32.0 / 256);
  while (f.engine.step()) {
  }
  samples = f.samples();
  EXPECT_EQ(samples.at("pagedkv_pool_pages{group=\"0\",state=\"held\"}"), 0);
  EXPECT_EQ(samples.at("pagedkv_pool_pages{group=\"0\",state=\"cached\"}"), 32);
  EXPECT_EQ(samples.at("pagedkv_pool_pages{group=\"0\",state=\"free\"}"), 224);
  EXPECT_EQ(samples.at("pagedkv_usage_ratio"), 0);
}

TEST(Metrics, CountsTokensAndRequestsOfBothNames) {
  Fixture f;
  f.serve(std::string(100, 'a'), 5);
  f.serve(std::string(100, 'a'), 5);  // finds all but the last token
  f.serve(std::string(100, 'b'), 1);
  Ignore sink;
  f.submit(std::string(30, 'c'), 50, sink);
  f.engine.step();
  f.engine.cancel_all();
  const auto s = f.samples();
  EXPECT_EQ(s.at("pagedkv_request_prompt_tokens_total{source=\"cached\"}"), 99);
  EXPECT_EQ(s.at("pagedkv_request_prompt_tokens_total{source=\"computed\"}"), 231);
  EXPECT_EQ(s.at("pagedkv_generation_tokens_total"), 12);
  EXPECT_EQ(s.at("pagedkv_prefix_query_tokens_total"), 99 * 3 + 29);
  EXPECT_EQ(s.at("pagedkv_prefix_hit_tokens_total{tier=\"cpu\"}"), 99);
  EXPECT_EQ(s.at("pagedkv_prefix_miss_total{reason=\"new_session\"}"), 3);
  EXPECT_EQ(sum_of(s, "pagedkv_prefix_miss_total"), 3);
  EXPECT_EQ(s.at("pagedkv_requests_finished_total{reason=\"length\"}"), 3);
  EXPECT_EQ(s.at("pagedkv_requests_finished_total{reason=\"cancelled\"}"), 1);
  EXPECT_EQ(s.at("pagedkv_time_to_first_token_seconds_count"), 4);
  EXPECT_EQ(s.at("pagedkv_inter_token_latency_seconds_count"), 8);
  EXPECT_EQ(s.at("pagedkv_request_duration_seconds_count"), 3);
  EXPECT_EQ(s.at("pagedkv_request_queue_seconds_count"), 4);
  EXPECT_EQ(s.at("pagedkv_request_prompt_length_tokens_sum"), 300);
  EXPECT_EQ(s.at("pagedkv_request_generation_length_tokens_bucket{le=\"5\"}"), 3);

  const std::string labels = "{model_name=\"toy\",engine=\"0\"}";
  EXPECT_EQ(s.at("vllm:prompt_tokens_total" + labels), 330);
  EXPECT_EQ(s.at("vllm:generation_tokens_total" + labels), 12);
  EXPECT_EQ(s.at("vllm:prefix_cache_queries_total" + labels), 326);
  EXPECT_EQ(s.at("vllm:prefix_cache_hits_total" + labels), 99);
  EXPECT_EQ(
      s.at("vllm:request_success_total{model_name=\"toy\",engine=\"0\",finished_reason=\"abort\"}"),
      1);
  EXPECT_EQ(s.at("vllm:time_to_first_token_seconds_count" + labels), 4);
  EXPECT_EQ(s.at("vllm:kv_cache_usage_perc" + labels), s.at("pagedkv_usage_ratio"));
}

TEST(Metrics, WhatIsComputedAgainAfterAPreemptionIsNoHit) {
  KvSettings kv;
  kv.num_pages = 12;
  kv.dynamic = false;
  Fixture f({.model_name = "toy"}, kv);
  std::vector<Ignore> sinks(4);
  for (size_t i = 0; i < sinks.size(); ++i)
    f.submit(std::string(32, static_cast<char>('a' + i)), 64, sinks[i]);
  while (f.engine.step()) {
  }
  const auto s = f.samples();
  EXPECT_GT(s.at("pagedkv_preemptions_total"), 0);
  EXPECT_EQ(s.at("pagedkv_prefix_query_tokens_total"), 4 * 31);
  EXPECT_EQ(s.at("pagedkv_prefix_hit_tokens_total{tier=\"cpu\"}"), 0);
  EXPECT_EQ(sum_of(s, "pagedkv_request_prompt_tokens_total"), 4 * 32);
  EXPECT_EQ(s.at("pagedkv_generation_tokens_total"), 4 * 64);
  EXPECT_EQ(s.at("pagedkv_time_to_first_token_seconds_count"), 4);
  EXPECT_EQ(s.at("pagedkv_request_queue_seconds_count"), 4);
}

TEST(Metrics, OtherTenantsPagesAreNoReason) {
  Fixture f;
  f.serve(std::string(100, 'a'), 1, "tenant-1");
  f.serve(std::string(100, 'a'), 1, "tenant-2");
  const auto s = f.samples();
  EXPECT_EQ(s.at("pagedkv_prefix_miss_total{reason=\"new_session\"}"), 2);
  EXPECT_EQ(s.at("pagedkv_prefix_miss_total{reason=\"salt_differs\"}"), 0);
  EXPECT_EQ(f.text().find("tenant-1"), std::string::npos) << "a salt in a label";
}

TEST(Metrics, VllmsNamesCanBeLeftOut) {
  Fixture with, without({.model_name = "toy", .vllm_names = false});
  EXPECT_NE(with.text().find("vllm:"), std::string::npos);
  EXPECT_EQ(without.text().find("vllm:"), std::string::npos);
}

TEST(Metrics, NamesOfModelsAreEscaped) {
  Fixture f({.model_name = "a\"b\\c\nd"});
  EXPECT_NE(f.text().find("model_name=\"a\\\"b\\\\c\\nd\""), std::string::npos);
}

TEST(Metrics, AreReadWhileRequestsRun) {
  Fixture f;
  EngineLoop loop(f.engine);
  Ignore sink;
  RequestSink* const sinks[] = {&sink};
  GenerationRequest request;
  request.prompt = f.tokenizer->tokenize(std::string(200, 'a'), true, true);
  request.max_new_tokens = 3000;
  const auto ids = loop.submit(std::move(request), sinks);
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i)
    readers.emplace_back([&] {
      for (int j = 0; j < 20; ++j)
        EXPECT_NE(f.metrics.text(loop.call(engine_state)).find("pagedkv_pool_pages"),
                  std::string::npos);
    });
  for (std::thread& reader : readers) reader.join();
  loop.cancel(ids);
  EXPECT_TRUE(loop.wait_idle(std::chrono::minutes(1)));
}

TEST(EngineState, TellsOfEachRequest) {
  Fixture f({}, {}, {.prefill_chunk = 64, .max_seqs = 2});
  std::vector<Ignore> sinks(3);
  f.submit(std::string(40, 'a'), 10, sinks[0], "salt");
  f.submit(std::string(200, 'b'), 10, sinks[1]);
  f.submit(std::string(50, 'c'), 10, sinks[2]);
  f.engine.step();
  f.engine.step();
  const std::vector<RequestState> all = f.engine.requests();
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].phase, RequestPhase::kDecode);
  EXPECT_EQ(all[0].cache_salt, "salt");
  EXPECT_EQ(all[0].progress.num_prompt, 40);
  EXPECT_EQ(all[0].progress.num_generated, 2);
  EXPECT_EQ(all[0].num_pages, 3);
  EXPECT_EQ(all[1].phase, RequestPhase::kPrefill);
  EXPECT_EQ(all[1].num_computed, 128);
  EXPECT_EQ(all[1].num_pages, 8);
  EXPECT_EQ(all[2].phase, RequestPhase::kWaiting);
  EXPECT_EQ(all[2].num_pages, 0);
  EXPECT_EQ(request_phase_name(all[2].phase), "waiting");
  const EngineState state = engine_state(f.engine);
  EXPECT_EQ(state.num_running, 2);
  EXPECT_EQ(state.num_waiting, 1);
  f.engine.cancel_all();
}

}  // namespace
}  // namespace pagedkv
