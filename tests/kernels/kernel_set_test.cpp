#include "pagedkv/kernels/kernel_set.h"

#include <gtest/gtest.h>

namespace pagedkv {
namespace {

TEST(KernelSets, EndWithTheReference) {
  ASSERT_FALSE(kernel_sets().empty());
  EXPECT_STREQ(kernel_sets().back().name, "reference");
  EXPECT_TRUE(kernel_sets().back().supported());
}

TEST(KernelSets, AreSelectedByName) {
  const std::string before = kernels().name;
  for (const KernelSet& set : kernel_sets())
    if (set.supported()) {
      select_kernels(set.name);
      EXPECT_STREQ(kernels().name, set.name);
    }
  select_kernels(before);
}

TEST(KernelSets, AnUnknownNameIsRefusedNamingWhatExists) {
  const std::string before = kernels().name;
  try {
    select_kernels("sse");
    ADD_FAILURE();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("\"sse\""), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("reference"), std::string::npos) << error.what();
  }
  EXPECT_EQ(kernels().name, before);
}

}  // namespace
}  // namespace pagedkv
