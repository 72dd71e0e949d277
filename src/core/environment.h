// Reading variables, with errors that name them.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pagedkv {

std::string trimmed_lower(std::string_view text);

// The variable's value; nothing where it is unset, empty or blank.
std::optional<std::string> environment_value(const char* name);

// read(value), its std::invalid_argument with "name=value: " before the text.
template <class Read>
auto read_variable(const char* name, const std::string& value, const Read& read)
    -> decltype(read(value)) {
  try {
    return read(value);
  } catch (const std::invalid_argument& error) {
    std::string text = name;
    text.append("=").append(value).append(": ").append(error.what());
    throw std::invalid_argument(text);
  }
}

// A decimal number as Python's int() takes it: blanks around it, a sign, underscores between digits.
std::optional<int64_t> parse_integer(std::string_view text);

}  // namespace pagedkv
