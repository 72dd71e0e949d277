#include "models/ggml/ggml_text.h"

#include "models/ggml/chat_template.h"
#include "models/ggml/tokenizer.h"

namespace pagedkv {

GgmlText load_ggml_text(const std::string& path) {
  const LlamaVocabModel model = load_llama_vocab_model(path);
  return {std::make_unique<LlamaTokenizer>(model), make_jinja_template(model, path)};
}

}  // namespace pagedkv
