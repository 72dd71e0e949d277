// Where the test models are, and what the tests of ggml models share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ggml.h"
#include "gguf.h"
#include "models/ggml/ggml_model.h"

namespace pagedkv::test {

// A file of the folder that PAGEDKV_TEST_MODELS names. Throws std::runtime_error saying how to make it where it is
// missing: a test without its model fails.
std::string model_path(const std::string& name);

// Names of the variants that tools/make_model_variants.py wrote, twins left out.
std::vector<std::string> model_variants();

// Writes the file `source` with other metadata or tensors to `target`. `change` gets the metadata to be written and
// the source's tensors.
void rewrite_gguf(const std::string& source, const std::string& target,
                  const std::function<void(gguf_context* meta, ggml_context* tensors)>& change);

// Tokens in [0, 256) that depend on `seed` alone.
std::vector<int32_t> random_tokens(int count, uint64_t seed);

struct RunOptions {
  int chunk = 512;
  int page_size = 16;
  PageFormat key_format = PageFormat::kF32, value_format = PageFormat::kF32;
  uint64_t shuffle_seed = 0;
};

// That two descriptions are of models of one shape; `name` is for messages.
void expect_same_shape(const ModelInfo& got, const ModelInfo& want, const std::string& name);

// Page pool for a model.
PagePoolOptions pool_options(const ModelInfo& info, const RunOptions& options);

// Logits [tokens, vocab] of every position, the tokens fed in chunks.
std::vector<float> all_logits(Model& model, std::span<const int32_t> tokens,
                              const RunOptions& options = {});

std::unique_ptr<Model> load(const std::string& path, int num_threads = 1,
                            ExactMode exact = ExactMode::kAuto);

}  // namespace pagedkv::test
