#include "pagedkv/base/quantize.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace pagedkv {
namespace {

std::vector<float> wave(int count) {
  std::vector<float> x(count);
  for (int i = 0; i < count; ++i) x[i] = std::sin(0.7f * static_cast<float>(i * i % 101));
  return x;
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Quantize, ReadsBackWithinHalfAStep) {
  for (int bits : {8, 6, 4}) {
    const int dim = 52, rows = 3, packed = packed_dim(dim, bits);
    const std::vector<float> x = wave(rows * dim);
    std::vector<std::byte> codes(rows * packed);
    std::vector<float> scales(rows), back(x.size());
    quantize_symmetric(x, dim, bits, codes, scales);
    dequantize_symmetric(codes, scales, dim, bits, back);
    for (size_t i = 0; i < x.size(); ++i)
      EXPECT_LE(std::fabs(back[i] - x[i]), scales[i / dim] / 2 * 1.001f) << bits << ' ' << i;
  }
}

TEST(Quantize, ReadsWhatWasNeverWrittenAsMinusZeroWhereCodesAreBiased) {
  const std::vector<std::byte> zeros(12);
  const std::vector<float> scale(1);
  for (auto [bits, dim] : {std::pair{8, 12}, {6, 16}, {4, 24}}) {
    std::vector<float> x(dim, 1.0f);
    dequantize_symmetric(zeros, scale, dim, bits, x);
    for (float v : x) {
      EXPECT_EQ(v, 0.0f);
      EXPECT_EQ(std::signbit(v), bits != 8);
    }
  }
}

TEST(Quantize, TheCallersRoundingChangesNothing) {
  const std::vector<float> x = wave(64 * 50);
  for (int bits : {8, 6, 4}) {
    std::vector<std::byte> codes(50 * packed_dim(64, bits)), rounded_up = codes;
    std::vector<float> scales(50), scales_up(50), back(x.size()), back_up(x.size());
    quantize_symmetric(x, 64, bits, codes, scales);
    dequantize_symmetric(codes, scales, 64, bits, back);
    std::fesetround(FE_UPWARD);
    quantize_symmetric(x, 64, bits, rounded_up, scales_up);
    dequantize_symmetric(codes, scales, 64, bits, back_up);
    EXPECT_EQ(std::fegetround(), FE_UPWARD);
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(codes, rounded_up);
    EXPECT_EQ(scales, scales_up);
    EXPECT_EQ(back, back_up);
  }
}

TEST(Quantize, KnowsSizes) {
  EXPECT_EQ(packed_dim(64, 8), 64);
  EXPECT_EQ(packed_dim(64, 6), 48);
  EXPECT_EQ(packed_dim(64, 4), 32);
  EXPECT_DOUBLE_EQ(compression_ratio(128, 8), 512.0 / 264);
  EXPECT_DOUBLE_EQ(compression_ratio(128, 6), 512.0 / 200);
  EXPECT_DOUBLE_EQ(compression_ratio(128, 4), 512.0 / 136);
}

TEST(Quantize, NamesWhatDoesNotFit) {
  EXPECT_NE(error_of([] { packed_dim(64, 5); }).find("bits 5"), std::string::npos);
  EXPECT_NE(error_of([] { packed_dim(63, 4); }).find("head_dim 63"), std::string::npos);
  EXPECT_NE(error_of([] { packed_dim(62, 6); }).find("head_dim 62"), std::string::npos);
  EXPECT_NE(error_of([] { packed_dim(0, 8); }).find("head_dim 0"), std::string::npos);
  std::vector<float> x(8), scales(2), short_x(7);
  std::vector<std::byte> codes(8), short_codes(7);
  EXPECT_NE(error_of([&] { quantize_symmetric(short_x, 4, 8, codes, scales); }).find("x has 7"),
            std::string::npos);
  EXPECT_NE(error_of([&] { quantize_symmetric(x, 4, 8, short_codes, scales); }).find("codes has 7"),
            std::string::npos);
  EXPECT_NE(error_of([&] { dequantize_symmetric(codes, scales, 4, 8, short_x); }).find("x has 7"),
            std::string::npos);
}

TEST(Quantize, RefusesWhatIsNotFiniteAndWritesNothing) {
  for (int bits : {8, 6, 4})
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      std::vector<float> x = wave(16), scales(2, -1.0f);
      x[13] = bad;
      std::vector<std::byte> codes(2 * packed_dim(8, bits), std::byte{0xa5});
      const std::string error = error_of([&] { quantize_symmetric(x, 8, bits, codes, scales); });
      EXPECT_NE(error.find("row 1, element 5"), std::string::npos) << error;
      EXPECT_EQ(scales, (std::vector<float>{-1.0f, -1.0f}));
      for (std::byte b : codes) EXPECT_EQ(b, std::byte{0xa5});
    }
}

TEST(Quantize, PacksCodesAndUnpacksThem) {
  for (auto [bits, max] : {std::pair{8, 127}, {6, 31}, {4, 7}}) {
    std::vector<int8_t> codes;  // several runs of rows
    for (int i = 0; i < 2000; ++i) codes.push_back(static_cast<int8_t>(i % (2 * max + 1) - max));
    std::vector<std::byte> packed(codes.size() * bits / 8);
    std::vector<int8_t> back(codes.size());
    pack_codes(codes, bits, packed);
    unpack_codes(packed, bits, back);
    EXPECT_EQ(back, codes) << bits;
  }
}

TEST(Quantize, PackingRefusesCodesOutOfRangeAndSizesThatDisagree) {
  for (auto [bits, bad] : {std::pair{8, -128}, {6, 32}, {6, -32}, {4, 8}, {4, -8}}) {
    std::vector<int8_t> codes(8);
    codes[3] = static_cast<int8_t>(bad);
    std::vector<std::byte> packed(bits);
    const std::string error = error_of([&] { pack_codes(codes, bits, packed); });
    EXPECT_NE(error.find("code " + std::to_string(bad) + " at 3"), std::string::npos) << error;
  }
  std::vector<int8_t> codes(6);
  std::vector<std::byte> packed(5);
  EXPECT_NE(error_of([&] { pack_codes(codes, 6, packed); }).find("multiple of 4"),
            std::string::npos);
  EXPECT_NE(error_of([&] { unpack_codes(packed, 4, codes); }).find("packed has 5"),
            std::string::npos);
}

}  // namespace
}  // namespace pagedkv
