#include "models/ggml/tokenizer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "models/model.h"

namespace pagedkv {

LlamaTokenizer::LlamaTokenizer(LlamaVocabModel model, std::string path)
    : model_(std::move(model)),
      vocab_(llama_model_get_vocab(model_.get())),
      path_(std::move(path)) {}

int32_t LlamaTokenizer::vocab_size() const noexcept { return llama_vocab_n_tokens(vocab_); }

std::vector<int32_t> LlamaTokenizer::tokenize(std::string_view text, bool add_special,
                                              bool parse_special) const {
  constexpr size_t kMostBytes = std::numeric_limits<int32_t>::max() - 2;
  if (text.size() > kMostBytes) {
    throw std::invalid_argument("text of " + std::to_string(text.size()) + " bytes: at most " +
                                std::to_string(kMostBytes) + " can be tokenized at once");
  }
  const auto length = static_cast<int32_t>(text.size());
  std::vector<int32_t> tokens(text.size() / 3 + 8);
  const auto run = [&] {
    try {
      return llama_tokenize(vocab_, text.data(), length, tokens.data(),
                            static_cast<int32_t>(tokens.size()), add_special, parse_special);
    } catch (const std::exception& error) {  // a vocabulary that lacks what its kind needs
      throw ModelError(path_ + ": the vocabulary cannot tokenize this text: " + error.what());
    }
  };
  int32_t count = run();
  if (count < 0 && count != std::numeric_limits<int32_t>::min()) {
    tokens.resize(static_cast<size_t>(-count));
    count = run();
  }
  if (count < 0)
    throw std::invalid_argument("text of " + std::to_string(length) + " bytes cannot be tokenized");
  tokens.resize(static_cast<size_t>(count));
  return tokens;
}

std::string LlamaTokenizer::piece(int32_t token, bool special) const {
  if (token < 0 || token >= vocab_size()) {
    throw std::invalid_argument("token " + std::to_string(token) + ": the vocabulary has " +
                                std::to_string(vocab_size()));
  }
  std::string out(32, '\0');
  const auto run = [&] {
    return llama_token_to_piece(vocab_, token, out.data(), static_cast<int32_t>(out.size()), 0,
                                special);
  };
  int32_t size = run();
  if (size < 0) {
    out.resize(static_cast<size_t>(-size));
    size = run();
  }
  out.resize(static_cast<size_t>(std::max(size, 0)));
  return out;
}

bool LlamaTokenizer::is_end_of_generation(int32_t token) const noexcept {
  return token >= 0 && token < vocab_size() && llama_vocab_is_eog(vocab_, token);
}

std::optional<int32_t> LlamaTokenizer::begin_token() const noexcept {
  if (!llama_vocab_get_add_bos(vocab_)) return std::nullopt;
  return llama_vocab_bos(vocab_);
}

}  // namespace pagedkv
