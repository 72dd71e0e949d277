#include "pagedkv/base/page_format.h"

#include <cctype>
#include <stdexcept>

namespace pagedkv {

std::string_view page_format_name(PageFormat format) noexcept {
  switch (format) {
    case PageFormat::kF32:
      return "f32";
    case PageFormat::kF16:
      return "f16";
    case PageFormat::kQ8:
      return "q8";
  }
  return "unknown";
}

std::string page_format_names() { return "f32, f16, q8"; }

PageFormat parse_page_format(std::string_view word) {
  std::string w;
  for (char c : word)
    w += c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (w == "f32" || w == "float32" || w == "fp32") return PageFormat::kF32;
  if (w == "f16" || w == "float16" || w == "fp16" || w == "half" || w == "off" || w == "auto")
    return PageFormat::kF16;
  if (w == "q8" || w == "int8" || w == "q8_0") return PageFormat::kQ8;
  throw std::invalid_argument("page format \"" + std::string(word) + "\": exists are " +
                              page_format_names() + " (off and auto = f16)");
}

int64_t row_bytes(PageFormat format, int head_dim) noexcept {
  switch (format) {
    case PageFormat::kF32:
      return int64_t{4} * head_dim;
    case PageFormat::kF16:
      return int64_t{2} * head_dim;
    case PageFormat::kQ8:
      return head_dim;
  }
  return 0;
}

bool has_scales(PageFormat format) noexcept { return format == PageFormat::kQ8; }

void check_head_dim(PageFormat format, int head_dim) {
  if (head_dim < 1 || head_dim > 512)
    throw std::invalid_argument("head_dim " + std::to_string(head_dim) + " for " +
                                std::string(page_format_name(format)) +
                                " pages: must be in 1..512");
}

}  // namespace pagedkv
