// A Hugging Face config.json: the shapes of a model before there is a GGUF file of it.
#pragma once

#include <string>

#include "models/model.h"

namespace pagedkv {

// What describe_ggml_model would say of the model's GGUF file, as far as config.json tells: weight_bytes is what the
// parameters take in its dtype, biases aside. Throws ModelError naming the file and the key that is missing or outside
// its limits, or the model_type that is not supported and those that are.
ModelInfo describe_hf_config(const std::string& path);

}  // namespace pagedkv
