// Tokenizer over libllama's vocabulary. Thread-safe: libllama only reads.
#pragma once

#include "models/ggml/llama_vocab_model.h"
#include "models/text.h"

namespace pagedkv {

class LlamaTokenizer final : public Tokenizer {
 public:
  LlamaTokenizer(LlamaVocabModel model, std::string path);
  int32_t vocab_size() const noexcept override;
  std::vector<int32_t> tokenize(std::string_view text, bool add_special,
                                bool parse_special) const override;
  std::string piece(int32_t token, bool special) const override;
  bool is_end_of_generation(int32_t token) const noexcept override;
  std::optional<int32_t> begin_token() const noexcept override;

  const LlamaVocabModel& model() const noexcept { return model_; }
  const std::string& path() const noexcept { return path_; }

 private:
  LlamaVocabModel model_;
  const llama_vocab* vocab_;
  std::string path_;
};

}  // namespace pagedkv
