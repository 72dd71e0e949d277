// Storing rows and reading them back: every kernel set writes the bytes of the reference and reads its floats.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>

#include "base/half.h"
#include "base/page_codec.h"
#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

// A layer's pages with a byte that no store writes by chance, and what a store left in them.
struct Pages {
  Pages(PageFormat format, int head_dim, int num_kv_heads, int num_slots)
      : bytes(2, std::vector<std::byte>(num_slots * num_kv_heads * row_bytes(format, head_dim) + 64,
                                        std::byte{0xa5})),
        scales(2, std::vector<float>(num_slots * num_kv_heads, -1.0f)) {
    const auto array = [&](int i) {
      return PageArray{bytes[i].data(), has_scales(format) ? scales[i].data() : nullptr, format,
                       head_dim};
    };
    view.keys = array(0);
    view.values = array(1);
    view.page_size = 4;
    view.num_kv_heads = num_kv_heads;
  }
  bool operator==(const Pages& other) const {
    return bytes == other.bytes && scales == other.scales;
  }

  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::vector<float>> scales;
  LayerPages view;
};

// Stores the same rows as keys and as values in consecutive slots.
bool store_rows(const KernelSet& set, Pages& pages, const std::vector<float>& x, int threads = 1) {
  const int tokens =
      static_cast<int>(x.size()) / (pages.view.num_kv_heads * pages.view.keys.head_dim);
  std::vector<int64_t> slots(tokens);
  std::iota(slots.begin(), slots.end(), 0);
  ThreadPool pool(threads);
  return set.store({x.data(), x.data(), pages.view, slots.data(), tokens}, pool);
}

void expect_sets_agree(PageFormat format, int head_dim, const std::vector<float>& x,
                       const std::string& what) {
  const int rows = static_cast<int>(x.size()) / head_dim;
  Pages expected(format, head_dim, 1, rows);
  const bool ok = store_rows(reference_set(), expected, x);
  for (const KernelSet* set : supported_sets()) {
    Pages pages(format, head_dim, 1, rows);
    EXPECT_EQ(store_rows(*set, pages, x, 2), ok) << set->name << ' ' << what;
    EXPECT_TRUE(pages == expected) << set->name << ' ' << page_format_name(format) << ' ' << what;
  }
}

TEST(Store, SetsAgreeForEveryHeadDim) {
  for (PageFormat format : kFormats)
    for (int dim = 1; dim <= 160; ++dim)
      if (fits(format, dim))
        expect_sets_agree(format, dim, data(dim, int64_t{dim} * 9), "random rows");
  for (PageFormat format : kFormats)
    for (int dim : {192, 256, 300, 511, 512})
      if (fits(format, dim))
        expect_sets_agree(format, dim, data(dim, int64_t{dim} * 9), "random rows");
}

// An amax of the largest code gives scale 1: halves are ties. Powers of two keep them ties.
template <class Format>
void expect_ties_go_to_even() {
  constexpr int kMax = Format::kMaxCode;
  for (int power : {-20, -3, 0, 5, 30}) {
    std::vector<float> x;
    for (int i = -2 * kMax; i <= 2 * kMax; ++i)
      x.push_back(std::ldexp(0.5f * static_cast<float>(i), power));
    x.resize(512, 0.0f);
    expect_sets_agree(Format::kFormat, 512, x, "ties");
    Pages pages(Format::kFormat, 512, 1, 1);
    ASSERT_TRUE(store_rows(reference_set(), pages, x));
    if (power < -3) continue;  // the scale's floor: no ties there
    for (int i = -2 * kMax; i <= 2 * kMax; ++i)
      ASSERT_EQ(Format::load_code(pages.bytes[0].data(), i + 2 * kMax),
                static_cast<int>(std::nearbyint(0.5f * static_cast<float>(i))))
          << i << " halves";
  }
}

TEST(Store, SetsAgreeOnTies) {
  expect_ties_go_to_even<Q8Page>();
  expect_ties_go_to_even<Q6Page>();
  expect_ties_go_to_even<Q4Page>();
}

// Quotients next to halves of a code, where an error of one unit in the last place changes the code.
template <class Format>
void expect_sets_agree_beside_halves() {
  constexpr int kRows = 64, kDim = 512;
  uint64_t state = Format::kMaxCode;
  std::vector<float> x(kRows * kDim);
  for (int round = 0; round < rounds(150); ++round) {
    for (int row = 0; row < kRows; ++row) {
      float* const r = &x[static_cast<size_t>(row) * kDim];
      // An amax between 2^-12 and 2^115, any mantissa.
      r[0] = std::bit_cast<float>(static_cast<uint32_t>(splitmix64(state)) % 0x3f800000u +
                                  0x39800000u);
      const float scale = r[0] / Format::kMaxCode;
      for (int e = 1; e < kDim; ++e) {
        const uint64_t draw = splitmix64(state);
        const auto halves = static_cast<float>(2 * (draw % Format::kMaxCode) + 1);
        const float border = scale * (0.5f * halves);
        const int ulps = static_cast<int>(draw >> 32 & 7) - 3;
        r[e] = std::bit_cast<float>(std::bit_cast<int32_t>(border) + ulps);
        if (r[e] > r[0]) r[e] = r[0];
        if (draw >> 40 & 1) r[e] = -r[e];
      }
    }
    expect_sets_agree(Format::kFormat, kDim, x, "beside halves");
  }
}

