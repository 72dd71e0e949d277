// Runs a model file in process and records everything it says, for comparison with ==.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/kv_settings.h"
#include "models/ggml/ggml_model.h"

namespace pagedkv::testing {

// Where scripts/test.sh put the test models; throws when PAGEDKV_TEST_MODELS is not set.
std::string model_file(const std::string& name);

// About 4.5 bytes of English a token: the licence, from byte `offset` on, over and over.
std::string english(size_t offset, size_t bytes);

struct RunConfig {
  int num_threads = 2;
  int prefill_chunk = 512;
  KvSettings kv;
  int max_new_tokens = 16;
  bool prompt_logprobs = true;
};

struct Generation {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs;         // of `tokens`
  std::vector<double> prompt_logprobs;  // of prompt tokens 1..
  std::string error;
  bool operator==(const Generation&) const = default;
};

// Greedy text after `prompt`, going on after end-of-generation tokens.
Generation generate(Model& model, const std::vector<int32_t>& prompt, const RunConfig& config);

}  // namespace pagedkv::testing
