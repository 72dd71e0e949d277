#include "pagedkv/base/page_format.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace pagedkv {
namespace {

TEST(PageFormat, NamesReadBack) {
  for (PageFormat format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kQ8})
    EXPECT_EQ(parse_page_format(page_format_name(format)), format);
}

TEST(PageFormat, KnowsFamiliarSpellings) {
  for (const char* word : {"f16", "F16", "float16", "fp16", "half", "off"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kF16) << word;
  for (const char* word : {"q8", "Q8_0", "q8-0", "int8"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kQ8) << word;
  for (const char* word : {"f32", "fp32", "Float32"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kF32) << word;
}

TEST(PageFormat, AnUnknownWordIsNamedBesideWhatExists) {
  try {
    parse_page_format("q3_k");
    ADD_FAILURE();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("\"q3_k\""), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(page_format_names()), std::string::npos);
  }
}

TEST(PageFormat, LimitsHeadDim) {
  for (int dim : {1, 80, 512}) EXPECT_NO_THROW(check_head_dim(PageFormat::kF16, dim));
  for (int dim : {-1, 0, 513})
    EXPECT_THROW(check_head_dim(PageFormat::kQ8, dim), std::invalid_argument);
}

}  // namespace
}  // namespace pagedkv
