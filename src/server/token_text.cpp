#include "server/token_text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "engine/text_stream.h"

namespace pagedkv {
namespace {

Json entry(const Tokenizer& tokenizer, int32_t id, double logprob) {
  const std::string bytes = tokenizer.piece(id, true);
  Json numbers = Json::array();
  for (const unsigned char b : bytes) numbers.push_back(b);
  return {{"token", token_text(bytes)},
          {"logprob", shown_logprob(logprob)},
          {"bytes", std::move(numbers)}};
}

int64_t num_characters(const std::string& bytes) {
  return std::ranges::count_if(bytes, [](char c) { return (c & 0xc0) != 0x80; });
}

}  // namespace

double shown_logprob(double logprob) {
  return logprob > kLeastLogprob ? logprob : kLeastLogprob;  // NaN too
}

std::string text_of(const Tokenizer& tokenizer, std::span<const int32_t> tokens) {
  std::string text;
  for (const int32_t token : tokens) text += tokenizer.piece(token, true);
  return text;
}

std::string token_text(const std::string& bytes) {
  if (valid_utf8(bytes) == bytes) return bytes;
  std::string out = "bytes:";
  for (const unsigned char b : bytes) {
    char text[8];
    std::snprintf(text, sizeof text, "\\x%02x", b);
    out += text;
  }
  return out;
}

Json chat_logprob(const Tokenizer& tokenizer, const AnsweredToken& token) {
  Json out = entry(tokenizer, token.id, token.logprob.value_or(NAN));
  Json top = Json::array();
  for (const TokenLogprob& each : token.top) top.push_back(entry(tokenizer, each.id, each.logprob));
  out["top_logprobs"] = std::move(top);
  return out;
}

Json completion_logprobs(const Tokenizer& tokenizer, const std::vector<AnsweredToken>& tokens,
                         int64_t& offset) {
  Json texts = Json::array(), logprobs = Json::array(), tops = Json::array(),
       offsets = Json::array();
  for (const AnsweredToken& token : tokens) {
    const std::string bytes = tokenizer.piece(token.id, true);
    texts.push_back(token_text(bytes));
    offsets.push_back(offset);
    offset += num_characters(bytes);
    if (!token.logprob) {
      logprobs.push_back(Json());
      tops.push_back(Json());
      continue;
    }
    logprobs.push_back(shown_logprob(*token.logprob));
    Json top = Json::object();
    for (const TokenLogprob& each : token.top)
      top[token_text(tokenizer.piece(each.id, true))] = shown_logprob(each.logprob);
    top[token_text(bytes)] = shown_logprob(*token.logprob);  // also where it is none of them
    tops.push_back(std::move(top));
  }
  return {{"tokens", std::move(texts)},
          {"token_logprobs", std::move(logprobs)},
          {"top_logprobs", std::move(tops)},
          {"text_offset", std::move(offsets)}};
}

std::vector<AnsweredToken> ShownTokens::take(const AnswerPart& part) {
  held_.insert(held_.end(), part.tokens.begin(), part.tokens.end());
  shown_bytes_ += part.text.size();
  const bool all = part.finished && part.reason != FinishReason::kStop;
  size_t count = 0;
  for (; count < held_.size() && (all || begin_ < shown_bytes_); ++count)
    begin_ += tokenizer_.piece(held_[count].id, false).size();
  std::vector<AnsweredToken> out(held_.begin(), held_.begin() + static_cast<ptrdiff_t>(count));
  held_.erase(held_.begin(), held_.begin() + static_cast<ptrdiff_t>(count));
  return out;
}

}  // namespace pagedkv