TEST(Store, SetsAgreeBesideHalves) {
  expect_sets_agree_beside_halves<Q8Page>();
  expect_sets_agree_beside_halves<Q6Page>();
  expect_sets_agree_beside_halves<Q4Page>();
}

TEST(Store, SetsAgreeOnAnyBits) {
  uint64_t state = 4;
  for (int round = 0; round < rounds(300); ++round) {
    std::vector<float> x(5 * 48);
    const uint32_t exponents =
        splitmix64(state) % 2 ? 0xffffffffu : 0x40ffffffu;  // all floats, or no huge ones
    for (float& v : x)
      v = std::bit_cast<float>(static_cast<uint32_t>(splitmix64(state)) & exponents);
    for (PageFormat format : kFormats) expect_sets_agree(format, 48, x, "any bits");
  }
}

TEST(Store, SetsAgreeOnDenormalsAndHalfRange) {
  std::vector<float> x;
  for (uint32_t exponent = 0; exponent < 255; ++exponent)
    for (uint32_t mantissa : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x3001u,
                              0x7fefffu, 0x7ff000u, 0x7fffffu})
      x.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
  x.resize(x.size() / 64 * 64);
  for (PageFormat format : kFormats) expect_sets_agree(format, 64, x, "every exponent");
  x.push_back(INFINITY);
  x.push_back(-INFINITY);
  x.push_back(65519.996f);
  x.push_back(65520.0f);
  x.resize((x.size() + 63) / 64 * 64);
  expect_sets_agree(PageFormat::kF16, 64, x, "infinities");
  for (uint32_t bits :
       {0x7f7f7fffu, 0x7f7f8000u, 0x7f7fffffu, 0x7f800001u, 0x7fc00000u, 0xff80ffffu})
    x.push_back(std::bit_cast<float>(bits));
  x.resize((x.size() + 63) / 64 * 64);
  expect_sets_agree(PageFormat::kBF16, 64, x, "infinities and NaNs");
}

TEST(Store, WritesSlotsOnlyAndSkipsPadding) {
  for (PageFormat format : kFormats)
    for (const KernelSet* set : supported_sets()) {
      constexpr int kDim = 40, kHeads = 3, kSlots = 12;
      const int64_t slots[] = {7, -1, 0, 11, -1};
      const std::vector<float> keys = data(1, 5 * kHeads * kDim),
                               values = data(2, 5 * kHeads * kDim);
      Pages pages(format, kDim, kHeads, kSlots), one_by_one(format, kDim, kHeads, kSlots);
      ThreadPool pool(3), one(1);
      ASSERT_TRUE(set->store({keys.data(), values.data(), pages.view, slots, 5}, pool));
      for (int t = 0; t < 5; ++t)
        ASSERT_TRUE(set->store({keys.data() + t * kHeads * kDim, values.data() + t * kHeads * kDim,
                                one_by_one.view, slots + t, 1},
                               one));
      EXPECT_TRUE(pages == one_by_one) << set->name;
      const int64_t token_bytes = kHeads * row_bytes(format, kDim);
      for (int slot = 0; slot < kSlots; ++slot) {
        const bool written = slot == 7 || slot == 0 || slot == 11;
        for (int64_t b = 0; b < token_bytes && !written; ++b)
          ASSERT_EQ(pages.bytes[0][slot * token_bytes + b], std::byte{0xa5})
              << set->name << " slot " << slot;
        EXPECT_EQ(pages.scales[0][slot * kHeads] != -1.0f, written && has_scales(format));
      }
    }
}

TEST(Store, ARowThatIsNotFiniteIsReportedAndLeftAlone) {
  for (PageFormat format : {PageFormat::kQ8, PageFormat::kQ6, PageFormat::kQ4})
    for (const KernelSet* set : supported_sets())
      for (float bad : {INFINITY, -INFINITY, NAN, -NAN})
        for (int place : {0, 15, 16, 37, 39}) {
          constexpr int kDim = 40;
          const int64_t row = row_bytes(format, kDim);
          std::vector<float> x = data(3, 3 * kDim), good = x;
          x[kDim + place] = bad;
          Pages pages(format, kDim, 1, 3), expected(format, kDim, 1, 3);
          ASSERT_TRUE(store_rows(*set, expected, good));
          std::fill_n(expected.bytes[0].begin() + row, row, std::byte{0xa5});
          std::fill_n(expected.bytes[1].begin() + row, row, std::byte{0xa5});
          expected.scales[0][1] = expected.scales[1][1] = -1.0f;
          EXPECT_FALSE(store_rows(*set, pages, x, 2));
          EXPECT_TRUE(pages == expected) << set->name << " place " << place;
        }
}

