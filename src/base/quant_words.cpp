#include "base/quant_words.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace pagedkv {
namespace {

struct Words {
  QuantWord meaning;
  std::array<std::string_view, 7> words;
};

constexpr std::array<Words, 4> kWords = {{
    {QuantWord::kOff, {"off", "", "none", "false", "0", "disabled", "disable"}},
    {QuantWord::kQ8, {"q8", "8", "8bit", "int8", "uint8", "q8_0", "q8"}},
    {QuantWord::kQ6, {"q6", "6", "6bit", "int6", "uint6", "q6_0", "q6"}},
    {QuantWord::kQ4, {"q4", "4", "4bit", "int4", "uint4", "q4_0", "q4"}},
}};

}  // namespace

std::string normalized_word(std::string_view word) {
  constexpr std::string_view kBlank = " \t\n\r\f\v";
  const size_t first = word.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  std::string out;
  for (char c : word.substr(first, word.find_last_not_of(kBlank) - first + 1))
    out += c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

QuantWord quant_word(std::string_view normalized) noexcept {
  for (const Words& w : kWords)
    if (std::find(w.words.begin(), w.words.end(), normalized) != w.words.end()) return w.meaning;
  return QuantWord::kUnknown;
}

}  // namespace pagedkv
