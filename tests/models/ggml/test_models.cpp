#include "models/ggml/test_models.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>

namespace pagedkv::test {
namespace fs = std::filesystem;
namespace {

fs::path models_folder() {
  const char* folder = std::getenv("PAGEDKV_TEST_MODELS");
  if (!folder || !*folder)
    throw std::runtime_error(
        "PAGEDKV_TEST_MODELS is not set: run scripts/test.sh, which makes the test models");
  return folder;
}

}  // namespace

std::string model_path(const std::string& name) {
  const fs::path path = models_folder() / name;
  if (!fs::exists(path)) {
    throw std::runtime_error(
        path.string() +
        " is missing: run scripts/test.sh, which makes the test models with tools/make_*.py");
  }
  return path.string();
}

std::vector<std::string> model_variants() {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(model_path("model-variants"))) {
    const fs::path name = entry.path().filename();
    if (name.extension() == ".gguf" && name.stem().extension() != ".twin")
      out.push_back(name.stem().string());
  }
  std::ranges::sort(out);
  return out;
}

void rewrite_gguf(const std::string& source, const std::string& target,
                  const std::function<void(gguf_context* meta, ggml_context* tensors)>& change) {
  ggml_context* tensors = nullptr;
  gguf_context* old = gguf_init_from_file(source.c_str(), {/*no_alloc=*/false, &tensors});
  if (!old) throw std::runtime_error("cannot read " + source);
  gguf_context* meta = gguf_init_empty();
  gguf_set_kv(meta, old);
  for (int64_t i = 0; i < gguf_get_n_tensors(old); ++i) {
    gguf_add_tensor(meta, ggml_get_tensor(tensors, gguf_get_tensor_name(old, i)));
  }
  change(meta, tensors);
  const bool written = gguf_write_to_file(meta, target.c_str(), false);
  gguf_free(meta);
  gguf_free(old);
  ggml_free(tensors);
  if (!written) throw std::runtime_error("cannot write " + target);
}

std::vector<int32_t> random_tokens(int count, uint64_t seed) {
  std::vector<int32_t> out;
  for (int i = 0; i < count; ++i) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;  // Knuth's MMIX generator
    out.push_back(static_cast<int32_t>(seed >> 56));
  }
  return out;
}

PagePoolOptions pool_options(const ModelInfo& info, const RunOptions& options) {
  PagePoolOptions out;
  out.groups = info.groups;
  for (auto& group : out.groups) {
    for (auto& layer : group.layers) {
      layer.key_format = options.key_format;
      layer.value_format = options.value_format;
    }
  }
  out.page_size = options.page_size;
  out.num_pages = 16;
  out.max_bytes = int64_t{256} << 20;
  out.shuffle_seed = options.shuffle_seed;
  return out;
}

void expect_same_shape(const ModelInfo& got, const ModelInfo& want, const std::string& name) {
  EXPECT_EQ(got.family, want.family) << name;
  EXPECT_EQ(got.vocab_size, want.vocab_size) << name;
  EXPECT_EQ(got.context_length, want.context_length) << name;
  EXPECT_EQ(got.num_layers, want.num_layers) << name;
  EXPECT_EQ(got.num_q_heads, want.num_q_heads) << name;
  EXPECT_EQ(got.num_params, want.num_params) << name;
  EXPECT_EQ(got.weight_bytes, want.weight_bytes) << name;
  EXPECT_EQ(got.step_bytes, want.step_bytes) << name;
  ASSERT_EQ(got.groups.size(), want.groups.size()) << name;
  for (size_t g = 0; g < want.groups.size(); ++g) {
    EXPECT_EQ(got.groups[g].sliding_window, want.groups[g].sliding_window) << name;
    EXPECT_EQ(got.groups[g].layers.size(), want.groups[g].layers.size()) << name;
  }
}

std::vector<float> all_logits(Model& model, std::span<const int32_t> tokens,
                              const RunOptions& options) {
  PagePool pool(pool_options(model.info(), options));
  BlockTable table(pool);
  std::vector<float> out;
  while (!tokens.empty()) {
    const auto chunk =
        tokens.first(std::min<size_t>(static_cast<size_t>(options.chunk), tokens.size()));
    table.append(static_cast<int64_t>(chunk.size()));
    StepBatch batch;
    batch.sequences.push_back({&table, chunk, static_cast<int32_t>(chunk.size())});
    const auto logits = model.step(batch, pool);
    out.insert(out.end(), logits.begin(), logits.end());
    tokens = tokens.subspan(chunk.size());
  }
  return out;
}

std::unique_ptr<Model> load(const std::string& path, int num_threads, ExactMode exact) {
  GgmlModelOptions options;
  options.num_threads = num_threads;
  options.exact = exact;
  return load_ggml_model(path, options);
}

}  // namespace pagedkv::test
