#include "base/page_codec.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace pagedkv {
namespace {

struct StoredRow {
  std::vector<int8_t> codes;
  float scale = -1;
  bool ok = false;
};

StoredRow store_q8(const std::vector<float>& x) {
  StoredRow r;
  r.codes.assign(x.size(), 99);
  r.ok = Q8Page::store_row(x.data(), static_cast<int>(x.size()),
                           reinterpret_cast<std::byte*>(r.codes.data()), &r.scale);
  return r;
}

TEST(PageCodec, Q8ScalesByTheLargestMagnitude) {
  const StoredRow r = store_q8({-254.0f, 127.0f, 2.0f, 0.0f});
  EXPECT_TRUE(r.ok);
  EXPECT_EQ(r.scale, 2.0f);
  EXPECT_EQ(r.codes, (std::vector<int8_t>{-127, 64, 1, 0}));  // 63.5 is a tie and goes to even
}

TEST(PageCodec, Q8DividesByTheScale) {  // x * (1 / s) would give other codes here
  int differ = 0;
  for (int i = 1; i < 2000; ++i) {
    const float amax = 0.37f + 1e-3f * static_cast<float>(i),
                x = 0.5f * (amax / 127.0f) * static_cast<float>(2 * (i % 60) + 1);
    const StoredRow r = store_q8({amax, x});
    EXPECT_EQ(r.codes[1], static_cast<int8_t>(std::nearbyint(x / r.scale)));
    differ += r.codes[1] != static_cast<int8_t>(std::nearbyint(x * (1.0f / r.scale)));
  }
  EXPECT_GT(differ, 0);
}

TEST(PageCodec, Q8HasASmallestScale) {
  const StoredRow zeros = store_q8({0.0f, -0.0f}), tiny = store_q8({1e-30f, 0.4e-6f}),
                  tie = store_q8({0.5e-6f, 1.5e-6f});
  EXPECT_EQ(zeros.scale, 1e-6f);
  EXPECT_EQ(zeros.codes, (std::vector<int8_t>{0, 0}));
  EXPECT_EQ(tiny.codes, (std::vector<int8_t>{0, 0}));
  EXPECT_EQ(tie.scale, 1e-6f);
}

TEST(PageCodec, Q8RefusesWhatIsNotFiniteAndWritesNothing) {
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    const StoredRow r = store_q8({1.0f, bad, 2.0f});
    EXPECT_FALSE(r.ok);
    EXPECT_EQ(r.scale, -1.0f);
    EXPECT_EQ(r.codes, (std::vector<int8_t>{99, 99, 99}));
  }
}

// Every code in every place, and what it does to its neighbours.
template <class Format>
void expect_codes_keep_apart() {
  constexpr int kDim = 128, kBytes = kDim * Format::kElementBits / 8;
  for (int place = 0; place < kDim; ++place)
    for (int code = -Format::kMaxCode; code <= Format::kMaxCode; ++code)
      for (int others : {-Format::kMaxCode, 0, Format::kMaxCode}) {
        std::byte row[kBytes];
        Format::store_codes(row, kDim, [&](int e) { return e == place ? code : others; });
        for (int e = 0; e < kDim; ++e)
          ASSERT_EQ(Format::load_code(row, e), e == place ? code : others) << place << ' ' << e;
      }
}

TEST(PageCodec, CodesKeepApart) {
  expect_codes_keep_apart<Q8Page>();
  expect_codes_keep_apart<Q6Page>();
  expect_codes_keep_apart<Q4Page>();
}

TEST(PageCodec, Q6AndQ4LieAsDescribed) {
  std::byte q6[3], q4[2];
  const int codes[] = {-31, 31, 0, -1};  // stored as 1, 63, 32, 31
  Q6Page::store_codes(q6, 4, [&](int e) { return codes[e]; });
  EXPECT_EQ(q6[0], std::byte{0xc1});
  EXPECT_EQ(q6[1], std::byte{0x0f});
  EXPECT_EQ(q6[2], std::byte{0x7e});
  const int nibbles[] = {-7, 7, 0, -1};  // stored as 1, 15, 8, 7
  Q4Page::store_codes(q4, 4, [&](int e) { return nibbles[e]; });
  EXPECT_EQ(q4[0], std::byte{0xf1});
  EXPECT_EQ(q4[1], std::byte{0x78});
}

TEST(PageCodec, StorageOrderIsTheDocumentedOne) {
  for (int e = 0; e < 512; ++e) {
    EXPECT_EQ(Q8Page::lane(e), e);
    EXPECT_EQ(Q4Page::lane(e), e / 32 * 32 + e % 2 * 16 + e % 32 / 2);
    EXPECT_EQ(Q6Page::lane(e), e / 64 * 64 + e % 4 * 16 + e % 64 / 4);
  }
}

TEST(PageCodec, FloatsComeBackAsTheyWere) {
  const std::vector<float> x = {1.0f, -2.5f, 3e38f, std::numeric_limits<float>::denorm_min()};
  std::vector<std::byte> row(16);
  ASSERT_TRUE(F32Page::store_row(x.data(), 4, row.data(), nullptr));
  for (int e = 0; e < 4; ++e) EXPECT_EQ(F32Page::load(row.data(), e), x[e]);
  ASSERT_TRUE(F16Page::store_row(x.data(), 2, row.data(), nullptr));
  for (int e = 0; e < 2; ++e) EXPECT_EQ(F16Page::load(row.data(), e), x[e]);
  ASSERT_TRUE(BF16Page::store_row(x.data(), 2, row.data(), nullptr));
  for (int e = 0; e < 2; ++e) EXPECT_EQ(BF16Page::load(row.data(), e), x[e]);
}

TEST(PageCodec, TypesAgreeWithTheirDescription) {
  for (PageFormat format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16, PageFormat::kQ8,
                            PageFormat::kQ6, PageFormat::kQ4})
    with_page_format(format, [&](auto f) {
      using Format = decltype(f);
      EXPECT_EQ(Format::kFormat, format);
      EXPECT_EQ(Format::kHasScales, has_scales(format));
      for (int n : {4, 64, 100, 512}) {
        EXPECT_EQ(row_bytes(format, n), n * Format::kElementBits / 8);
        std::vector<bool> taken(Format::num_lanes(n));
        for (int e = 0; e < n; ++e) {
          ASSERT_LT(Format::lane(e), Format::num_lanes(n));
          EXPECT_FALSE(taken[Format::lane(e)]) << "two elements in one lane";
          taken[Format::lane(e)] = true;
        }
      }
    });
}

}  // namespace
}  // namespace pagedkv
