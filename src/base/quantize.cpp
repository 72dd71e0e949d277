#include "pagedkv/base/quantize.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "base/float_environment.h"
#include "base/page_codec.h"

namespace pagedkv {
namespace {

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("quantize: " + text);
}

template <class F>
decltype(auto) with_bits(int bits, F&& f) {
  switch (bits) {
    case 8:
      return f(Q8Page{});
    case 6:
      return f(Q6Page{});
    case 4:
      return f(Q4Page{});
    default:
      fail("bits " + std::to_string(bits) + ": must be 8, 6 or 4");
  }
}

void check_size(const char* name, size_t size, size_t expected) {
  if (size != expected)
    fail(std::string(name) + " has " + std::to_string(size) + " elements: must have " +
         std::to_string(expected));
}

// What holds `packed` bytes for `count` codes: a whole number of bytes for each few codes.
void check_packed(int bits, size_t count, size_t packed) {
  const size_t together = bits == 8 ? 1 : bits == 6 ? 4 : 2;
  if (count % together != 0)
    fail(std::to_string(count) + " codes of " + std::to_string(bits) +
         " bits: must be a multiple of " + std::to_string(together));
  check_size("packed", packed, count / 8 * bits + count % 8 * bits / 8);
}

}  // namespace

int packed_dim(int head_dim, int bits) {
  return with_bits(bits, [&](auto format) {
    using Format = decltype(format);
    check_head_dim(Format::kFormat, head_dim);
    return static_cast<int>(row_bytes(Format::kFormat, head_dim));
  });
}

double compression_ratio(int head_dim, int bits) {
  return 4.0 * head_dim / (2.0 * packed_dim(head_dim, bits) + 8.0);
}

void quantize_symmetric(std::span<const float> x, int head_dim, int bits,
                        std::span<std::byte> codes, std::span<float> scales) {
  const auto packed = static_cast<size_t>(packed_dim(head_dim, bits));
  const auto dim = static_cast<size_t>(head_dim);
  check_size("x", x.size(), scales.size() * dim);
  check_size("codes", codes.size(), scales.size() * packed);
  for (size_t i = 0; i < x.size(); ++i)
    if (!std::isfinite(x[i]))
      fail("row " + std::to_string(i / dim) + ", element " + std::to_string(i % dim) + " is " +
           std::to_string(x[i]) + ": must be finite");
  const FloatEnvironment environment;
  with_bits(bits, [&](auto format) {
    for (size_t r = 0; r < scales.size(); ++r)
      decltype(format)::store_row(&x[r * dim], head_dim, &codes[r * packed], &scales[r]);
  });
}

void dequantize_symmetric(std::span<const std::byte> codes, std::span<const float> scales,
                          int head_dim, int bits, std::span<float> x) {
  const auto packed = static_cast<size_t>(packed_dim(head_dim, bits));
  const auto dim = static_cast<size_t>(head_dim);
  check_size("x", x.size(), scales.size() * dim);
  check_size("codes", codes.size(), scales.size() * packed);
  const FloatEnvironment environment;
  with_bits(bits, [&](auto format) {
    for (size_t r = 0; r < scales.size(); ++r)
      for (int e = 0; e < head_dim; ++e)
        x[r * dim + e] = decltype(format)::load(&codes[r * packed], e) * scales[r];
  });
}

void pack_codes(std::span<const int8_t> codes, int bits, std::span<std::byte> packed) {
  with_bits(bits, [&](auto format) {
    using Format = decltype(format);
    check_packed(bits, codes.size(), packed.size());
    for (size_t i = 0; i < codes.size(); ++i)
      if (std::abs(codes[i]) > Format::kMaxCode)
        fail("code " + std::to_string(codes[i]) + " at " + std::to_string(i) + ": must be in " +
             std::to_string(-Format::kMaxCode) + ".." + std::to_string(Format::kMaxCode));
    constexpr size_t kRun = 512;  // whole bytes
    for (size_t i = 0; i < codes.size(); i += kRun)
      Format::store_codes(&packed[i * bits / 8], static_cast<int>(std::min(kRun, codes.size() - i)),
                          [&](int e) { return int{codes[i + e]}; });
  });
}

void unpack_codes(std::span<const std::byte> packed, int bits, std::span<int8_t> codes) {
  with_bits(bits, [&](auto format) {
    using Format = decltype(format);
    check_packed(bits, codes.size(), packed.size());
    constexpr size_t kRun = 512;  // whole bytes
    for (size_t i = 0; i < codes.size(); ++i)
      codes[i] = static_cast<int8_t>(Format::load_code(packed.data() + i / kRun * kRun * bits / 8,
                                                       static_cast<int>(i % kRun)));
  });
}

}  // namespace pagedkv
