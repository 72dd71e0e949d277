// Text for GGUF models, by libllama: its tokenizer, its jinja chat templates, its samplers.
//
// Tokenizer and chat template may be used from any number of threads, a sampler from one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "models/text.h"

namespace pagedkv {

// The vocabulary of a GGUF file, whose weights are not read. Throws ModelError when the file cannot be read or its
// vocabulary is damaged or of a kind that is not supported.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

// The chat template of the file that `tokenizer` was loaded from; ChatML where the file has none. What it renders is
// to be tokenized with add_special and parse_special. A template that cannot be understood is a ModelError at the
// first render, so that the file can still be used without one. Throws std::invalid_argument when `tokenizer` is
// not one of load_tokenizer's, which need not outlive the template.
std::unique_ptr<ChatTemplate> make_chat_template(const Tokenizer& tokenizer);

// Applies logit bias, repetition, presence and frequency penalty, top-k, top-p, min-p and temperature in this order, then draws by `seed`. With
// temperature 0 it takes the largest logit after the penalty, on a tie the lowest token. Throws
// std::invalid_argument naming the option that is outside its limits.
std::unique_ptr<Sampler> make_sampler(const SamplerOptions& options, int32_t vocab_size);

}  // namespace pagedkv
