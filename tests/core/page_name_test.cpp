#include "pagedkv/core/page_name.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <numeric>
#include <sstream>
#include <vector>

namespace pagedkv {
namespace {

std::vector<int32_t> ascending(int32_t first, size_t count) {
  std::vector<int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Any int32, as likely a short one as a long one; as in tests/data/make_page_names.py.
int32_t token(uint32_t seed, uint32_t index) {
  uint32_t x = (seed * 1000003 + index) * 2654435761;
  x ^= x >> 15;
  x *= 2246822519;
  return static_cast<int32_t>(x) >> (x & 31);
}

std::vector<int32_t> tokens_of_page(uint32_t seed, size_t page, size_t page_size) {
  std::vector<int32_t> tokens(page_size);
  for (size_t i = 0; i < page_size; ++i)
    tokens[i] = token(seed, static_cast<uint32_t>(page * page_size + i));
  return tokens;
}

TEST(PageName, IsVllmsBlockHash) {
  EXPECT_EQ(hex(root_name()), "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
  const PageName first = first_page_name(ascending(0, 16), {});
  EXPECT_EQ(hex(first), "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749");
  EXPECT_EQ(hex(page_name(first, ascending(16, 16))),
            "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c");
  EXPECT_EQ(hex(first_page_name(ascending(0, 16), {.salt = "tenant-a"})),
            "4e31e1ced73eb044a95997f0109d0ddab3d9145878214f1a0ee37c048b397859");
}

TEST(PageName, IsTheHashThatPythonMakes) {
  std::ifstream file(PAGEDKV_TEST_DATA "/page_names.txt");
  std::string line;
  int chains = 0;
  while (std::getline(file, line)) {
    if (line.starts_with('#')) continue;
    std::istringstream words(line);
    size_t num_pages, page_size;
    uint32_t seed;
    std::string scope[4], wanted;
    ASSERT_TRUE(words >> num_pages >> page_size >> seed >> scope[0] >> scope[1] >> scope[2] >>
                scope[3] >> wanted)
        << line;
    for (std::string& text : scope)
      if (text == "-") text.clear();
    PageName name = first_page_name(tokens_of_page(seed, 0, page_size),
                                    {scope[0], scope[1], scope[2], scope[3]});
    for (size_t page = 1; page < num_pages; ++page)
      name = page_name(name, tokens_of_page(seed, page, page_size));
    EXPECT_EQ(hex(name), wanted) << line;
    ++chains;
  }
  EXPECT_EQ(chains, 30);
}

// Expected: cbor2 6.3.0 and hashlib, as make_page_names.py does.
TEST(PageName, TakesAnyInt32AndAnyLength) {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const int32_t where_cbor_grows[] = {0,  23,  24,  255,  256,  65535,  65536,  kMost,
                                      -1, -24, -25, -256, -257, -65536, -65537, kLeast};
  EXPECT_EQ(hex(page_name(root_name(), where_cbor_grows)),
            "b5c89cab95fd9d035f504f2437a159640cdd306246f9671fa6160ed636e2d6cd");
  EXPECT_EQ(hex(page_name(root_name(), {})),
            "b85598ff86fb5e95d66e56b3165ec1d7894cfb95730a88a4cdad952dd7702c55");
}

TEST(PageName, TellsApartWhatTheSameTextStandsFor) {
  const std::vector<int32_t> tokens = ascending(0, 16);
  const PrefixScope scopes[] = {
      {}, {.salt = "x"}, {.model = "x"}, {.kv_format = "x"}, {.arithmetic_id = "x"}};
  for (const PrefixScope& a : scopes)
    for (const PrefixScope& b : scopes)
      EXPECT_EQ(first_page_name(tokens, a) == first_page_name(tokens, b), a == b);
}

TEST(PageName, ShortFormIsTheLastEightBytes) {
  PageName name{};
  std::iota(name.begin(), name.end(), uint8_t{0xe0});
  EXPECT_EQ(short_name(name), 0xf8f9fafbfcfdfeffu);
  EXPECT_EQ(hex(name).substr(48), "f8f9fafbfcfdfeff");
}

}  // namespace
}  // namespace pagedkv
