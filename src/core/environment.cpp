#include "core/environment.h"

#include <cctype>
#include <charconv>
#include <cstdlib>

namespace pagedkv {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\n\r\f\v";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

}  // namespace

std::string trimmed_lower(std::string_view text) {
  std::string out;
  for (char c : trimmed(text))
    out += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

std::optional<std::string> environment_value(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || trimmed(value).empty()) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_integer(std::string_view text) {
  text = trimmed(text);
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  std::string digits;
  char before = '_';
  for (char c : text) {
    if (c == '_' && !std::isdigit(static_cast<unsigned char>(before))) return std::nullopt;
    if (c != '_') digits += c;
    before = c;
  }
  if (before == '_') return std::nullopt;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

}  // namespace pagedkv
