#include "pagedkv/core/kv_quant.h"

#include <stdexcept>

#include "base/quant_words.h"
#include "core/environment.h"

namespace pagedkv {
namespace {

// "k=WORD,v=WORD" in this order: WORD of one side, or nothing where the text has another form.
std::string_view side(std::string_view text, size_t index) {
  const size_t comma = text.find(',');
  if (comma == std::string_view::npos) return {};
  const std::string_view part = index == 0 ? text.substr(0, comma) : text.substr(comma + 1);
  const std::string_view prefix = index == 0 ? "k=" : "v=";
  return part.substr(0, 2) == prefix ? part.substr(2) : std::string_view();
}

}  // namespace

std::string_view quant_mode_name(PagedKVQuantMode mode) noexcept {
  switch (mode) {
    case PagedKVQuantMode::kOff:
      return "off";
    case PagedKVQuantMode::kQ8:
      return "q8";
    case PagedKVQuantMode::kQ6:
      return "q6";
    case PagedKVQuantMode::kQ4:
      return "q4";
  }
  return "unknown";
}

PageFormat page_format(PagedKVQuantMode mode, DType dtype) noexcept {
  switch (mode) {
    case PagedKVQuantMode::kQ8:
      return PageFormat::kQ8;
    case PagedKVQuantMode::kQ6:
      return PageFormat::kQ6;
    case PagedKVQuantMode::kQ4:
      return PageFormat::kQ4;
    case PagedKVQuantMode::kOff:
      break;
  }
  switch (dtype) {
    case DType::kF16:
      return PageFormat::kF16;
    case DType::kBF16:
      return PageFormat::kBF16;
    case DType::kF32:
      break;
  }
  return PageFormat::kF32;
}

PagedKVQuantMode parse_quant_mode(std::string_view word) {
  switch (quant_word(normalized_word(word))) {
    case QuantWord::kOff:
      return PagedKVQuantMode::kOff;
    case QuantWord::kQ8:
      return PagedKVQuantMode::kQ8;
    case QuantWord::kQ6:
      return PagedKVQuantMode::kQ6;
    case QuantWord::kQ4:
      return PagedKVQuantMode::kQ4;
    case QuantWord::kUnknown:
      break;
  }
  throw std::invalid_argument("paged KV quantization \"" + std::string(word) +
                              "\": must be off, q8, q6 or q4");
}

PagedKVQuantMode paged_kv_quant_mode_from_env() {
  for (const char* name : {"MTPLX_VLLM_METAL_PAGED_KV_QUANT", "MTPLX_PAGED_KV_QUANT"})
    if (const auto value = environment_value(name))
      return read_variable(name, *value, [](const std::string& v) { return parse_quant_mode(v); });
  return PagedKVQuantMode::kOff;
}

PagedKVQuantConfig::PagedKVQuantConfig(std::string_view mode) {
  if (mode.find('=') == std::string_view::npos) {
    keys_ = values_ = parse_quant_mode(mode);
    return;
  }
  const std::string_view keys = side(mode, 0), values = side(mode, 1);
  if (keys.empty() || values.empty())
    throw std::invalid_argument("paged KV quantization \"" + std::string(mode) +
                                "\": must be one mode, or k=MODE,v=MODE");
  keys_ = parse_quant_mode(keys);
  values_ = parse_quant_mode(values);
}

std::string PagedKVQuantConfig::mode() const {
  const std::string keys(quant_mode_name(keys_));
  if (keys_ == values_) return keys;
  return "k=" + keys + ",v=" + std::string(quant_mode_name(values_));
}

}  // namespace pagedkv
