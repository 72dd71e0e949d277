#include "engine/perplexity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <list>
#include <stdexcept>

#include "engine/kv_settings.h"
#include "models/ggml/ggml_model.h"
#include "models/toy/toy_model.h"

namespace pagedkv {
namespace {

std::unique_ptr<Model> load(const std::string& name, int max_step_tokens = 512) {
  const char* folder = std::getenv("PAGEDKV_TEST_MODELS");
  if (!folder)
    throw std::runtime_error("PAGEDKV_TEST_MODELS: run scripts/test.sh, which makes the models");
  GgmlModelOptions options;
  options.exact = ExactMode::kOn;
  options.max_step_tokens = max_step_tokens;
  return load_ggml_model(std::string(folder) + "/model-variants/" + name + ".gguf", options);
}

// Letters and spaces, for models of bytes.
std::vector<int32_t> tokens_of_text(size_t count) {
  const std::string letters = "abcdefghijklmnopqrstuvwxyz   ";
  std::vector<int32_t> out;
  for (uint64_t seed = 1; out.size() < count;) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;  // Knuth's MMIX generator
    out.push_back(letters[(seed >> 33) % letters.size()]);
  }
  return out;
}

struct Formats {
  PageFormat keys, values;
};

PerplexityReport measure(Model& model, std::span<const int32_t> tokens,
                         const std::vector<Formats>& formats, const PerplexityOptions& options) {
  std::list<PagePool> pools;
  std::vector<PagePool*> pointers;
  for (const Formats& f : formats) {
    KvSettings kv;
    kv.key_format = f.keys;
    kv.value_format = f.values;
    kv.page_size = 8;
    pointers.push_back(&pools.emplace_back(pool_options(model.info(), kv)));
  }
  const auto report = measure_perplexity(model, tokens, pointers, options);
  for (const PagePool& pool : pools) {
    pool.verify();
    EXPECT_EQ(pool.stats().pages_held, 0);
  }
  return report;
}

// Log-probabilities [tokens, vocab] after each token of a chunk, one token a step, by the textbook.
std::vector<std::vector<long double>> log_probabilities(Model& model, Formats formats,
                                                        const std::vector<int32_t>& chunk) {
  KvSettings kv;
  kv.key_format = formats.keys;
  kv.value_format = formats.values;
  PagePool pool(pool_options(model.info(), kv));
  BlockTable table(pool);
  std::vector<std::vector<long double>> out;
  for (const int32_t& token : chunk) {
    table.append(1);
    StepBatch batch;
    batch.sequences.push_back({&table, std::span(&token, 1), 1});
    const auto logits = model.step(batch, pool);
    long double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<long double>(x));
    auto& row = out.emplace_back();
    for (const float x : logits) row.push_back(x - std::log(sum));
  }
  return out;
}

struct Definition {
  std::vector<long double> nll, kl;
  int64_t same_top = 0;
};

Definition define(Model& model, const std::vector<int32_t>& tokens, Formats base, Formats formats,
                  size_t context, size_t chunks, std::optional<int32_t> begin) {
  Definition d;
  for (size_t c = 0; c < chunks; ++c) {
    const auto first = tokens.begin() + static_cast<int64_t>(c * context);
    std::vector<int32_t> chunk(first, first + static_cast<int64_t>(context));
    if (begin) chunk[0] = *begin;
    const auto p = log_probabilities(model, base, chunk);
    const auto q = log_probabilities(model, formats, chunk);
    for (size_t i = context / 2; i + 1 < context; ++i) {
      d.nll.push_back(-q[i][static_cast<size_t>(chunk[i + 1])]);
      long double kl = 0;
      for (size_t t = 0; t < p[i].size(); ++t) kl += std::exp(p[i][t]) * (p[i][t] - q[i][t]);
      d.kl.push_back(kl);
      d.same_top += std::ranges::max_element(p[i]) - p[i].begin() ==
                    std::ranges::max_element(q[i]) - q[i].begin();
    }
  }
  return d;
}

long double mean(const std::vector<long double>& values) {
  long double sum = 0;
  for (const auto x : values) sum += x;
  return sum / static_cast<long double>(values.size());
}

long double standard_error(const std::vector<long double>& values) {
  long double sum = 0;
  for (const auto x : values) sum += (x - mean(values)) * (x - mean(values));
  const auto n = static_cast<long double>(values.size());
  return std::sqrt(sum / n / (n - 1));
}

constexpr Formats kF32{PageFormat::kF32, PageFormat::kF32};
constexpr Formats kMixed{PageFormat::kF16, PageFormat::kQ4};
constexpr Formats kQ4{PageFormat::kQ4, PageFormat::kQ4};

