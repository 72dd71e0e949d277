// Storing rows: every kernel set writes the bytes of the reference, which are those of the recorded package.
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

constexpr PageFormat kFormats[] = {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16,
                                   PageFormat::kQ8,  PageFormat::kQ6,  PageFormat::kQ4};

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

TEST(Store, SetsAgreeOnTies) {
  // amax 127 gives scale 1: halves are ties. Powers of two keep them ties.
  for (int power : {-20, -3, 0, 5, 30}) {
    std::vector<float> x;
    for (int i = -254; i <= 254; ++i) x.push_back(std::ldexp(0.5f * static_cast<float>(i), power));
    x.push_back(std::ldexp(127.0f, power));
    x.resize(512, 0.0f);
    expect_sets_agree(PageFormat::kQ8, 512, x, "ties");
    Pages pages(PageFormat::kQ8, 512, 1, 1);
    ASSERT_TRUE(store_rows(reference_set(), pages, x));
    const auto* codes = reinterpret_cast<const int8_t*>(pages.bytes[0].data());
    if (power < -3) continue;      // the scale's floor: no ties there
    EXPECT_EQ(codes[254 + 1], 0);  // 0.5
    EXPECT_EQ(codes[254 + 3], 2);  // 1.5
    EXPECT_EQ(codes[254 + 5], 2);  // 2.5
    EXPECT_EQ(codes[254 - 5], -2);
    EXPECT_EQ(codes[254 + 253], 126);
  }
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
  for (const KernelSet* set : supported_sets())
    for (float bad : {INFINITY, -INFINITY, NAN, -NAN})
      for (int place : {0, 15, 16, 37, 39}) {
        constexpr int kDim = 40;
        std::vector<float> x = data(3, 3 * kDim), good = x;
        x[kDim + place] = bad;
        Pages pages(PageFormat::kQ8, kDim, 1, 3), expected(PageFormat::kQ8, kDim, 1, 3);
        ASSERT_TRUE(store_rows(*set, expected, good));
        std::fill_n(expected.bytes[0].begin() + kDim, kDim, std::byte{0xa5});
        std::fill_n(expected.bytes[1].begin() + kDim, kDim, std::byte{0xa5});
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

// ---- the recorded package ---------------------------------------------------------------------------------------------

struct GoldenCase {
  std::string name;
  int rows = 0, head_dim = 0;
  bool has_source = false;
  std::vector<float> x;
  std::vector<int8_t> codes;
  std::vector<float> scales;
  uint64_t dequantised_hash = 0;
};

template <class T>
T take(std::istream& in) {
  T value;
  in.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

std::vector<GoldenCase> golden_cases() {
  std::ifstream in(PAGEDKV_TEST_DATA "/golden/quant_q8.bin", std::ios::binary);
  std::vector<GoldenCase> cases;
  while (in.peek() != std::char_traits<char>::eof()) {
    GoldenCase c;
    c.name.resize(take<uint8_t>(in));
    in.read(c.name.data(), static_cast<std::streamsize>(c.name.size()));
    const auto source = take<uint8_t>(in);
    c.rows = static_cast<int>(take<uint32_t>(in));
    c.head_dim = static_cast<int>(take<uint32_t>(in));
    c.has_source = source != 3;
    for (int i = 0; c.has_source && i < c.rows * c.head_dim; ++i)
      c.x.push_back(source == 0   ? take<float>(in)
                    : source == 1 ? half_to_float(take<uint16_t>(in))
                                  : std::bit_cast<float>(uint32_t{take<uint16_t>(in)} << 16));
    for (int i = 0; i < c.rows * c.head_dim; ++i) c.codes.push_back(take<int8_t>(in));
    for (int i = 0; i < c.rows; ++i) c.scales.push_back(take<float>(in));
    c.dequantised_hash = take<uint64_t>(in);
    if (!in) return {};
    cases.push_back(std::move(c));
  }
  return cases;
}

TEST(Store, Q8EqualsTheRecordedPackage) {
  const std::vector<GoldenCase> cases = golden_cases();
  ASSERT_EQ(cases.size(), 70u);
  for (const GoldenCase& c : cases) {
    if (!c.has_source || c.rows == 0) continue;
    for (const KernelSet* set : supported_sets()) {
      Pages pages(PageFormat::kQ8, c.head_dim, 1, c.rows);
      ASSERT_TRUE(store_rows(*set, pages, c.x)) << c.name;
      EXPECT_EQ(std::memcmp(pages.bytes[0].data(), c.codes.data(), c.codes.size()), 0)
          << set->name << ' ' << c.name;
      EXPECT_EQ(std::memcmp(pages.scales[0].data(), c.scales.data(), c.scales.size() * 4), 0)
          << set->name << ' ' << c.name;
    }
  }
}

TEST(Store, Q8ReadsBackAsTheRecordedPackage) {
  for (const GoldenCase& c : golden_cases()) {
    uint64_t hash = 0xcbf29ce484222325u;
    const auto* rows = reinterpret_cast<const std::byte*>(c.codes.data());
    for (int i = 0; i < c.rows * c.head_dim; ++i) {
      const uint32_t bits =
          std::bit_cast<uint32_t>(Q8Page::load(rows, i) * c.scales[i / c.head_dim]);
      for (int b = 0; b < 4; ++b) hash = (hash ^ (bits >> (8 * b) & 0xff)) * 0x100000001b3u;
    }
    EXPECT_EQ(hash, c.dequantised_hash) << c.name;
  }
}

// FC-18 for q8: rounding stays within half a step, small rows vanish cleanly, attention stays close.
TEST(Store, Q8IsAccurate) {
  constexpr int kDim = 64, kTokens = 256;
  AttentionCase exact;
  exact.key_format = exact.value_format = PageFormat::kF32;
  exact.num_q_heads = exact.num_kv_heads = 1;
  exact.key_dim = exact.value_dim = kDim;
  exact.sequences = {{kTokens, 1, 0}};
  AttentionCase quantised = exact;
  quantised.key_format = quantised.value_format = PageFormat::kQ8;
  for (int t = 0; t < 8; ++t) {
    AttentionProblem a(exact), b(quantised);
    a.queries() = b.queries() = data(1000 + t, kDim);
    const std::vector<float> keys = data(2000 + t, kTokens * kDim),
                             values = data(3000 + t, kTokens * kDim);
    for (int i = 0; i < kTokens; ++i) {
      a.tokens().store(0, i, &keys[i * kDim], &values[i * kDim]);
      b.tokens().store(0, i, &keys[i * kDim], &values[i * kDim]);
      float amax = 0;
      for (int e = 0; e < kDim; ++e) amax = std::max(amax, std::fabs(keys[i * kDim + e]));
      const float half_step = std::max(amax / 127, 1e-6f) / 2 * 1.001f;
      for (int e = 0; e < kDim; ++e)
        ASSERT_LE(std::fabs(b.tokens().key(0, i, 0, e) - keys[i * kDim + e]), half_step);
    }
    ThreadPool pool(1);
    for (const KernelSet* set : supported_sets())
      EXPECT_LE(relative_error(b.run(*set, pool).out, a.oracle().out), 0.01)
          << set->name << " t " << t;
  }
}

TEST(Store, Q8KeepsZerosTinyAndLargeRows) {
  for (const KernelSet* set : supported_sets()) {
    std::vector<float> x(3 * 64, 0.0f);
    for (int e = 0; e < 64; ++e) x[64 + e] = 1e-30f;
    for (int e = 0; e < 64; ++e) x[128 + e] = e % 2 ? 6e4f : -3e4f;
    Pages pages(PageFormat::kQ8, 64, 1, 3);
    ASSERT_TRUE(store_rows(*set, pages, x));
    for (int i = 0; i < 3 * 64; ++i) {
      const float scale = pages.scales[0][i / 64],
                  value = Q8Page::load(pages.bytes[0].data(), i) * scale;
      if (i < 128)
        EXPECT_EQ(value, 0.0f);
      else
        EXPECT_LE(std::fabs(value - x[i]), scale / 2 * 1.001f);
    }
  }
}

}  // namespace
}  // namespace pagedkv::testing
