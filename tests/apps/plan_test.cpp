// A plan says before what a run finds out: the bytes of its pages, and how many of them there can be.
#include "apps/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/cli_testing.h"
#include "core/memory_budget.h"
#include "models/ggml/ggml_model.h"
#include "models/ggml/hf_config.h"
#include "models/toy/toy_model.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv::apps {
namespace {

using nlohmann::json;
using testing::Cli;

constexpr PageFormat kFormats[] = {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16,
                                   PageFormat::kQ8,  PageFormat::kQ6,  PageFormat::kQ4};

std::vector<FormatPair> all_pairs() {
  std::vector<FormatPair> out;
  for (const PageFormat k : kFormats)
    for (const PageFormat v : kFormats) out.emplace_back(k, v);
  return out;
}

struct PlanCommand : Cli {
  json plan(const std::string& args, const std::string& before = "") {
    const auto r = run("plan --json " + args, before);
    EXPECT_EQ(r.code, 0) << args << r.err;
    return json::parse(r.out);
  }
  // The row that a run's settings choose.
  static json chosen(const json& plan) {
    for (const json& row : plan.at("formats"))
      if (row["chosen"] == true) return row;
    return {};
  }
};

// The pages of any number of tokens, in each format, as a pool holds them.
void expect_what_a_pool_holds(const ModelInfo& info, const std::string& name) {
  for (const int64_t context : {1, 16, 100, 257}) {
    KvSettings settings;
    settings.context = std::min<int64_t>(context, info.context_length);
    settings.page_size = context % 2 == 0 ? 16 : 5;
    const Plan plan = make_plan(info, settings, all_pairs(), 0, int64_t{1} << 40);
    size_t i = 0;
    for (const auto& [keys, values] : all_pairs()) {
      const PlannedFormat& row = plan.formats[i++];
      settings.key_format = keys;
      settings.value_format = values;
      if (!row.impossible.empty()) {
        EXPECT_THROW(PagePool(pool_options(info, settings)), std::invalid_argument) << name;
        continue;
      }
      PagePool pool(pool_options(info, settings));
      BlockTable table(pool);
      table.append(settings.context);
      EXPECT_EQ(row.context_bytes, pool.stats().bytes_in_use) << name << ' ' << row.format;
      EXPECT_EQ(row.bytes_per_token, pool.bytes_per_token()) << name << ' ' << row.format;
    }
  }
}

TEST_F(PlanCommand, BytesAreThoseThatAPoolHolds) {
  for (const char* name : {"gqa3_dim64", "gemma3", "short_values", "gqa1_dim80", "window"})
    expect_what_a_pool_holds(describe_ggml_model(models() + "/model-variants/" + name + ".gguf"),
                             name);
  expect_what_a_pool_holds(
      describe_hf_config(file("mistral.json",
                              R"({"model_type": "mistral", "num_hidden_layers": 3,
      "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 288, "vocab_size": 1000,
      "intermediate_size": 512, "max_position_embeddings": 4096, "sliding_window": 128})")),
      "mistral");
  expect_what_a_pool_holds(
      describe_hf_config(file("qwen3.json",
                              R"({"model_type": "qwen3", "num_hidden_layers": 4,
      "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "head_dim": 30,
      "vocab_size": 1000, "intermediate_size": 512, "max_position_embeddings": 4096,
      "use_sliding_window": true, "sliding_window": 64, "max_window_layers": 1})")),
      "qwen3");
}

// A run of as many tokens, on models with one layer group and with two.
TEST_F(PlanCommand, BytesAreThoseThatARunUses) {
  const std::pair<const char*, const char*> cases[] = {{"SmolLM2-135M-Instruct.Q4_1.gguf", "f16"},
                                                       {"gemma-3-270m.Q4_K_M.gguf", "q4"}};
  for (const auto& [name, format] : cases) {
    std::string prompt;
    for (int i = 0; i < 60; ++i) prompt += " word";
    const std::string model = "-m " + quoted_model(name) + " --kv-cache-dtype " + format;
    const auto r = run("run " + model + " -n 4 -t 2 --raw --json --no-dynamic --num-blocks 6 -p '" +
                       prompt + "'");
    ASSERT_EQ(r.code, 0) << r.err;
    const json stats = json::parse(r.out).at("stats");
    const auto tokens = stats["tokens"].get<int64_t>();
    ASSERT_GT(tokens, 60);
    const json row = chosen(plan(model + " -c " + std::to_string(tokens)));
    EXPECT_EQ(row["bytes_per_token"], stats["bytes_per_token"]) << name;
    EXPECT_EQ(row["context_bytes"], stats["bytes_in_use"]) << name;
    const json all = chosen(plan(model + " -c 96"));  // the six pages that --no-dynamic commits
    EXPECT_EQ(all["context_bytes"], stats["bytes_committed"]) << name;
    const auto resident = stats["bytes_resident"].get<double>();
    EXPECT_GE(resident, all["context_bytes"].get<double>()) << name;
  }
}

// A sequence goes through a pool in the steps of a run.
int64_t tokens_that_go_through(PagePool& pool) {
  BlockTable table(pool);
  for (int64_t step = 512; step >= pool.page_size(); step /= 2)
    while (table.try_append(step)) table.release_passed();
  return table.length();
}

TEST_F(PlanCommand, AWindowTakesWhatAPoolHoldsAtOnce) {
  const ModelInfo info = make_toy_model({.context_length = 1 << 20, .sliding_window = 100})->info();
  KvSettings settings;
  settings.context = 20000;
  const std::vector<FormatPair> f16{{PageFormat::kF16, PageFormat::kF16}};
  const PlannedFormat row = make_plan(info, settings, f16, 0, int64_t{1} << 40).formats[0];
  PagePool pool(pool_options(info, settings));
  BlockTable table(pool);
  while (table.length() < settings.context) {
    table.append(std::min<int64_t>(512, settings.context - table.length()));
    table.release_passed();
  }
  const int64_t page_bytes = row.page_bytes / 2;  // of either group
  EXPECT_LE(pool.stats().bytes_peak, row.context_bytes);
  EXPECT_GT(pool.stats().bytes_peak, row.context_bytes - 16 * page_bytes);
  EXPECT_EQ(pool.pages_peak(0), 20000 / 16);
  EXPECT_LE(pool.pages_peak(1), (99 + 512 + 15 + 15) / 16);
  EXPECT_EQ(row.context_bytes, (20000 / 16 + (99 + 512 + 15 + 15) / 16) * page_bytes);

  settings.context = 128;
  settings.sliding_window = 100;  // in every layer
  const Plan plan = make_plan(info, settings, f16, 0, int64_t{1} << 40);
  EXPECT_EQ(plan.formats[0].longest, info.context_length);
}

TEST_F(PlanCommand, TokensAreThoseThatAPoolHandsOut) {
  const auto model = make_toy_model({.context_length = 1 << 20, .sliding_window = 100});
  ModelInfo info = model->info();
  for (const int64_t budget : {0, 100, 4096, 100000, 1234567})
    for (const int64_t max_bytes : {0, 70000})
      for (const auto& [format, windows] : {std::pair{PageFormat::kF16, false},
                                            {PageFormat::kQ8, false},
                                            {PageFormat::kF16, true}}) {
        KvSettings settings;
        settings.key_format = settings.value_format = format;
        settings.max_bytes = max_bytes;
        if (!windows) settings.sliding_window = 0;
        PagePoolOptions options = pool_options(info, settings);
        const int64_t available = budget + options.headroom_bytes;
        const Plan plan = make_plan(info, settings, {{format, format}}, 0, available);
        int64_t tokens = 0;
        const PagePool* asked = nullptr;
        options.available_bytes = [&] {
          return available - (asked ? asked->stats().bytes_committed : 0);
        };
        try {
          PagePool pool(options);
          asked = &pool;
          tokens = tokens_that_go_through(pool);
        } catch (const MemoryError&) {  // not one page
        }
        // A group commits up to half of what it has ahead, which another then lacks.
        const int64_t ahead = windows ? 20 * options.page_size : 0;
        EXPECT_LE(plan.formats[0].tokens, tokens + ahead) << budget << ' ' << max_bytes;
        // At the end of a text steps are short, and the window's group gives way to the other.
        const int64_t step = windows ? 512 : 0;
        EXPECT_GE(plan.formats[0].tokens, tokens - ahead - step) << budget << ' ' << max_bytes;
        EXPECT_EQ(plan.by_machine, max_bytes == 0 || budget < max_bytes) << budget;
      }
}

TEST_F(PlanCommand, WeightsAndComputeBuffersAreTakenFirst) {
  ModelInfo info = make_toy_model()->info();
  info.step_bytes = 1000;
  const int64_t headroom = PagePoolOptions().headroom_bytes;
  const std::vector<FormatPair> f16{{PageFormat::kF16, PageFormat::kF16}};
  EXPECT_EQ(make_plan(info, {}, f16, 500, headroom + 2000).bytes, 500);
  EXPECT_EQ(make_plan(info, {}, f16, 1500, headroom + 2000).bytes, 0);
  EXPECT_EQ(make_plan(info, {}, f16, int64_t{1} << 62, headroom).bytes, 0);
  const Plan unlimited = make_plan(info, {}, f16, 500, kUnlimitedBytes);
  EXPECT_EQ(unlimited.bytes, kUnlimitedBytes);
  EXPECT_EQ(unlimited.formats[0].tokens, int64_t{INT32_MAX} * 16);
  EXPECT_EQ(unlimited.formats[0].longest, info.context_length);
}

TEST_F(PlanCommand, JsonIsOneObject) {
  const json j = plan("toy: -c 160 --max-bytes 1MiB --block-size 8");
  EXPECT_EQ(j["model"], "toy:");
  EXPECT_EQ(j["context"], 160);
  EXPECT_EQ(j["page_size"], 8);
  EXPECT_EQ(j["memory"]["max_bytes"], 1 << 20);
  EXPECT_EQ(j["memory"]["pages"], 1 << 20);
  EXPECT_EQ(j["memory"]["limited_by"], "max_bytes");
  ASSERT_EQ(j["formats"].size(), 6u);
  for (const json& row : j["formats"]) {
    const auto fits = row["fits"].get<std::vector<json>>();
    ASSERT_EQ(fits.size(), 3u);
    EXPECT_EQ(fits[2]["context"], 160);
    EXPECT_EQ(fits[2]["sequences"], (1 << 20) / row["context_bytes"].get<int64_t>());
  }
  EXPECT_EQ(chosen(j)["format"], "f16");
  EXPECT_EQ(chosen(plan("toy:", "MTPLX_PAGED_KV_QUANT=q4"))["format"], "q4");
  const json pair = plan("-m toy: -ctk q8 -ctv q4");
  ASSERT_EQ(pair["formats"].size(), 1u);
  EXPECT_EQ(pair["formats"][0]["format"], "k=q8,v=q4");
  const json few = chosen(plan("toy: --no-dynamic --num-blocks 3"));
  EXPECT_EQ(few["max_tokens"], 48);
}

TEST_F(PlanCommand, PeopleGetATable) {
  const auto r = run("plan " + quoted_model("model-variants/gqa1_dim80.gguf"));
  EXPECT_EQ(r.code, 0) << r.err;
  for (const char* word : {"llama", "2 layers of 2 kv heads x 80", "memory for pages",
                           "bytes/token", "f16 *", "q4", "sequences of 512", "assumed: weights"})
    EXPECT_NE(r.out.find(word), std::string::npos) << word << '\n' << r.out;
  EXPECT_TRUE(r.err.empty()) << r.err;
  const auto windows = run("plan " + quoted_model("model-variants/gemma3.gguf"));
  EXPECT_NE(windows.out.find("window of 96"), std::string::npos) << windows.out;
  EXPECT_NE(windows.out.find("a window keep the pages of it"), std::string::npos) << windows.out;
}

TEST_F(PlanCommand, WhatCannotBeIsNamed) {
  const auto odd = file("odd.json", R"({"model_type": "llama", "num_hidden_layers": 1,
      "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 30, "vocab_size": 10,
      "intermediate_size": 8, "max_position_embeddings": 64})");
  const auto all = run("plan " + odd);
  EXPECT_EQ(all.code, 0) << all.err;
  EXPECT_NE(all.out.find("q6: head_dim 30"), std::string::npos) << all.out;
  const struct {
    std::string args;
    int code;
    const char* names;
  } cases[] = {{odd + " --kv-cache-dtype q6", 2, "head_dim 30"},
               {odd + " -c 65", 2, "65"},
               {odd + " --kv-cache-dtype q5", 2, "q5"},
               {odd + " --weight-bytes much", 2, "much"},
               {odd + " -c 64 --max-bytes 4KiB", 6, "-c 64"},
               {odd + " -c 64 --weight-bytes 4000000TiB", 6, "-c 64"},
               {file("moe.json", R"({"model_type": "mixtral"})"), 4, "mixtral"},
               {file("cut.gguf", "GGUF"), 4, "cut.gguf"},
               {"/nonexistent.gguf", 4, "nonexistent"}};
  for (const auto& c : cases) {
    const auto r = run("plan " + c.args);
    EXPECT_EQ(r.code, c.code) << c.args << r.err;
    EXPECT_NE(r.err.find(c.names), std::string::npos) << c.args << r.err;
  }
}

}  // namespace
}  // namespace pagedkv::apps
