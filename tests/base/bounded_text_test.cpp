#include "base/bounded_text.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <stdexcept>

namespace pagedkv {
namespace {

std::string refusal(const std::string& path, int64_t most) {
  try {
    return "read: " + read_regular_file(path, most);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

TEST(BoundedText, ReadsRegularFilesUpToALimit) {
  const std::string path = testing::TempDir() + "bounded_text_" + std::to_string(getpid());
  std::ofstream(path) << "five\n";
  EXPECT_EQ(refusal(path, 5), "read: five\n");
  EXPECT_EQ(refusal(path, 4), "has 5 bytes; at most 4 are read");
  std::remove(path.c_str());
  EXPECT_NE(refusal(path, 4).find("cannot be opened: "), std::string::npos);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  for (const char* other : {path.c_str(), "/", "/dev/zero"})
    EXPECT_EQ(refusal(other, 4), "is not a regular file") << other;
  std::remove(path.c_str());
  EXPECT_NE(refusal("/proc/self/stat", 4096).find("read: "), std::string::npos);
}

TEST(BoundedText, CountsNestedBracketsOutsideStrings) {
  EXPECT_EQ(json_depth(""), 0);
  EXPECT_EQ(json_depth("[]"), 1);
  EXPECT_EQ(json_depth("{\"a\": [1, {\"b\": []}], \"c\": [[]]}"), 4);
  EXPECT_EQ(json_depth("[\"[[[\", \"a\\\"[[[\", \"\\\\\", []]"), 2);
  EXPECT_EQ(json_depth("]]]["), 0);
  EXPECT_EQ(json_depth(std::string(100000, '[')), 100000);
}

}  // namespace
}  // namespace pagedkv
