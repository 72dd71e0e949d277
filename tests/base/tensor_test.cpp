#include "pagedkv/base/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pagedkv {
namespace {

std::string error_of(const TensorView& tensor) {
  try {
    check_tensor(tensor, "keys");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(Tensor, DTypesReadBackTheirNames) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
  EXPECT_EQ(parse_dtype("f32"), DType::kF32);
  EXPECT_EQ(parse_dtype("f16"), DType::kF16);
  EXPECT_EQ(parse_dtype("bf16"), DType::kBF16);
  try {
    parse_dtype("int8");
    ADD_FAILURE();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("\"int8\""), std::string::npos);
  }
}

// Element (h, t, d) of either layout is 100 h + 10 t + d.
TEST(Tensor, BothLayoutsGiveTheSameRows) {
  constexpr int kHeads = 2, kTokens = 3, kDim = 4;
  std::vector<float> heads_first, tokens_first, rows(kHeads * kTokens * kDim);
  for (int h = 0; h < kHeads; ++h)
    for (int t = 0; t < kTokens; ++t)
      for (int d = 0; d < kDim; ++d) heads_first.push_back(100.0f * h + 10.0f * t + d);
  for (int t = 0; t < kTokens; ++t)
    for (int h = 0; h < kHeads; ++h)
      for (int d = 0; d < kDim; ++d) tokens_first.push_back(100.0f * h + 10.0f * t + d);
  to_floats(TensorView::heads_first(heads_first.data(), DType::kF32, kHeads, kTokens, kDim),
            rows.data());
  EXPECT_EQ(rows, tokens_first);
  std::fill(rows.begin(), rows.end(), -1.0f);
  const TensorView view =
      TensorView::tokens_first(tokens_first.data(), DType::kF32, kTokens, kHeads, kDim);
  to_floats(view, rows.data());
  EXPECT_EQ(rows, tokens_first);
  to_floats(view.tokens(2, 1), rows.data());
  EXPECT_EQ(rows[0], 20.0f);
  EXPECT_EQ(rows[4], 120.0f);
}

TEST(Tensor, EveryDTypeComesBackAsItWas) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Tensor tensor(dtype, 3, 5, 2);
    EXPECT_EQ(tensor.bytes.size(), static_cast<size_t>(30 * dtype_bytes(dtype)));
    std::vector<float> rows(30), back(30, -1.0f);
    to_floats(tensor, back.data());
    EXPECT_EQ(back, rows) << "zeros at first";
    std::iota(rows.begin(), rows.end(), -14.5f);
    from_floats(rows.data(), tensor.view());
    to_floats(tensor, back.data());
    EXPECT_EQ(back, rows) << dtype_name(dtype);
  }
}

TEST(Tensor, RoundsToNearestEven) {
  const float x[] = {1.0f + 0x1p-11f, 1.0f + 3 * 0x1p-11f, 1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f};
  float back[4];
  Tensor half(DType::kF16, 1, 1, 2), upper(DType::kBF16, 1, 1, 2);
  from_floats(x, half.view());
  to_floats(half, back);
  EXPECT_EQ(back[0], 1.0f);
  EXPECT_EQ(back[1], 1.0f + 0x1p-9f);
  from_floats(x + 2, upper.view());
  to_floats(upper, back);
  EXPECT_EQ(back[0], 1.0f);
  EXPECT_EQ(back[1], 1.0f + 0x1p-6f);
}

TEST(Tensor, WritesItsOwnElementsOnly) {
  std::vector<uint16_t> memory(40, 0x7777);
  MutableTensorView view{memory.data() + 4, DType::kBF16, 2, 3, 2, 16, 5};
  const std::vector<float> ones(12, 1.0f);
  from_floats(ones.data(), view);
  for (int i = 0; i < 40; ++i) {
    const int at = i - 4, in_head = at % 16;
    const bool own = at >= 0 && at < 32 && in_head % 5 < 2 && in_head < 15;
    EXPECT_EQ(memory[i], own ? 0x3f80 : 0x7777) << i;
  }
}

TEST(Tensor, CheckNamesWhatIsWrong) {
  float x[64] = {};
  EXPECT_EQ(error_of(TensorView::heads_first(x, DType::kF32, 2, 4, 8)), "");
  EXPECT_EQ(error_of(TensorView::tokens_first(x, DType::kF32, 4, 2, 8)), "");
  EXPECT_EQ(error_of(TensorView::heads_first(nullptr, DType::kF32, 2, 0, 8)), "");
  EXPECT_EQ(error_of({x, DType::kF32, 1, 1, 64, 0, 0}), "") << "strides of one row mean nothing";
  const auto says = [](const TensorView& tensor, const std::string& text) {
    const std::string error = error_of(tensor);
    return error.rfind("keys: ", 0) == 0 && error.find(text) != std::string::npos;
  };
  EXPECT_TRUE(says(TensorView::heads_first(nullptr, DType::kF32, 2, 4, 8), "data is null"));
  EXPECT_TRUE(says(TensorView::heads_first(x, DType::kF32, -1, 4, 8), "num_heads -1"));
  EXPECT_TRUE(says(TensorView::heads_first(x, DType::kF32, 2, -4, 8), "num_tokens -4"));
  EXPECT_TRUE(says(TensorView::heads_first(x, DType::kF32, 2, 4, -8), "head_dim -8"));
  EXPECT_TRUE(says({x, DType::kF32, 2, 4, 8, 7, 8}, "head_stride 7"));
  EXPECT_TRUE(says({x, DType::kF32, 2, 4, 8, 32, 0}, "token_stride 0"));
  EXPECT_TRUE(says({x, DType::kF32, 2, 4, 8, 31, 8}, "head_stride 31 and token_stride 8"));
  EXPECT_TRUE(says({x, DType::kF32, 2, 4, 8, 8, 15}, "head_stride 8 and token_stride 15"));
}

}  // namespace
}  // namespace pagedkv
