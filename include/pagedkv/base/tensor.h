// Keys, values and queries as a caller holds them: element type, shape and strides. Views own nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] pagedkv {

enum class DType : uint8_t { kF32, kF16, kBF16 };  // bf16: the upper half of an f32

// "float32", "float16", "bfloat16".
std::string_view dtype_name(DType dtype) noexcept;
// Takes the names above and f32, f16, bf16. Throws std::invalid_argument naming the word.
DType parse_dtype(std::string_view word);
constexpr int64_t dtype_bytes(DType dtype) noexcept { return dtype == DType::kF32 ? 4 : 2; }

// Rows of one sequence: for each head and token, head_dim elements side by side. Element (h, t, d) lies
// at element h * head_stride + t * token_stride + d of data.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t num_heads = 0, num_tokens = 0, head_dim = 0;
  int64_t head_stride = 0, token_stride = 0;  // in elements

  // [num_heads, num_tokens, head_dim]: what mlx and the seed hand over, without its batch of 1.
  static TensorView heads_first(const void* data, DType dtype, int64_t num_heads,
                                int64_t num_tokens, int64_t head_dim) noexcept {
    return {data, dtype, num_heads, num_tokens, head_dim, num_tokens * head_dim, head_dim};
  }
  // [num_tokens, num_heads, head_dim]: what vLLM and FlashInfer hand over.
  static TensorView tokens_first(const void* data, DType dtype, int64_t num_tokens,
                                 int64_t num_heads, int64_t head_dim) noexcept {
    return {data, dtype, num_heads, num_tokens, head_dim, head_dim, num_heads * head_dim};
  }
  // Tokens [first, first + count), which must exist.
  TensorView tokens(int64_t first, int64_t count) const noexcept;
};

// The same, to write into.
struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t num_heads = 0, num_tokens = 0, head_dim = 0;
  int64_t head_stride = 0, token_stride = 0;  // in elements
  MutableTensorView tokens(int64_t first, int64_t count) const noexcept;
  operator TensorView() const noexcept {
    return {data, dtype, num_heads, num_tokens, head_dim, head_stride, token_stride};
  }
};

// Rows that own their memory: [num_heads, num_tokens, head_dim], contiguous.
struct Tensor {
  Tensor() = default;
  Tensor(DType dtype, int64_t num_heads, int64_t num_tokens, int64_t head_dim);  // zeros
  TensorView view() const noexcept;
  MutableTensorView view() noexcept;
  operator TensorView() const noexcept { return view(); }
  bool empty() const noexcept { return bytes.empty(); }

  DType dtype = DType::kF32;
  int64_t num_heads = 0, num_tokens = 0, head_dim = 0;
  std::vector<std::byte> bytes;
};

// Throws std::invalid_argument naming `name` and the value unless data is set (where there are
// elements), sizes are not negative and strides keep rows apart.
void check_tensor(const TensorView& tensor, std::string_view name);

// Element for element, token by token: `out` [num_tokens, num_heads, head_dim] floats, contiguous. Exact.
void to_floats(const TensorView& tensor, float* out) noexcept;
// The other way, rounding to nearest even.
void from_floats(const float* rows, const MutableTensorView& out) noexcept;

}  // namespace pagedkv
