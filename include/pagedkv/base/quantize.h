// Symmetric quantisation of rows, as pages store them: q8 and q4 are the seed's, bit for bit; q6 is
// ours. Every row of head_dim elements has codes and one float32 scale (page_format.h says how).
//
//   bits 8   one int8 code a byte, -127..127
//   bits 6   codes -31..31 stored + 32, four codes in three little-endian bytes: element 4 i + j is
//            bits [6 j, 6 j + 6) of byte triple i
//   bits 4   codes -7..7 stored + 8, two a byte: the even element in the low nibble
//
// bits other than these, and a head_dim that does not fit them (bits 4: even, bits 6: a multiple of
// 4), are std::invalid_argument naming the value.
//
// Source: MTPLX 2.12.2 mtplx/kv_quant.py, quantize_symmetric and dequantize_symmetric.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace [[gnu::visibility("default")]] pagedkv {

// Bytes of a row's codes: head_dim, 3/4 of it, half of it.
int packed_dim(int head_dim, int bits);

// Bytes of K and V in f16 over those of their codes and scales: 4 D / (2 packed_dim + 8).
double compression_ratio(int head_dim, int bits);

// x [rows, head_dim] -> codes [rows, packed_dim], scales [rows]. Sizes must agree, else
// std::invalid_argument; so is a row with an infinity or a NaN. On error nothing is written.
void quantize_symmetric(std::span<const float> x, int head_dim, int bits,
                        std::span<std::byte> codes, std::span<float> scales);

// The way back: x = code * scale, one rounding.
void dequantize_symmetric(std::span<const std::byte> codes, std::span<const float> scales,
                          int head_dim, int bits, std::span<float> x);

// Codes as integers (-127..127, -31..31, -7..7) to their packed bytes and back; one row or many, so
// that codes.size() * bits / 8 == packed.size(). pack_codes throws std::invalid_argument for a code
// outside its range.
void pack_codes(std::span<const int8_t> codes, int bits, std::span<std::byte> packed);
void unpack_codes(std::span<const std::byte> packed, int bits, std::span<int8_t> codes);

}  // namespace pagedkv
