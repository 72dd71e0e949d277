// How a cache quantises its keys and values.
//
// Source: MTPLX 2.12.2 mtplx/kv_quant.py; docs/mtplx.md lists what differs.
#pragma once

#include <string>
#include <string_view>

#include "pagedkv/base/page_format.h"
#include "pagedkv/base/tensor.h"

namespace [[gnu::visibility("default")]] pagedkv {

enum class PagedKVQuantMode : uint8_t { kOff, kQ8, kQ6, kQ4 };

// "off", "q8", "q6", "q4".
std::string_view quant_mode_name(PagedKVQuantMode mode) noexcept;

// The format of pages in this mode, for rows of this dtype: off stores the dtype as it is.
PageFormat page_format(PagedKVQuantMode mode, DType dtype) noexcept;

// The mode that `word` names; trimmed, any case, "-" as "_":
//   off  (empty) off none false 0 disabled disable      q8   q8 8 8bit int8 uint8 q8_0
//   q6   q6 6 6bit int6 uint6 q6_0                      q4   q4 4 4bit int4 uint4 q4_0
// Throws std::invalid_argument naming the word and the modes.
PagedKVQuantMode parse_quant_mode(std::string_view word);

// The mode that the environment asks for: MTPLX_VLLM_METAL_PAGED_KV_QUANT where it is not blank, else
// MTPLX_PAGED_KV_QUANT, else off. Throws as parse_quant_mode, naming the variable too.
PagedKVQuantMode paged_kv_quant_mode_from_env();

// Immutable. K and V may differ.
class PagedKVQuantConfig {
 public:
  constexpr PagedKVQuantConfig() noexcept = default;  // off
  constexpr explicit PagedKVQuantConfig(PagedKVQuantMode mode) noexcept
      : keys_(mode), values_(mode) {}
  constexpr PagedKVQuantConfig(PagedKVQuantMode keys, PagedKVQuantMode values) noexcept
      : keys_(keys), values_(values) {}
  // A word of parse_quant_mode(), or "k=WORD,v=WORD".
  explicit PagedKVQuantConfig(std::string_view mode);

  constexpr PagedKVQuantMode keys() const noexcept { return keys_; }
  constexpr PagedKVQuantMode values() const noexcept { return values_; }
  constexpr bool enabled() const noexcept {
    return keys_ != PagedKVQuantMode::kOff || values_ != PagedKVQuantMode::kOff;
  }
  std::string mode() const;  // "q8", or "k=q8,v=q4" where they differ
  friend constexpr bool operator==(const PagedKVQuantConfig&,
                                   const PagedKVQuantConfig&) noexcept = default;

 private:
  PagedKVQuantMode keys_ = PagedKVQuantMode::kOff;
  PagedKVQuantMode values_ = PagedKVQuantMode::kOff;
};

}  // namespace pagedkv
