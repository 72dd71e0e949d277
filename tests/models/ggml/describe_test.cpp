// What a header alone says, beside what the loaded model says and takes.
#include <gtest/gtest.h>

#include "models/ggml/step_graph.h"
#include "models/ggml/test_models.h"

namespace pagedkv::test {
namespace {

TEST(Describe, AHeaderSaysWhatTheLoadedModelSays) {
  for (const std::string& name : model_variants()) {
    const std::string path = model_path("model-variants/" + name + ".gguf");
    const ModelInfo header = describe_ggml_model(path);
    const ModelInfo loaded = load(path)->info();
    EXPECT_EQ(header.name, loaded.name) << name;
    EXPECT_EQ(header.description, loaded.description) << name;
    expect_same_shape(header, loaded, name);
  }
}

TEST(Describe, AHeaderIsReadWithoutMappingTheFile) {
  const std::string path = model_path("model-variants/gqa3_dim64.gguf");
  const GgufFile header(path, GgufFile::Contents::kHeader);
  ASSERT_FALSE(header.tensors().empty());
  for (const ggml_tensor* t : header.tensors()) EXPECT_EQ(t->data, nullptr) << t->name;
  const GgufFile all(path);
  EXPECT_EQ(header.tensor_bytes(), all.tensor_bytes());
  for (const ggml_tensor* t : all.tensors()) EXPECT_NE(t->data, nullptr) << t->name;
}

// ggml's allocator has the last word. Of the longest steps, which are what is planned for: real models, whose
// feed-forward is widest, are met within a tenth; tiny ones, where attention is, take up to half of the estimate less.
TEST(Describe, TheBufferOfAStepIsEstimatedFromAbove) {
  std::vector<std::string> names{"SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf"};
  for (const std::string& name : model_variants())
    names.push_back("model-variants/" + name + ".gguf");
  for (const std::string& name : names) {
    const GgufFile file(model_path(name));
    const Family& family = find_family(file);
    const Hyperparameters hp = read_hyperparameters(file, family);
    const Weights weights = bind_weights(file, family, hp);
    PagedAttention attention(hp, 1);
    StepGraphs graphs(hp, weights, attention, 1, false);
    for (const int rows : {512}) {
      const StepGraph& graph = graphs.get(rows, 1);
      const auto bytes = static_cast<double>(graph.buffer_bytes);
      const auto estimate = static_cast<double>(step_buffer_bytes(hp, rows));
      EXPECT_GE(estimate, 0.97 * bytes) << name << ' ' << rows;
      EXPECT_LE(estimate, (name.starts_with("model-variants") ? 2.0 : 1.1) * bytes)
          << name << ' ' << rows;
    }
  }
}

}  // namespace
}  // namespace pagedkv::test
