// A GGUF file as libllama sees it without its weights: vocabulary and chat template.
#pragma once

#include <memory>
#include <string>

#include "llama.h"

namespace pagedkv {

struct FreeLlamaModel {
  void operator()(llama_model* model) const noexcept { llama_model_free(model); }
};

// Never make a llama_context from it: libllama would, and run without weights.
using LlamaVocabModel = std::shared_ptr<llama_model>;

// Throws ModelError. What libllama answers with an abort is found and refused before.
LlamaVocabModel load_llama_vocab_model(const std::string& path);

}  // namespace pagedkv
