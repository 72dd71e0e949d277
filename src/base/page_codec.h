// One type for each page format: how a row of head_dim elements is stored and read back. A new format is one more
// type here and one more line in with_page_format(); reference kernels need nothing else, SIMD kernels a reader
// and a writer of the same name.
//
//   store_row(x, n, row, scale)  stores n floats as one row; false, with nothing written, where the format cannot
//                                hold them. Needs the default floating-point environment (nearest, denormals on).
//   load(row, e)                 element e as float, without its scale
//   lane(e)                      the place of element e in storage order, as attention adds them up
//   num_lanes(n)                 the places of a row of n elements, a multiple of 16; what no element takes counts as 0
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

struct F32Page {
  static constexpr PageFormat kFormat = PageFormat::kF32;
  static constexpr bool kHasScales = false;
  static constexpr int kElementBits = 32;
  static constexpr int lane(int e) noexcept { return e; }
  static constexpr int num_lanes(int n) noexcept { return (n + 15) / 16 * 16; }

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

struct F16Page {
  static constexpr PageFormat kFormat = PageFormat::kF16;
  static constexpr bool kHasScales = false;
  static constexpr int kElementBits = 16;
  static constexpr int lane(int e) noexcept { return e; }
  static constexpr int num_lanes(int n) noexcept { return (n + 15) / 16 * 16; }

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

struct Q8Page {
  static constexpr PageFormat kFormat = PageFormat::kQ8;
  static constexpr bool kHasScales = true;
  static constexpr int kElementBits = 8;
  static constexpr float kMaxCode = 127.0f;
  static constexpr float kMinScale = 1e-6f;
  static constexpr int lane(int e) noexcept { return e; }
  static constexpr int num_lanes(int n) noexcept { return (n + 15) / 16 * 16; }

  static float load(const std::byte* row, int e) noexcept {
    return static_cast<float>(static_cast<int8_t>(row[e]));
  }
  static bool store_row(const float* x, int n, std::byte* row, float* scale) noexcept {
    float amax = 0.0f;
    for (int e = 0; e < n; ++e) {
      if (!std::isfinite(x[e])) return false;
      amax = std::max(amax, std::fabs(x[e]));
    }
    const float s = std::max(amax / kMaxCode, kMinScale);
    for (int e = 0; e < n; ++e) {
      const float code = std::clamp(std::nearbyint(x[e] / s), -kMaxCode, kMaxCode);
      row[e] = static_cast<std::byte>(static_cast<int8_t>(code));
    }
    *scale = s;
    return true;
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
    case PageFormat::kQ8:
      return f(Q8Page{});
  }
  throw std::invalid_argument("page format " + std::to_string(static_cast<int>(format)) +
                              ": unknown");
}

}  // namespace pagedkv
