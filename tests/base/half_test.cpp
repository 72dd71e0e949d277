#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace pagedkv {
namespace {

TEST(Half, EveryHalfComesBackAsItWas) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float value = half_to_float(static_cast<uint16_t>(h));
    if (std::isnan(value)) {
      EXPECT_GT(h & 0x7fff, 0x7c00u);
      EXPECT_EQ(float_to_half(value) & 0x7e00, 0x7e00) << "stays a quiet NaN";
    } else {
      ASSERT_EQ(float_to_half(value), h);
    }
  }
}

TEST(Half, ValuesAreThoseOfTheStandard) {
  EXPECT_EQ(half_to_float(0x3c00), 1.0f);
  EXPECT_EQ(half_to_float(0x0001), 0x1p-24f);
  EXPECT_EQ(half_to_float(0x03ff), 1023 * 0x1p-24f);
  EXPECT_EQ(half_to_float(0x0400), 0x1p-14f);
  EXPECT_EQ(half_to_float(0x7bff), 65504.0f);
  EXPECT_EQ(half_to_float(0xfc00), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::signbit(half_to_float(0x8000)));
}

// Between each pair of neighbours: the middle goes to the even one, everything else to the nearer.
TEST(Half, RoundsToNearestEven) {
  for (uint16_t h = 0; h < 0x7bff; ++h) {
    const float low = half_to_float(h), high = half_to_float(h + 1),
                middle = low + (high - low) / 2;
    ASSERT_EQ(float_to_half(middle), h % 2 ? h + 1 : h) << h;
    ASSERT_EQ(float_to_half(std::nextafter(middle, low)), h);
    ASSERT_EQ(float_to_half(std::nextafter(middle, high)), h + 1);
    ASSERT_EQ(float_to_half(-std::nextafter(middle, high)), 0x8000 | (h + 1));
  }
}

TEST(Half, TooLargeIsInfiniteTooSmallIsZero) {
  EXPECT_EQ(float_to_half(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(-3e38f), 0xfc00);
  EXPECT_EQ(float_to_half(0x1p-25f), 0);
  EXPECT_EQ(float_to_half(std::nextafter(0x1p-25f, 1.0f)), 1);
  EXPECT_EQ(float_to_half(-std::numeric_limits<float>::denorm_min()), 0x8000);
}

TEST(BFloat16, EveryOneComesBackAsItWas) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float value = bfloat16_to_float(static_cast<uint16_t>(h));
    if (std::isnan(value))
      EXPECT_EQ(float_to_bfloat16(value), h | 0x40) << "quiet, with the payload's top bits";
    else
      ASSERT_EQ(float_to_bfloat16(value), h);
  }
}

TEST(BFloat16, RoundsToNearestEven) {
  for (uint32_t h = 0; h < 0x7f80; ++h) {
    const uint32_t low = h << 16, middle = low | 0x8000;
    ASSERT_EQ(float_to_bfloat16(std::bit_cast<float>(middle)), h % 2 ? h + 1 : h);
    ASSERT_EQ(float_to_bfloat16(std::bit_cast<float>(middle - 1)), h);
    ASSERT_EQ(float_to_bfloat16(std::bit_cast<float>(middle + 1)), h + 1);
    ASSERT_EQ(float_to_bfloat16(-std::bit_cast<float>(middle + 1)), 0x8000 | (h + 1));
  }
  EXPECT_EQ(float_to_bfloat16(std::numeric_limits<float>::max()), 0x7f80) << "infinity";
}

TEST(BFloat16, ANaNWithALowPayloadStaysOne) {
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0x7f800001u)), 0x7fc0);
  EXPECT_EQ(float_to_bfloat16(std::bit_cast<float>(0xffffffffu)), 0xffff);
}

}  // namespace
}  // namespace pagedkv
