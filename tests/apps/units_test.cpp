#include <gtest/gtest.h>

#include <stdexcept>

#include "apps/cli.h"
#include "base/units.h"

namespace pagedkv::apps {
namespace {

TEST(Units, BytesTakeBinaryUnits) {
  EXPECT_EQ(parse_bytes("4096"), 4096);
  EXPECT_EQ(parse_bytes("64KiB"), 64 << 10);
  EXPECT_EQ(parse_bytes("1.5 MiB"), 3 << 19);
  EXPECT_EQ(parse_bytes("2GiB"), int64_t{2} << 30);
  for (const char* bad : {"", "abc", "-1", "1XB", "nan", "1e30", "GiB", "1 2"})
    EXPECT_THROW(parse_bytes(bad), std::invalid_argument) << bad;
}

TEST(Units, TimesTakeUnits) {
  EXPECT_EQ(parse_seconds("30"), 30);
  EXPECT_EQ(parse_seconds("0"), 0);
  EXPECT_EQ(parse_seconds("500ms"), 0.5);
  EXPECT_EQ(parse_seconds("1.5m"), 90);
  EXPECT_EQ(parse_seconds("2h"), 7200);
  for (const char* bad : {"", "s", "-1", "1x", "nan", "inf", "1e30", "1 s"})
    EXPECT_THROW(parse_seconds(bad), std::invalid_argument) << bad;
}

TEST(Units, BytesAreShownWithOneDecimal) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(int64_t{3} << 30), "3.0 GiB");
}

TEST(Units, FamiliarShortFlagsBecomeLongOnes) {
  const char* argv[] = {"pagedkv", "run", "-ctk", "q8", "-ctv=f16", "--", "-ctk"};
  EXPECT_EQ(rewrite_short_flags(7, argv),
            (std::vector<std::string>{"run", "--cache-type-k", "q8", "--cache-type-v=f16", "--",
                                      "-ctk"}));
}

}  // namespace
}  // namespace pagedkv::apps
