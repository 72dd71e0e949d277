#include "models/ggml/ggml_text.h"

#include <stdexcept>

#include "models/ggml/chat_template.h"
#include "models/ggml/tokenizer.h"

namespace pagedkv {

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  return std::make_unique<LlamaTokenizer>(load_llama_vocab_model(path), path);
}

std::unique_ptr<ChatTemplate> make_chat_template(const Tokenizer& tokenizer) {
  const auto* llama = dynamic_cast<const LlamaTokenizer*>(&tokenizer);
  if (!llama) {
    throw std::invalid_argument("make_chat_template: the tokenizer is not one of load_tokenizer's");
  }
  return make_jinja_template(llama->model(), llama->path());
}

}  // namespace pagedkv
