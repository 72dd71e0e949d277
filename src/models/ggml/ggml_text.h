// Text for GGUF models, by libllama: its tokenizer, its jinja chat templates, its samplers.
//
// Tokenizer and chat template may be used from any number of threads, a sampler from one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "models/text.h"

namespace pagedkv {

struct GgmlText {
  std::unique_ptr<Tokenizer> tokenizer;
  // Of the file; ChatML where it has none. What it renders is to be tokenized with add_special and
  // parse_special. A template that cannot be understood is a ModelError at the first render.
  std::unique_ptr<ChatTemplate> chat_template;
};

// Reads vocabulary and template of a GGUF file, not its weights. Throws ModelError when the file cannot be
// read or its vocabulary is damaged or of a kind that is not supported.
GgmlText load_ggml_text(const std::string& path);

// Applies repetition penalty, top-k, top-p, min-p and temperature in this order, then draws by `seed`. With
// temperature 0 it takes the largest logit after the penalty, on a tie the lowest token. Throws
// std::invalid_argument naming the option that is outside its limits.
std::unique_ptr<Sampler> make_ggml_sampler(const SamplerOptions& options, int32_t vocab_size);

}  // namespace pagedkv
