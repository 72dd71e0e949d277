// A config.json tells the shapes that the model's GGUF file would have, or what is wrong with it.
#include "models/ggml/hf_config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "models/ggml/test_models.h"

namespace pagedkv::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The shapes of model-variants/gqa3_dim64.gguf.
json llama() {
  return {{"model_type", "llama"},    {"num_hidden_layers", 2},
          {"num_attention_heads", 9}, {"num_key_value_heads", 3},
          {"hidden_size", 576},       {"intermediate_size", 96},
          {"vocab_size", 288},        {"max_position_embeddings", 512},
          {"torch_dtype", "float32"}};
}
json changed(json config, const json& change) {
  config.merge_patch(change);  // null removes a key
  return config;
}
json gemma() {
  return changed(llama(), {{"model_type", "gemma3_text"},
                           {"num_hidden_layers", 7},
                           {"num_attention_heads", 4},
                           {"num_key_value_heads", 1},
                           {"head_dim", 32},
                           {"hidden_size", 64},
                           {"sliding_window", 96}});
}

class HfConfig : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("pagedkv_config_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& text) const {
    const std::string path = (folder_ / "config.json").string();
    std::ofstream(path) << text;
    return path;
  }
  ModelInfo describe(const json& config) const { return describe_hf_config(write(config.dump())); }
  // (window, layers) of each group.
  std::vector<std::pair<int, size_t>> groups(const json& config) const {
    std::vector<std::pair<int, size_t>> out;
    for (const auto& g : describe(config).groups)
      out.emplace_back(g.sliding_window, g.layers.size());
    return out;
  }
  std::string error(const std::string& text) const {
    const std::string path = write(text);
    try {
      describe_hf_config(path);
    } catch (const ModelError& e) {
      EXPECT_EQ(std::string(e.what()).find(path + ": "), 0u) << e.what();
      return e.what();
    }
    return "no error";
  }

  fs::path folder_;
};

using Groups = std::vector<std::pair<int, size_t>>;

TEST_F(HfConfig, SaysWhatTheGgufFileOfTheModelSays) {
  const std::pair<const char*, json> cases[] = {
      {"gqa3_dim64", llama()},
      {"gemma3", gemma()},
      {"gemma3_period",
       changed(gemma(), {{"num_hidden_layers", 5}, {"sliding_window_pattern", 3}})},
      {"gemma3_pattern",
       changed(gemma(), {{"num_hidden_layers", 5},
                         {"layer_types",
                          {"sliding_attention", "full_attention", "full_attention",
                           "sliding_attention", "sliding_attention"}}})},
      {"qwen3", changed(llama(), {{"model_type", "qwen3"},
                                  {"num_attention_heads", 4},
                                  {"num_key_value_heads", 2},
                                  {"head_dim", 40},
                                  {"hidden_size", 64},
                                  {"tie_word_embeddings", true}})},
      {"window", changed(llama(), {{"model_type", "mistral"},
                                   {"num_attention_heads", 4},
                                   {"num_key_value_heads", 2},
                                   {"hidden_size", 64},
                                   {"sliding_window", 100}})},
  };
  for (const auto& [name, config] : cases) {
    const ModelInfo want =
        describe_ggml_model(model_path("model-variants/" + std::string(name) + ".gguf"));
    const ModelInfo info = describe(config);
    expect_same_shape(info, want, std::string(name));
    ASSERT_EQ(info.groups.size(), want.groups.size()) << name;
    for (size_t g = 0; g < want.groups.size(); ++g) {
      ASSERT_EQ(info.groups[g].layers.size(), want.groups[g].layers.size()) << name;
      const LayerSpec &a = info.groups[g].layers[0], &b = want.groups[g].layers[0];
      EXPECT_EQ(a.num_kv_heads, b.num_kv_heads) << name;
      EXPECT_EQ(a.key_head_dim, b.key_head_dim) << name;
      EXPECT_EQ(a.value_head_dim, b.value_head_dim) << name;
    }
  }
}

TEST_F(HfConfig, WindowsAreThoseOfTheType) {
  const json qwen = changed(llama(), {{"model_type", "qwen2"}, {"num_hidden_layers", 4}});
  const json window = {{"sliding_window", 100}, {"max_window_layers", 3}};
  EXPECT_EQ(groups(changed(llama(), window)), (Groups{{0, 2}}));
  EXPECT_EQ(groups(changed(qwen, window)), (Groups{{0, 4}}));
  const json on = changed(changed(qwen, window), {{"use_sliding_window", true}});
  EXPECT_EQ(groups(on), (Groups{{0, 3}, {100, 1}}));
  EXPECT_EQ(groups(changed(on, {{"max_window_layers", 0}})), (Groups{{100, 4}}));
  EXPECT_EQ(groups(changed(on, {{"max_window_layers", nullptr}})), (Groups{{0, 4}}));
  json null = on;
  null["sliding_window"] = nullptr;
  EXPECT_EQ(groups(null), (Groups{{0, 4}}));
}

