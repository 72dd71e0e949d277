// What a model's header says of it, in the engine's terms, whether the header is a GGUF file's or a config.json's.
#pragma once

#include <cstdint>
#include <string>

#include "models/ggml/family.h"
#include "models/ggml/hyperparameters.h"
#include "models/model.h"

namespace pagedkv {

// All but what needs the weights: name, weight_bytes and whether the model is exact. `weight_types` is for people.
ModelInfo describe(const Family& family, const Hyperparameters& hp, int64_t num_params,
                   const std::string& weight_types, int max_step_tokens);

}  // namespace pagedkv
