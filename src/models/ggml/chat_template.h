// Chat templates in jinja, by llama-common. Thread-safe.
#pragma once

#include <string>

#include "models/ggml/llama_vocab_model.h"
#include "models/text.h"

namespace pagedkv {

// `path` is for messages. Parsed at the first render, so that a file whose template is broken can
// still be used without one.
std::unique_ptr<ChatTemplate> make_jinja_template(LlamaVocabModel model, std::string path);

}  // namespace pagedkv
