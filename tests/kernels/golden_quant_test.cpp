// Quantising equals the recorded package bit for bit: quantize_symmetric and its way back, and the pages of every kernel
// set. tests/data/golden/README.md describes the file.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>

#include "kernels/attention_case.h"
#include "pagedkv/base/quantize.h"
#include "pagedkv/base/tensor.h"

namespace pagedkv::testing {
namespace {

struct GoldenCase {
  std::string name;
  enum Operation : uint8_t { kRoundtrip, kDequantise, kError } operation = kRoundtrip;
  int bits = 0, rows = 0, head_dim = 0;
  DType dtype = DType::kF32;  // of x
  std::vector<float> x;       // empty: dequantise only
  std::vector<std::byte> codes;
  std::vector<float> scales;
  uint64_t dequantised_hash = 0, dequantised_in_dtype_hash = 0;
  std::string error;
};

template <class T>
T take(std::istream& in) {
  T value{};
  in.read(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

template <class T>
std::vector<T> take(std::istream& in, size_t count) {
  std::vector<T> values(count);
  in.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(count * sizeof(T)));
  return values;
}

std::string take_text(std::istream& in) {
  const std::vector<char> text = take<char>(in, take<uint8_t>(in));
  return {text.begin(), text.end()};
}

GoldenCase take_case(std::istream& in) {
  constexpr uint8_t kNoSource = 3;
  GoldenCase c;
  c.name = take_text(in);
  c.operation = take<GoldenCase::Operation>(in);
  if (c.operation == GoldenCase::kError) {
    c.error = take_text(in);
    return c;
  }
  c.bits = take<uint8_t>(in);
  const auto source = take<uint8_t>(in);
  c.rows = static_cast<int>(take<uint32_t>(in));
  c.head_dim = static_cast<int>(take<uint32_t>(in));
  if (source != kNoSource) {
    constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
    c.dtype = kTypes[source];
    Tensor x(c.dtype, 1, c.rows, c.head_dim);
    x.bytes = take<std::byte>(in, x.bytes.size());
    c.x.resize(static_cast<size_t>(c.rows) * c.head_dim);
    to_floats(x, c.x.data());
  }
  c.codes = take<std::byte>(in, static_cast<size_t>(c.rows) * packed_dim(c.head_dim, c.bits));
  c.scales = take<float>(in, c.rows);
  c.dequantised_hash = take<uint64_t>(in);
  if (source != kNoSource) c.dequantised_in_dtype_hash = take<uint64_t>(in);
  return c;
}

const std::vector<GoldenCase>& golden_cases() {
  static const std::vector<GoldenCase> cases = [] {
    std::ifstream in(PAGEDKV_TEST_DATA "/golden/quant.bin", std::ios::binary);
    std::vector<GoldenCase> list;
    while (in && in.peek() != std::char_traits<char>::eof()) list.push_back(take_case(in));
    if (!in) list.clear();
    return list;
  }();
  return cases;
}

uint64_t hash(std::span<const std::byte> bytes) {
  uint64_t value = 0xcbf29ce484222325u;  // FNV-1a
  for (std::byte b : bytes) value = (value ^ std::to_integer<uint64_t>(b)) * 0x100000001b3u;
  return value;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

TEST(GoldenQuant, HasAllCases) {
  std::map<GoldenCase::Operation, int> counts;
  for (const GoldenCase& c : golden_cases()) ++counts[c.operation];
  EXPECT_EQ(counts[GoldenCase::kRoundtrip], 131);
  EXPECT_EQ(counts[GoldenCase::kDequantise], 6);
  EXPECT_EQ(counts[GoldenCase::kError], 3);
  std::cout << "golden/quant: " << golden_cases().size() << " cases\n";
}

TEST(GoldenQuant, QuantisesBitForBit) {
  for (const GoldenCase& c : golden_cases()) {
    if (c.operation != GoldenCase::kRoundtrip) continue;
    std::vector<std::byte> codes(c.codes.size());
    std::vector<float> scales(c.scales.size());
    quantize_symmetric(c.x, c.head_dim, c.bits, codes, scales);
    EXPECT_TRUE(same_bits(codes, c.codes)) << c.name;
    EXPECT_TRUE(same_bits(scales, c.scales)) << c.name;
  }
}

TEST(GoldenQuant, DequantisesBitForBit) {
  for (const GoldenCase& c : golden_cases()) {
    if (c.operation == GoldenCase::kError) continue;
    std::vector<float> x(static_cast<size_t>(c.rows) * c.head_dim);
    dequantize_symmetric(c.codes, c.scales, c.head_dim, c.bits, x);
    EXPECT_EQ(hash(std::as_bytes(std::span(x))), c.dequantised_hash) << c.name;
    if (c.operation != GoldenCase::kRoundtrip) continue;
    Tensor in_dtype(c.dtype, 1, c.rows, c.head_dim);
    from_floats(x.data(), in_dtype.view());
    EXPECT_EQ(hash(in_dtype.bytes), c.dequantised_in_dtype_hash) << c.name;
  }
}

// One kv head, `rows` slots.
struct GoldenPages {
  explicit GoldenPages(const GoldenCase& c) : bytes(c.codes), scales(c.scales) {
    bytes.resize(bytes.size() + 64);
    const PageFormat format = c.bits == 8 ? PageFormat::kQ8 : PageFormat::kQ4;
    view.keys = view.values = {bytes.data(), scales.data(), format, c.head_dim};
    view.page_size = 1;
    view.num_kv_heads = 1;
    slots.resize(c.rows);
    std::iota(slots.begin(), slots.end(), 0);
  }
  std::vector<std::byte> bytes;
  std::vector<float> scales;
  LayerPages view;
  std::vector<int64_t> slots;
};

TEST(GoldenQuant, PagesHoldTheSame) {
  ThreadPool one(1);
  for (const GoldenCase& c : golden_cases())
    for (const KernelSet* set : supported_sets()) {
      if (c.operation == GoldenCase::kError) continue;
      GoldenPages pages(c);
      std::vector<float> x(static_cast<size_t>(c.rows) * c.head_dim);
      set->fetch({pages.view, pages.slots.data(), c.rows, x.data(), nullptr}, one);
      EXPECT_EQ(hash(std::as_bytes(std::span(x))), c.dequantised_hash)
          << set->name << ' ' << c.name;
      if (c.operation != GoldenCase::kRoundtrip) continue;
      std::fill(pages.bytes.begin(), pages.bytes.end(), std::byte{0xa5});
      std::fill(pages.scales.begin(), pages.scales.end(), -1.0f);
      ASSERT_TRUE(
          set->store({c.x.data(), c.x.data(), pages.view, pages.slots.data(), c.rows}, one));
      EXPECT_EQ(std::memcmp(pages.bytes.data(), c.codes.data(), c.codes.size()), 0)
          << set->name << ' ' << c.name;
      EXPECT_TRUE(same_bits(pages.scales, c.scales)) << set->name << ' ' << c.name;
    }
}

// The package refuses bits 6; ours has q6. What else it refuses, ours refuses with a text of its own.
TEST(GoldenQuant, RefusesWhatThePackageRefusesButForSixBits) {
  std::vector<float> x(8, 1.0f), scale(1);
  std::vector<std::byte> codes(6);
  for (const GoldenCase& c : golden_cases()) {
    if (c.operation != GoldenCase::kError) continue;
    if (c.name == "error/bits6_quantize") {
      EXPECT_NO_THROW(quantize_symmetric(x, 8, 6, codes, scale)) << "deviation: q6 exists";
    } else if (c.name == "error/bits6_dequantize") {
      EXPECT_NO_THROW(dequantize_symmetric(codes, scale, 8, 6, x)) << "deviation: q6 exists";
    } else if (c.name == "error/odd_head_dim_q4") {
      std::vector<float> odd(6), scales(2);
      std::vector<std::byte> packed(4);
      EXPECT_THROW(quantize_symmetric(odd, 3, 4, packed, scales), std::invalid_argument);
    } else {
      ADD_FAILURE() << "unknown: " << c.name << ": " << c.error;
    }
  }
}

}  // namespace
}  // namespace pagedkv::testing
