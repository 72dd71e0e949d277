#include "pagedkv/base/page_format.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace pagedkv {
namespace {

TEST(PageFormat, NamesReadBack) {
  for (PageFormat format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16, PageFormat::kQ8,
                            PageFormat::kQ6, PageFormat::kQ4})
    EXPECT_EQ(parse_page_format(page_format_name(format)), format);
}

TEST(PageFormat, KnowsFamiliarSpellings) {
  for (const char* word : {"f16", "F16", "float16", "fp16", "half", "off", "auto"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kF16) << word;
  for (const char* word : {"q8", "Q8_0", "q8-0", "int8"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kQ8) << word;
  for (const char* word : {"bf16", "bfloat16", "BF16"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kBF16) << word;
  for (const char* word : {"q6", "q6_0", "int6"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kQ6) << word;
  for (const char* word : {"q4", "Q4_0", "q4-0", "int4"})
    EXPECT_EQ(parse_page_format(word), PageFormat::kQ4) << word;
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
  for (int dim : {2, 6, 66, 512}) EXPECT_NO_THROW(check_head_dim(PageFormat::kQ4, dim));
  for (int dim : {4, 100, 512}) EXPECT_NO_THROW(check_head_dim(PageFormat::kQ6, dim));
}

TEST(PageFormat, NamesTheHeadDimTheFormatAndTheRule) {
  const auto error = [](PageFormat format, int dim) -> std::string {
    try {
      check_head_dim(format, dim);
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(error(PageFormat::kQ4, 33), "head_dim 33 for q4 pages: must be even");
  EXPECT_EQ(error(PageFormat::kQ6, 34), "head_dim 34 for q6 pages: must be a multiple of 4");
  EXPECT_EQ(error(PageFormat::kBF16, 0), "head_dim 0 for bf16 pages: must be in 1..512");
}

}  // namespace
}  // namespace pagedkv
