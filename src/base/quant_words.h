// The words for quantisation that users of the seed know; page formats and quantisation modes share them.
#pragma once

#include <string>
#include <string_view>

namespace pagedkv {

enum class QuantWord { kUnknown, kOff, kQ8, kQ6, kQ4 };

// Trimmed, lower case, "-" as "_".
std::string normalized_word(std::string_view word);

// Of a normalised word.
QuantWord quant_word(std::string_view normalized) noexcept;

}  // namespace pagedkv