// As google/gemma-3-4b-it has it: what is left out is transformers' default.
TEST_F(HfConfig, AGemmaFileMayLeaveOutAlmostAll) {
  const ModelInfo info = describe({{"model_type", "gemma3"},
                                   {"torch_dtype", "bfloat16"},
                                   {"text_config",
                                    {{"model_type", "gemma3_text"},
                                     {"hidden_size", 2560},
                                     {"intermediate_size", 10240},
                                     {"num_hidden_layers", 34},
                                     {"sliding_window", 1024}}}});
  EXPECT_EQ(info.context_length, 131072);
  EXPECT_EQ(info.num_q_heads, 8);
  ASSERT_EQ(info.groups.size(), 2u);
  EXPECT_EQ(info.groups[0].layers.size(), 5u);
  EXPECT_EQ(info.groups[1].layers.size(), 29u);
  EXPECT_EQ(info.groups[1].sliding_window, 1024);
  EXPECT_EQ(info.groups[0].layers[0].num_kv_heads, 4);
  EXPECT_EQ(info.groups[0].layers[0].key_head_dim, 256);
  EXPECT_NEAR(static_cast<double>(info.num_params), 3.88e9, 0.01e9);
  EXPECT_EQ(info.weight_bytes, 2 * info.num_params);
}

TEST_F(HfConfig, ErrorsNameTheKeyOrTheTypeAndWhatIsSupported) {
  const std::pair<json, std::vector<const char*>> cases[] = {
      {{{"num_hidden_layers", nullptr}}, {"num_hidden_layers is missing"}},
      {{{"num_attention_heads", nullptr}}, {"num_attention_heads is missing"}},
      {{{"num_key_value_heads", nullptr}}, {"num_key_value_heads is missing"}},
      {{{"max_position_embeddings", nullptr}}, {"max_position_embeddings is missing"}},
      {{{"hidden_size", nullptr}}, {"hidden_size is missing"}},
      {{{"hidden_size", 577}}, {"head_dim is missing", "577", "9"}},
      {{{"num_hidden_layers", 1025}}, {"num_hidden_layers is 1025", "1..1024"}},
      {{{"num_hidden_layers", "2"}}, {"num_hidden_layers is \"2\"", "integer"}},
      {{{"num_hidden_layers", 2.5}}, {"num_hidden_layers is 2.5"}},
      {{{"vocab_size", 18446744073709551615u}}, {"vocab_size is 18446744073709551615"}},
      {{{"num_key_value_heads", 2}}, {"num_attention_heads is 9", "num_key_value_heads, 2"}},
      {{{"head_dim", 513}}, {"head_dim is 513", "1..512"}},
      {{{"model_type", nullptr}}, {"model_type is missing", "llama", "gemma3"}},
      {{{"model_type", "mixtral"}}, {"model_type mixtral", "llama, mistral, qwen2, qwen3"}},
      {{{"model_type", "gemma3"}}, {"text_config is missing"}},
      {{{"model_type", "mistral"}, {"sliding_window", -1}}, {"sliding_window is -1"}},
      {{{"model_type", "qwen3"}, {"use_sliding_window", 1}}, {"use_sliding_window is 1"}},
      {{{"model_type", "mistral"}, {"sliding_window", 9}, {"layer_types", {"full_attention"}}},
       {"layer_types", "2"}},
      {{{"model_type", "mistral"},
        {"sliding_window", 9},
        {"layer_types", {"full_attention", "linear_attention"}}},
       {"layer_types has \"linear_attention\""}},
  };
  for (const auto& [change, words] : cases) {
    const std::string text = error(changed(llama(), change).dump());
    for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
  }
  for (const char* text : {"", "[]", "{", "7", "{\"model_type\": \"llama\"", "\xff\xfe"})
    EXPECT_NE(error(text).find("JSON object"), std::string::npos) << text;
  EXPECT_NE(error(std::string(100000, '[')).find("nested 100000 deep"), std::string::npos);
  EXPECT_THROW(describe_hf_config((folder_ / "none.json").string()), ModelError);
  EXPECT_THROW(describe_hf_config(folder_.string()), ModelError);
}

}  // namespace
}  // namespace pagedkv::test
