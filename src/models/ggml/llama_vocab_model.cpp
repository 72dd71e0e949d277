#include "models/ggml/llama_vocab_model.h"

#include <exception>
#include <string_view>
#include <unordered_set>

#include "models/ggml/ggml_log.h"
#include "models/ggml/gguf_file.h"
#include "models/model.h"

namespace pagedkv {
namespace {

// libllama asserts that no two tokens have the same text.
void check_tokens(const GgufFile& file) {
  const auto tokens = file.text_array("tokenizer.ggml.tokens");
  if (tokens.empty())
    file.fail("tokenizer.ggml.tokens is missing or empty, so text cannot be read");
  std::unordered_set<std::string_view> seen;
  seen.reserve(tokens.size());
  for (const char* token : tokens) {
    if (*token != '\0' && !seen.insert(token).second) {
      file.fail(std::string("tokenizer.ggml.tokens holds \"") + token + "\" twice");
    }
  }
}

void check_vocabulary(const GgufFile& file) {
  const auto model = file.text("tokenizer.ggml.model");
  if (!model) file.fail("tokenizer.ggml.model is missing, so text cannot be read");
  if (*model != "gpt2" && *model != "llama") {
    file.fail("tokenizer.ggml.model is " + *model +
              "; supported: gpt2 (byte-level BPE), llama (SentencePiece)");
  }
  check_tokens(file);
}

// Needed tokens that are absent abort at the first text instead of at the load.
void check_special_tokens(const GgufFile& file, const llama_vocab* vocab) {
  if (llama_vocab_get_add_bos(vocab) && llama_vocab_bos(vocab) == LLAMA_TOKEN_NULL) {
    file.fail("tokenizer.ggml.add_bos_token asks for a token that the vocabulary does not have");
  }
  if (llama_vocab_get_add_eos(vocab) && llama_vocab_eos(vocab) == LLAMA_TOKEN_NULL) {
    file.fail("tokenizer.ggml.add_eos_token asks for a token that the vocabulary does not have");
  }
}

}  // namespace

LlamaVocabModel load_llama_vocab_model(const std::string& path) {
  const GgufFile file(path);
  check_vocabulary(file);
  const LogCapture log;
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  llama_model* model = nullptr;
  try {
    model = llama_model_load_from_file(path.c_str(), params);
  } catch (const std::exception& error) {
    file.fail(std::string("its vocabulary cannot be read: ") + error.what());
  }
  if (!model) file.fail("its vocabulary cannot be read: " + log.text());
  LlamaVocabModel out(model, FreeLlamaModel());
  check_special_tokens(file, llama_model_get_vocab(model));
  return out;
}

}  // namespace pagedkv
