// The formats in which a page stores its elements.
//   f32, f16   IEEE 754, round to nearest even
//   q8         int8 codes in -127..127, one float32 scale for each (token, kv head):
//              scale = max(amax / 127, 1e-6), code = round half to even (x / scale), value = code * scale
//              Source: MTPLX kv_quant.quantize_symmetric, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pagedkv {

enum class PageFormat : uint8_t { kF32, kF16, kQ8 };

// "f32", "f16", "q8".
std::string_view page_format_name(PageFormat format) noexcept;

// The format that `word` names: the names above and their familiar spellings (any case, "-" as "_"):
// float32, fp32, float16, fp16, half, off and auto (= f16), int8, q8_0. Throws std::invalid_argument, naming
// the word and the formats that exist.
PageFormat parse_page_format(std::string_view word);

// All names, comma separated, for help texts and errors.
std::string page_format_names();

// Bytes of one row: head_dim elements of one token and kv head, without its scale.
int64_t row_bytes(PageFormat format, int head_dim) noexcept;

// Whether a row carries one float32 scale beside its codes.
bool has_scales(PageFormat format) noexcept;

// Throws std::invalid_argument, naming head_dim and the format, when rows of this size cannot be
// stored: head_dim outside 1..512.
void check_head_dim(PageFormat format, int head_dim);

}  // namespace pagedkv
