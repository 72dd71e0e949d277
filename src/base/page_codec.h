// One type for each page format: how a row of head_dim elements is stored and read back. A new format is one more
// type here and one more line in with_page_format(); reference kernels need nothing else, SIMD kernels a reader
// and a writer of the same name.
//
//   store_row(x, n, row, scale)  stores n floats as one row; false, with nothing written, where the format cannot
//                                hold them. Needs the default floating-point environment (nearest, denormals on).
//   load(row, e)                 element e as float, without its scale
//   lane(e)                      the place of element e in storage order, as attention adds them up
//   num_lanes(n)                 the places of a row of n elements, a multiple of 16; what no element takes counts as 0
//
// Storage order: kGroups elements side by side lie in the same bytes, so a row goes in chunks of 16 * kGroups elements,
// and element kGroups * j + v of a chunk is lane j of the chunk's vector v.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/half.h"
#include "pagedkv/base/page_format.h"

namespace pagedkv {

template <int kGroupCount>
struct StorageOrder {
  static constexpr int kGroups = kGroupCount;
  static constexpr int kChunk = 16 * kGroups;
  static constexpr int lane(int e) noexcept {
    return e / kChunk * kChunk + e % kGroups * 16 + e % kChunk / kGroups;
  }
  static constexpr int num_lanes(int n) noexcept { return (n + kChunk - 1) / kChunk * kChunk; }
};

struct F32Page : StorageOrder<1> {
  static constexpr PageFormat kFormat = PageFormat::kF32;
  static constexpr bool kHasScales = false;
  static constexpr int kElementBits = 32;

  static float load(const std::byte* row, int e) noexcept {
    float value;
    std::memcpy(&value, row + 4 * e, 4);
    return value;
  }
  static bool store_row(const float* x, int n, std::byte* row, float*) noexcept {
    std::memcpy(row, x, static_cast<size_t>(n) * 4);
    return true;
  }
};

struct F16Page : StorageOrder<1> {
  static constexpr PageFormat kFormat = PageFormat::kF16;
  static constexpr bool kHasScales = false;
  static constexpr int kElementBits = 16;

  static float load(const std::byte* row, int e) noexcept {
    uint16_t half;
    std::memcpy(&half, row + 2 * e, 2);
    return half_to_float(half);
  }
  static bool store_row(const float* x, int n, std::byte* row, float*) noexcept {
    for (int e = 0; e < n; ++e) {
      const uint16_t half = float_to_half(x[e]);
      std::memcpy(row + 2 * e, &half, 2);
    }
    return true;
  }
};

struct BF16Page : StorageOrder<1> {
  static constexpr PageFormat kFormat = PageFormat::kBF16;
  static constexpr bool kHasScales = false;
  static constexpr int kElementBits = 16;

  static float load(const std::byte* row, int e) noexcept {
    uint16_t upper;
    std::memcpy(&upper, row + 2 * e, 2);
    return bfloat16_to_float(upper);
  }
  static bool store_row(const float* x, int n, std::byte* row, float*) noexcept {
    for (int e = 0; e < n; ++e) {
      const uint16_t upper = float_to_bfloat16(x[e]);
      std::memcpy(row + 2 * e, &upper, 2);
    }
    return true;
  }
};

// What q8, q6 and q4 share: integer codes -kMax..kMax and one scale a row. Codes derives from it and packs them:
// load_code(row, e), and store_codes(row, n, code), where code(e) gives the code of element e.
template <class Codes, int kMax>
struct ScaledCodes {
  static constexpr bool kHasScales = true;
  static constexpr int kMaxCode = kMax;
  static constexpr float kMinScale = 1e-6f;

  static float load(const std::byte* row, int e) noexcept {
    return static_cast<float>(Codes::load_code(row, e));
  }
  static bool store_row(const float* x, int n, std::byte* row, float* scale) noexcept {
    float amax = 0.0f;
    for (int e = 0; e < n; ++e) {
      if (!std::isfinite(x[e])) return false;
      amax = std::max(amax, std::fabs(x[e]));
    }
    const float s = std::max(amax / kMax, kMinScale);
    Codes::store_codes(row, n, [&](int e) {
      return static_cast<int>(std::clamp(std::nearbyint(x[e] / s), -float{kMax}, float{kMax}));
    });
    *scale = s;
    return true;
  }
};

struct Q8Page : StorageOrder<1>, ScaledCodes<Q8Page, 127> {
  static constexpr PageFormat kFormat = PageFormat::kQ8;
  static constexpr int kElementBits = 8;

  static int load_code(const std::byte* row, int e) noexcept { return static_cast<int8_t>(row[e]); }
  template <class Code>
  static void store_codes(std::byte* row, int n, const Code& code) noexcept {
    for (int e = 0; e < n; ++e) row[e] = static_cast<std::byte>(code(e));
  }
};

// Four codes, stored + 32, in three little-endian bytes: element 4 i + j has bits [6 j, 6 j + 6) of triple i.
struct Q6Page : StorageOrder<4>, ScaledCodes<Q6Page, 31> {
  static constexpr PageFormat kFormat = PageFormat::kQ6;
  static constexpr int kElementBits = 6;
  static constexpr int kBias = 32;

  static int load_code(const std::byte* row, int e) noexcept {
    const int bit = e % 4 * 6;
    const std::byte* at = row + e / 4 * 3 + bit / 8;
    unsigned bits = std::to_integer<unsigned>(at[0]);
    if (bit % 8 > 2) bits |= std::to_integer<unsigned>(at[1]) << 8;
    return static_cast<int>(bits >> bit % 8 & 63) - kBias;
  }
  template <class Code>
  static void store_codes(std::byte* row, int n, const Code& code) noexcept {
    for (int e = 0; e < n; e += 4, row += 3) {
      const unsigned bits = static_cast<unsigned>(code(e) + kBias) |
                            static_cast<unsigned>(code(e + 1) + kBias) << 6 |
                            static_cast<unsigned>(code(e + 2) + kBias) << 12 |
                            static_cast<unsigned>(code(e + 3) + kBias) << 18;
      for (int b = 0; b < 3; ++b) row[b] = static_cast<std::byte>(bits >> 8 * b & 0xff);
    }
  }
};

// Two codes, stored + 8, in a byte: the even element in the low nibble.
struct Q4Page : StorageOrder<2>, ScaledCodes<Q4Page, 7> {
  static constexpr PageFormat kFormat = PageFormat::kQ4;
  static constexpr int kElementBits = 4;
  static constexpr int kBias = 8;

  static int load_code(const std::byte* row, int e) noexcept {
    return std::to_integer<int>(row[e / 2] >> e % 2 * 4 & std::byte{15}) - kBias;
  }
  template <class Code>
  static void store_codes(std::byte* row, int n, const Code& code) noexcept {
    for (int e = 0; e < n; e += 2)
      row[e / 2] = static_cast<std::byte>((code(e) + kBias) | (code(e + 1) + kBias) << 4);
  }
};

// Calls f with a value of the format's type and returns what it returns.
template <class F>
decltype(auto) with_page_format(PageFormat format, F&& f) {
  switch (format) {
    case PageFormat::kF32:
      return f(F32Page{});
    case PageFormat::kF16:
      return f(F16Page{});
    case PageFormat::kBF16:
      return f(BF16Page{});
    case PageFormat::kQ8:
      return f(Q8Page{});
    case PageFormat::kQ6:
      return f(Q6Page{});
    case PageFormat::kQ4:
      return f(Q4Page{});
  }
  throw std::invalid_argument("page format " + std::to_string(static_cast<int>(format)) +
                              ": unknown");
}

}  // namespace pagedkv
