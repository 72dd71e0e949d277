// The formats in which a page stores its elements.
//   f32, f16   IEEE 754, round to nearest even
//   bf16       the upper half of an f32, round to nearest even
//   q8 q6 q4   integer codes in -127..127, -31..31, -7..7, one float32 scale for each (token, kv head):
//              scale = max(amax / largest code, 1e-6), code = round half to even (x / scale),
//              value = code * scale. A row with an infinity or a NaN cannot be stored.
//              Source of q8 and q4: MTPLX kv_quant.quantize_symmetric, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] pagedkv {

enum class PageFormat : uint8_t { kF32, kF16, kBF16, kQ8, kQ6, kQ4 };

// "f32", "f16", "bf16", "q8", "q6", "q4".
std::string_view page_format_name(PageFormat format) noexcept;

// The format that `word` names: the names above and their familiar spellings (any case, "-" as "_"):
// float32, fp32, float16, fp16, half, off and auto (= f16), bfloat16, int8, q8_0, int6, q6_0, int4, q4_0.
// Throws std::invalid_argument, naming the word and the formats that exist.
PageFormat parse_page_format(std::string_view word);

// All names, comma separated, for help texts and errors.
std::string page_format_names();

// Bytes of one row: head_dim elements of one token and kv head, without its scale.
int64_t row_bytes(PageFormat format, int head_dim) noexcept;

// Whether a row carries one float32 scale beside its codes.
bool has_scales(PageFormat format) noexcept;

// Throws std::invalid_argument, naming head_dim, the format and the rule, when rows of this size cannot
// be stored: head_dim must be in 1..512, for q4 even, for q6 a multiple of 4.
void check_head_dim(PageFormat format, int head_dim);

}  // namespace pagedkv
