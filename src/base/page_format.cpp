#include "pagedkv/base/page_format.h"

#include <stdexcept>

#include "base/quant_words.h"

namespace pagedkv {

std::string_view page_format_name(PageFormat format) noexcept {
  switch (format) {
    case PageFormat::kF32:
      return "f32";
    case PageFormat::kF16:
      return "f16";
    case PageFormat::kBF16:
      return "bf16";
    case PageFormat::kQ8:
      return "q8";
    case PageFormat::kQ6:
      return "q6";
    case PageFormat::kQ4:
      return "q4";
  }
  return "unknown";
}

std::string page_format_names() { return "f32, f16, bf16, q8, q6, q4"; }

PageFormat parse_page_format(std::string_view word) {
  const std::string w = normalized_word(word);
  if (w == "f32" || w == "float32" || w == "fp32") return PageFormat::kF32;
  if (w == "f16" || w == "float16" || w == "fp16" || w == "half" || w == "auto")
    return PageFormat::kF16;
  if (w == "bf16" || w == "bfloat16") return PageFormat::kBF16;
  switch (w.empty() ? QuantWord::kUnknown : quant_word(w)) {
    case QuantWord::kOff:
      return PageFormat::kF16;
    case QuantWord::kQ8:
      return PageFormat::kQ8;
    case QuantWord::kQ6:
      return PageFormat::kQ6;
    case QuantWord::kQ4:
      return PageFormat::kQ4;
    case QuantWord::kUnknown:
      break;
  }
  throw std::invalid_argument("page format \"" + std::string(word) + "\": exists are " +
                              page_format_names() + " (off and auto = f16)");
}

int64_t row_bytes(PageFormat format, int head_dim) noexcept {
  switch (format) {
    case PageFormat::kF32:
      return int64_t{4} * head_dim;
    case PageFormat::kF16:
    case PageFormat::kBF16:
      return int64_t{2} * head_dim;
    case PageFormat::kQ8:
      return head_dim;
    case PageFormat::kQ6:
      return int64_t{3} * head_dim / 4;
    case PageFormat::kQ4:
      return head_dim / 2;
  }
  return 0;
}

bool has_scales(PageFormat format) noexcept {
  return format == PageFormat::kQ8 || format == PageFormat::kQ6 || format == PageFormat::kQ4;
}

void check_head_dim(PageFormat format, int head_dim) {
  const char* rule = nullptr;
  if (head_dim < 1 || head_dim > 512)
    rule = "in 1..512";
  else if (format == PageFormat::kQ6 && head_dim % 4 != 0)
    rule = "a multiple of 4";
  else if (format == PageFormat::kQ4 && head_dim % 2 != 0)
    rule = "even";
  if (rule)
    throw std::invalid_argument("head_dim " + std::to_string(head_dim) + " for " +
                                std::string(page_format_name(format)) + " pages: must be " + rule);
}

}  // namespace pagedkv
