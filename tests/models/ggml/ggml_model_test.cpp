// What a model says of itself and refuses in a step.
#include "models/ggml/ggml_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "models/ggml/test_models.h"

namespace pagedkv::test {
namespace {

TEST(GgmlModel, DescribesItself) {
  const auto model = load(model_path("model-variants/gqa3_dim64.gguf"));
  const ModelInfo& info = model->info();
  EXPECT_EQ(info.family, "llama");
  EXPECT_EQ(info.name, "gqa3_dim64");
  EXPECT_EQ(info.vocab_size, 288);
  EXPECT_EQ(info.context_length, 512);
  EXPECT_EQ(info.num_layers, 2);
  EXPECT_EQ(info.num_q_heads, 9);
  EXPECT_EQ(info.weight_bytes, 4 * info.num_params);
  EXPECT_NE(info.description.find("f32"), std::string::npos) << info.description;
  ASSERT_EQ(info.groups.size(), 1u);
  ASSERT_EQ(info.groups[0].layers.size(), 2u);
  EXPECT_EQ(info.groups[0].layers[1].num_kv_heads, 3);
  EXPECT_EQ(info.groups[0].layers[1].key_head_dim, 64);
  EXPECT_NE(info.arithmetic_id.find("ggml"), std::string::npos);
}

TEST(GgmlModel, KeepsKeyAndValueHeadsApart) {
  const auto model = load(model_path("model-variants/short_values.gguf"));
  EXPECT_EQ(model->info().groups[0].layers[0].key_head_dim, 32);
  EXPECT_EQ(model->info().groups[0].layers[0].value_head_dim, 16);
}

TEST(GgmlModel, TellsProgressUpToTheEnd) {
  GgmlModelOptions options;
  float last = 0;
  options.progress = [&](float done) {
    EXPECT_GT(done, last);
    last = done;
  };
  load_ggml_model(model_path("model-variants/gqa3_dim64.gguf"), options);
  EXPECT_EQ(last, 1.0f);
}

TEST(GgmlModel, RefusesOptionsOutsideTheirLimits) {
  const std::string path = model_path("model-variants/untied.gguf");
  EXPECT_THROW(load_ggml_model(path, {.num_threads = 0}), std::invalid_argument);
  EXPECT_THROW(load_ggml_model(path, {.num_threads = 513}), std::invalid_argument);
  EXPECT_THROW(load_ggml_model(path, {.max_step_tokens = 0}), std::invalid_argument);
}

class GgmlModelStep : public testing::Test {
 protected:
  void expect_refused(std::span<const int32_t> tokens, int32_t num_outputs, const char* text) {
    StepBatch batch;
    batch.sequences.push_back({&table, tokens, num_outputs});
    try {
      model->step(batch, pool);
      ADD_FAILURE() << "not refused: " << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }

  std::unique_ptr<Model> model = load(model_path("model-variants/untied.gguf"));
  PagePool pool{pool_options(model->info(), {})};
  BlockTable table{pool};
};

TEST_F(GgmlModelStep, RefusesWhatTheBatchCannotMean) {
  table.append(2);
  expect_refused(std::vector<int32_t>{1, 288}, 1, "288");
  expect_refused(std::vector<int32_t>{1, -1}, 1, "-1");
  expect_refused(std::vector<int32_t>{1, 2, 3}, 1, "3 new tokens in a sequence of 2");
  expect_refused(std::vector<int32_t>{}, 0, "0 new tokens");
  expect_refused(std::vector<int32_t>{1, 2}, 3, "3 outputs of 2");
  expect_refused(std::vector<int32_t>{1, 2}, -1, "-1 outputs");
  table.append(600);
  expect_refused(std::vector<int32_t>(513, 1), 1, "512");
}

TEST_F(GgmlModelStep, RefusesAPoolOfAnotherModel) {
  const auto other = load(model_path("model-variants/gqa3_dim64.gguf"));
  PagePool wrong(pool_options(other->info(), {}));
  BlockTable wrong_table(wrong);
  wrong_table.append(1);
  const std::vector<int32_t> tokens = {1};
  StepBatch batch;
  batch.sequences.push_back({&wrong_table, tokens, 1});
  EXPECT_THROW(model->step(batch, wrong), std::invalid_argument);
}

TEST_F(GgmlModelStep, GivesNothingForAnEmptyBatch) { EXPECT_TRUE(model->step({}, pool).empty()); }

// Hundreds of sizes: graphs are dropped and built again.
TEST_F(GgmlModelStep, KeepsItsResultsWhenGraphsAreDropped) {
  const auto tokens = random_tokens(40, 3);
  const auto expected = all_logits(*model, tokens);
  for (int chunk = 1; chunk <= 40; ++chunk)
    EXPECT_TRUE(all_logits(*model, tokens, {.chunk = chunk}) == expected) << chunk;
}

// A model whose token 5 gives keys that are not finite.
class PoisonedModel : public testing::Test {
 protected:
  static std::string write() {
    const auto path =
        std::filesystem::temp_directory_path() / ("pagedkv_poisoned_" + std::to_string(getpid()));
    rewrite_gguf(model_path("model-variants/untied.gguf"), path.string(),
                 [](gguf_context*, ggml_context* tensors) {
                   ggml_tensor* embedding = ggml_get_tensor(tensors, "token_embd.weight");
                   static_cast<float*>(embedding->data)[5 * embedding->ne[0]] = NAN;
                 });
    return path.string();
  }
  void TearDown() override { std::filesystem::remove(path); }

  std::span<const float> feed(BlockTable& table, PagePool& pool,
                              const std::vector<int32_t>& tokens) {
    table.append(static_cast<int64_t>(tokens.size()));
    StepBatch batch;
    batch.sequences.push_back({&table, tokens, 1});
    return model->step(batch, pool);
  }

  std::string path = write();
  std::unique_ptr<Model> model = load(path, 2);
};

TEST_F(PoisonedModel, FailsTheStepWhereAKeyCannotBeStoredAndRunsOn) {
  RunOptions q8;
  q8.key_format = q8.value_format = PageFormat::kQ8;
  PagePool pool(pool_options(model->info(), q8));
  BlockTable table(pool);
  const auto before = feed(table, pool, {1, 2, 3});
  const std::vector<float> expected(before.begin(), before.end());
  table.trim_to(0);
  try {
    feed(table, pool, {1, 2, 5, 3});
    ADD_FAILURE() << "stored";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("layer"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("q8"), std::string::npos) << error.what();
  }
  table.trim_to(0);
  const auto after = feed(table, pool, {1, 2, 3});
  EXPECT_TRUE(std::equal(after.begin(), after.end(), expected.begin(), expected.end()));
}

TEST_F(PoisonedModel, GivesLogitsThatNoSamplerTakes) {
  PagePool pool(pool_options(model->info(), {}));
  BlockTable table(pool);
  const auto logits = feed(table, pool, {1, 5});
  EXPECT_THROW(make_sampler({}, model->info().vocab_size)->sample(logits), std::runtime_error);
}

}  // namespace
}  // namespace pagedkv::test
