#include "apps/attention_case.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <stdexcept>

namespace pagedkv::apps {
namespace {

// The whole of `text` as a number, else nothing.
template <class T>
std::optional<T> number(std::string_view text) {
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size()) return {};
  return value;
}

// The text before and after the first separator; without one, `text` twice.
std::pair<std::string_view, std::string_view> split(std::string_view text, char separator) {
  const size_t at = text.find(separator);
  if (at == text.npos) return {text, text};
  return {text.substr(0, at), text.substr(at + 1)};
}

struct Word {
  std::string_view text, name, value;

  [[noreturn]] void refuse(const char* why) const {
    throw std::invalid_argument("case: " + std::string(text) + ": " + why);
  }
  template <class T>
  T as_number(std::string_view part, T least) const {
    const auto x = number<T>(part);
    if (!x || !(*x >= least)) refuse("not a number that fits");
    return *x;
  }
  int as_int(int least) const { return as_number<int>(value, least); }
};

// "4096:512", "64*512:1"; a test's third number, the content, does not matter to the time.
void append_sequences(const Word& word, std::string_view text, std::vector<SequenceLength>& out) {
  int count = 1;
  if (text.find('*') != text.npos) {
    const auto [times, one] = split(text, '*');
    count = word.as_number(times, 1);
    text = one;
  }
  const auto [held, rest] = split(text, ':');
  const SequenceLength s{word.as_number(held, 1), word.as_number(split(rest, ':').first, 1)};
  if (s.query_len > s.seq_len) word.refuse("more new tokens than tokens");
  out.insert(out.end(), count, s);
}

}  // namespace

std::optional<Heads> parse_heads(std::string_view text) {
  const auto [query_text, kv_text] = split(text, '/');
  const int query = number<int>(query_text).value_or(0), kv = number<int>(kv_text).value_or(0);
  if (query < 1 || kv < 1 || query % kv != 0) return {};
  return Heads{query, kv};
}

AttentionCase AttentionCase::parse(const std::string& words) {
  AttentionCase c;
  std::istringstream in(words);
  for (std::string text; in >> text;) {
    const auto [name, value] = split(text, '=');
    const Word word{text, name, value};
    if (name.size() == text.size()) word.refuse("has no =");
    if (word.name == "keys")
      c.key_format = parse_page_format(word.value);
    else if (word.name == "values")
      c.value_format = parse_page_format(word.value);
    else if (word.name == "heads") {
      const auto heads = parse_heads(word.value);
      if (!heads) word.refuse("write query/kv heads, query a multiple of kv, as in 32/8");
      c.heads = *heads;
    } else if (word.name == "dims") {
      const auto [key, value] = split(word.value, '/');
      c.key_dim = word.as_number(key, 1);
      c.value_dim = word.as_number(value, 1);
    } else if (word.name == "page")
      c.page_size = word.as_int(1);
    else if (word.name == "window")
      c.window = word.as_int(0);
    else if (word.name == "softcap")
      c.softcap = word.as_number<float>(word.value, 0);
    else if (word.name == "sinks")
      c.sinks = word.as_int(0) != 0;
    else if (word.name == "shared")
      c.shared = word.as_int(0);
    else if (word.name == "copied")
      c.copied = word.as_int(0) != 0;
    else if (word.name == "seqs") {
      std::istringstream parts{std::string(word.value)};
      for (std::string part; std::getline(parts, part, ',');)
        append_sequences(word, part, c.sequences);
    } else if (word.name == "mask" || word.name == "bias") {
      if (word.as_int(0) != 0) word.refuse("is not timed");
    } else if (word.name == "causal") {
      if (word.as_int(0) == 0) word.refuse("is not timed");
    } else if (word.name != "amplitude")
      word.refuse("unknown");
  }
  if (c.sequences.empty()) throw std::invalid_argument("case: \"" + words + "\" has no seqs=");
  c.check_shared();
  return c;
}

void AttentionCase::check_shared() const {
  const std::string name = "shared=" + std::to_string(shared) + ": ";
  if (shared % page_size != 0)
    throw std::invalid_argument(name + "must be whole pages of " + std::to_string(page_size) +
                                " tokens");
  for (const SequenceLength& s : sequences)
    if (shared > s.seq_len - s.query_len)
      throw std::invalid_argument(name + "a sequence of " + std::to_string(s.seq_len) +
                                  " tokens, " + std::to_string(s.query_len) + " of them new, has " +
                                  std::to_string(s.seq_len - s.query_len) + " to share");
}

int64_t AttentionCase::num_queries() const {
  int64_t n = 0;
  for (const SequenceLength& s : sequences) n += s.query_len;
  return n;
}

int64_t AttentionCase::tokens_held() const {
  int64_t n = 0;
  for (const SequenceLength& s : sequences) n += s.seq_len;
  return n;
}

int64_t AttentionCase::tokens_stored() const {
  const auto others = static_cast<int64_t>(sequences.size()) - 1;
  return tokens_held() - (copied ? 0 : others * shared);
}

int64_t AttentionCase::visible_tokens() const {
  int64_t n = 0;
  for (const SequenceLength& s : sequences)
    for (int seen = s.seq_len - s.query_len + 1; seen <= s.seq_len; ++seen)
      n += window > 0 ? std::min(window, seen) : seen;
  return n;
}

double AttentionCase::flops() const {
  return 2.0 * (key_dim + value_dim) * heads.query * static_cast<double>(visible_tokens());
}

}  // namespace pagedkv::apps
