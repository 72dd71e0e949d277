#include "core/golden_data.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "core/golden_deviations.h"

namespace pagedkv::testing {
namespace {

// What hashes of the golden files are compared with.
TEST(GoldenData, Sha256IsTheStandards) {
  const auto of = [](std::string_view text) { return sha256(std::as_bytes(std::span(text))); };
  EXPECT_EQ(of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST(GoldenData, TextSurvivesQuoting) {
  const std::string text = " a%b,\"c\"\n\xc3\xa4";
  EXPECT_EQ(unquote(quote(text)), text);
  EXPECT_EQ(quote(text).find(' '), std::string::npos);
}

// The rows of the table below "## In what we differ".
TEST(GoldenDeviations, AreThoseOfTheDocumentation) {
  std::set<std::string> documented, listed;
  std::ifstream in(PAGEDKV_TEST_DATA "/../../docs/mtplx.md");
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("## ")) inside = line == "## In what we differ";
    if (inside && line.starts_with("| ")) documented.insert(line.substr(2, line.find(" |") - 2));
  }
  documented.erase("name");
  for (const Deviation& deviation : kDeviations) listed.emplace(deviation.name);
  EXPECT_EQ(documented, listed);
}

}  // namespace
}  // namespace pagedkv::testing