TEST(Perplexity, IsWhatTheDefinitionSays) {
  struct Case {
    const char* model;
    int64_t context;
    std::optional<int32_t> begin;
  };
  for (const auto& c : {Case{"gemma3", 51, 256}, Case{"qwen2", 40, std::nullopt},
                        Case{"untied", 3, 256}, Case{"untied", 64, 256}}) {
    SCOPED_TRACE(std::string(c.model) + ", context " + std::to_string(c.context));
    const auto model = load(c.model, 16);
    const auto context = static_cast<size_t>(c.context);
    const auto tokens = tokens_of_text(3 * context + context - 1);  // the rest fills no chunk
    const std::vector<Formats> formats{kF32, kMixed, kQ4};
    PerplexityOptions options;
    options.context = c.context;
    options.begin = c.begin;
    const auto report = measure(*model, tokens, formats, options);
    EXPECT_EQ(report.chunks, 3);
    EXPECT_EQ(report.scored, 3 * (c.context - c.context / 2 - 1));
    ASSERT_EQ(report.results.size(), formats.size());
    for (size_t f = 0; f < formats.size(); ++f) {
      SCOPED_TRACE(f);
      const auto want = define(*model, tokens, formats[0], formats[f], context, 3, c.begin);
      const auto& got = report.results[f];
      const auto perplexity = static_cast<double>(std::exp(mean(want.nll)));
      EXPECT_NEAR(got.perplexity, perplexity, 1e-10 * perplexity);
      EXPECT_NEAR(got.perplexity_error, perplexity * static_cast<double>(standard_error(want.nll)),
                  1e-6 * perplexity);
      EXPECT_NEAR(got.kl_mean, static_cast<double>(mean(want.kl)), 1e-12);
      EXPECT_NEAR(got.kl_mean_error, static_cast<double>(standard_error(want.kl)), 1e-9);
      EXPECT_NEAR(got.kl_max, static_cast<double>(std::ranges::max(want.kl)), 1e-12);
      EXPECT_DOUBLE_EQ(got.same_top,
                       static_cast<double>(want.same_top) / static_cast<double>(want.kl.size()));
      auto sorted = want.kl;  // 99 % lies between the last two where there are at most 100
      std::ranges::sort(sorted);
      const auto n = sorted.size();
      const auto place = 0.99L * static_cast<long double>(n - 1);
      const auto part = place - static_cast<long double>(n - 2);
      ASSERT_GE(part, 0);
      EXPECT_NEAR(got.kl_p99,
                  static_cast<double>(sorted[n - 2] + part * (sorted[n - 1] - sorted[n - 2])),
                  1e-12);
    }
    EXPECT_GT(report.results[2].kl_mean, 0) << "q4 pages change what the model says";
  }
}

TEST(Perplexity, TheFirstFormatAgainIsNoDifference) {
  const auto model = load("gemma3");
  const auto report = measure(*model, tokens_of_text(200), {kQ4, kQ4, kF32}, {.context = 64});
  EXPECT_EQ(report.chunks, 3);
  for (const size_t i : {0, 1}) {
    EXPECT_EQ(report.results[i].perplexity, report.results[0].perplexity);
    EXPECT_EQ(report.results[i].kl_mean, 0);
    EXPECT_EQ(report.results[i].kl_max, 0);
    EXPECT_EQ(report.results[i].same_top, 1);
  }
  EXPECT_GT(report.results[2].kl_max, 0);
}

TEST(Perplexity, StepsThreadsAndCompanyChangeNoBit) {
  const auto tokens = tokens_of_text(300);
  const auto whole = load("qwen2");
  const auto want = measure(*whole, tokens, {kF32, kQ4}, {.context = 100}).results;
  for (const int step : {1, 7, 50, 51, 99}) {
    const auto model = load("qwen2", step);
    const auto got =
        measure(*model, tokens, {kF32, kMixed, kQ4}, {.context = 100, .num_threads = 3}).results;
    EXPECT_EQ(got[0].perplexity, want[0].perplexity) << step;
    EXPECT_EQ(got[2].perplexity, want[1].perplexity) << step;
    EXPECT_EQ(got[2].perplexity_error, want[1].perplexity_error) << step;
    EXPECT_EQ(got[2].kl_mean, want[1].kl_mean) << step;
    EXPECT_EQ(got[2].kl_p99, want[1].kl_p99) << step;
  }
}

TEST(Perplexity, AskedForFewerChunksItReadsTheFirst) {
  const auto model = make_toy_model();
  const auto tokens = tokens_of_text(500);
  double last = 0;
  const auto two = measure(*model, tokens, {kF32},
                           {.context = 50, .max_chunks = 2, .progress = [&](double done) {
                              EXPECT_GT(done, last);
                              last = done;
                            }});
  EXPECT_EQ(last, 1);
  EXPECT_EQ(two.chunks, 2);
  EXPECT_EQ(two.scored, 48);
  const auto cut = measure(*model, std::span(tokens).first(100), {kF32}, {.context = 50});
  EXPECT_EQ(two.results[0].perplexity, cut.results[0].perplexity);
  EXPECT_EQ(measure(*model, tokens, {kF32}, {.context = 50, .max_chunks = 99}).chunks, 10);
  EXPECT_EQ(measure(*model, tokens, {kF32}, {.context = 500}).chunks, 1);
}

TEST(Perplexity, RefusesWhatCannotBeScored) {
  const auto model = make_toy_model({.context_length = 128, .poison_token = 'j'});
  const auto tokens = tokens_of_text(127);
  const auto refused = [&](const PerplexityOptions& options, const std::string& words) {
    try {
      measure(*model, tokens, {kF32}, options);
      ADD_FAILURE() << "taken: " << words;
    } catch (const std::invalid_argument& e) {
      EXPECT_NE(std::string(e.what()).find(words), std::string::npos) << e.what();
    }
  };
  refused({.context = 2}, "context 2");
  refused({.context = 129}, "limit is 128");
  refused({.context = 128}, "127 tokens, one chunk needs 128");
  refused({.context = 64, .max_chunks = 0}, "chunks 0");
  refused({.context = 64, .max_chunks = -2}, "chunks -2");
  EXPECT_THROW(measure(*model, tokens, {}, {.context = 64}), std::invalid_argument);

  std::vector<int32_t> poisoned(64, 'a');
  poisoned[40] = 'j';
  EXPECT_THROW(measure(*model, poisoned, {kF32}, {.context = 64}), std::runtime_error);
  poisoned[40] = 'a';
  poisoned[10] = 'j';  // in the half that is not scored
  EXPECT_NO_THROW(measure(*model, poisoned, {kF32}, {.context = 64}));
}

}  // namespace
}  // namespace pagedkv