TEST(Store, StorableSaysBeforehand) {
  std::vector<float> good = data(1, 64), bad = good;
  bad[63] = INFINITY;
  const int64_t slots[] = {0, 1}, skipped[] = {0, -1};
  Pages q8(PageFormat::kQ8, 32, 1, 2), f16(PageFormat::kF16, 32, 1, 2);
  EXPECT_TRUE(storable({good.data(), good.data(), q8.view, slots, 2}));
  EXPECT_FALSE(storable({bad.data(), good.data(), q8.view, slots, 2}));
  EXPECT_FALSE(storable({good.data(), bad.data(), q8.view, slots, 2}));
  EXPECT_TRUE(storable({bad.data(), bad.data(), q8.view, skipped, 2}));
  EXPECT_TRUE(storable({bad.data(), bad.data(), f16.view, slots, 2}));
}

// ---- reading back -----------------------------------------------------------------------------------------------

// What `set` reads from `slots` of pages: [token][head][element] of the keys.
std::vector<float> fetch_rows(const KernelSet& set, Pages& pages, const std::vector<int64_t>& slots,
                              int threads = 1) {
  const size_t row = static_cast<size_t>(pages.view.num_kv_heads) * pages.view.keys.head_dim;
  std::vector<float> keys(slots.size() * row + 1, -7.0f), values = keys;
  ThreadPool pool(threads);
  set.fetch({pages.view, slots.data(), static_cast<int>(slots.size()), keys.data(), values.data()},
            pool);
  EXPECT_EQ(std::memcmp(keys.data(), values.data(), keys.size() * sizeof(float)), 0);
  EXPECT_EQ(keys.back(), -7.0f) << "one past the end";
  keys.pop_back();
  return keys;
}

TEST(Fetch, SetsAgreeForEveryHeadDim) {
  for (PageFormat format : kFormats)
    for (int dim = 1; dim <= 512; dim += dim < 160 ? 1 : 44) {
      if (!fits(format, dim)) continue;
      Pages pages(format, dim, 2, 9);
      ASSERT_TRUE(store_rows(reference_set(), pages, data(dim, int64_t{dim} * 18)));
      const std::vector<int64_t> slots = {8, 0, 3, 3, 7};
      const std::vector<float> expected = fetch_rows(reference_set(), pages, slots);
      for (const KernelSet* set : supported_sets())
        ASSERT_EQ(std::memcmp(fetch_rows(*set, pages, slots, 2).data(), expected.data(),
                              expected.size() * sizeof(float)),
                  0)
            << set->name << ' ' << page_format_name(format) << ' ' << dim;
    }
}

TEST(Fetch, SetsAgreeOnEveryByte) {
  for (PageFormat format : kFormats) {
    constexpr int kDim = 192;
    Pages pages(format, kDim, 1, 400);
    uint64_t state = 8;
    for (std::byte& b : pages.bytes[0]) b = static_cast<std::byte>(splitmix64(state));
    for (float& s : pages.scales[0])
      s = std::bit_cast<float>(static_cast<uint32_t>(splitmix64(state)) & 0xbfffffffu);
    pages.scales[0][0] = 0.0f;
    std::copy(pages.bytes[0].begin(), pages.bytes[0].end(), pages.bytes[1].begin());
    std::copy(pages.scales[0].begin(), pages.scales[0].end(), pages.scales[1].begin());
    std::vector<int64_t> slots(400);
    std::iota(slots.begin(), slots.end(), 0);
    const std::vector<float> expected = fetch_rows(reference_set(), pages, slots);
    for (const KernelSet* set : supported_sets()) {
      const std::vector<float> rows = fetch_rows(*set, pages, slots);
      for (size_t i = 0; i < rows.size(); ++i)
        if (!(std::isnan(rows[i]) && std::isnan(expected[i]))) {
          ASSERT_EQ(std::bit_cast<uint32_t>(rows[i]), std::bit_cast<uint32_t>(expected[i]))
              << set->name << ' ' << page_format_name(format) << ' ' << i;
        }
    }
  }
}

TEST(Fetch, LeavesOutWhatIsNotWanted) {
  for (const KernelSet* set : supported_sets()) {
    Pages pages(PageFormat::kQ6, 64, 1, 1);
    const std::vector<float> x = data(5, 64);
    ASSERT_TRUE(store_rows(*set, pages, x));
    const int64_t slot = 0;
    std::vector<float> keys(64), values(64);
    ThreadPool pool(1);
    set->fetch({pages.view, &slot, 1, keys.data(), nullptr}, pool);
    set->fetch({pages.view, &slot, 1, nullptr, values.data()}, pool);
    EXPECT_EQ(keys, values);
    EXPECT_LT(relative_error(keys, x), 0.02);
  }
}

}  // namespace
}  // namespace pagedkv::testing
