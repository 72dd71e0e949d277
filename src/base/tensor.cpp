#include "pagedkv/base/tensor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/half.h"

namespace pagedkv {
namespace {

[[noreturn]] void fail(const std::string& text) { throw std::invalid_argument(text); }

std::string str(int64_t value) { return std::to_string(value); }

const std::byte* element(const TensorView& tensor, int64_t head, int64_t token) noexcept {
  return static_cast<const std::byte*>(tensor.data) +
         (head * tensor.head_stride + token * tensor.token_stride) * dtype_bytes(tensor.dtype);
}

// Rows `inner` elements apart, `count` of them, then others `outer` apart: none overlaps another.
bool rows_apart(int64_t inner, int64_t count, int64_t outer, int64_t head_dim) noexcept {
  return inner >= head_dim && outer >= head_dim && (outer - head_dim) / inner >= count - 1;
}

// Calls f(pointer to a row of the tensor, row of the contiguous floats), token by token.
template <class F>
void for_each_row(const TensorView& tensor, F&& f) {
  int64_t at = 0;
  for (int64_t t = 0; t < tensor.num_tokens; ++t)
    for (int64_t h = 0; h < tensor.num_heads; ++h, at += tensor.head_dim)
      f(element(tensor, h, t), at);
}

}  // namespace

std::string_view dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
  }
  return "unknown";
}

DType parse_dtype(std::string_view word) {
  if (word == "float32" || word == "f32") return DType::kF32;
  if (word == "float16" || word == "f16") return DType::kF16;
  if (word == "bfloat16" || word == "bf16") return DType::kBF16;
  fail("dtype \"" + std::string(word) + "\": exist are float32, float16, bfloat16");
}

TensorView TensorView::tokens(int64_t first, int64_t count) const noexcept {
  TensorView part = *this;
  if (data) part.data = element(*this, 0, first);
  part.num_tokens = count;
  return part;
}

MutableTensorView MutableTensorView::tokens(int64_t first, int64_t count) const noexcept {
  MutableTensorView part = *this;
  if (data) part.data = static_cast<std::byte*>(data) + first * token_stride * dtype_bytes(dtype);
  part.num_tokens = count;
  return part;
}

Tensor::Tensor(DType dtype, int64_t num_heads, int64_t num_tokens, int64_t head_dim)
    : dtype(dtype),
      num_heads(num_heads),
      num_tokens(num_tokens),
      head_dim(head_dim),
      bytes(static_cast<size_t>(num_heads * num_tokens * head_dim * dtype_bytes(dtype))) {}

TensorView Tensor::view() const noexcept {
  return TensorView::heads_first(bytes.data(), dtype, num_heads, num_tokens, head_dim);
}

MutableTensorView Tensor::view() noexcept {
  return {bytes.data(), dtype, num_heads, num_tokens, head_dim, num_tokens * head_dim, head_dim};
}

void check_tensor(const TensorView& tensor, std::string_view name) {
  const std::string of(name);
  if (tensor.num_heads < 0) fail(of + ": num_heads " + str(tensor.num_heads) + " is negative");
  if (tensor.dtype > DType::kBF16)
    fail(of + ": dtype " + str(static_cast<int64_t>(tensor.dtype)) + " is unknown");
  if (tensor.num_tokens < 0) fail(of + ": num_tokens " + str(tensor.num_tokens) + " is negative");
  if (tensor.head_dim < 0) fail(of + ": head_dim " + str(tensor.head_dim) + " is negative");
  if (tensor.num_heads == 0 || tensor.num_tokens == 0 || tensor.head_dim == 0) return;
  if (!tensor.data) fail(of + ": data is null");
  const bool heads = tensor.num_heads > 1, tokens = tensor.num_tokens > 1;
  if (heads && tensor.head_stride < tensor.head_dim)
    fail(of + ": head_stride " + str(tensor.head_stride) + " is less than head_dim " +
         str(tensor.head_dim));
  if (tokens && tensor.token_stride < tensor.head_dim)
    fail(of + ": token_stride " + str(tensor.token_stride) + " is less than head_dim " +
         str(tensor.head_dim));
  if (heads && tokens &&
      !rows_apart(tensor.token_stride, tensor.num_tokens, tensor.head_stride, tensor.head_dim) &&
      !rows_apart(tensor.head_stride, tensor.num_heads, tensor.token_stride, tensor.head_dim))
    fail(of + ": head_stride " + str(tensor.head_stride) + " and token_stride " +
         str(tensor.token_stride) + " make rows overlap");
}

void to_floats(const TensorView& tensor, float* out) noexcept {
  const int64_t n = tensor.head_dim;
  for_each_row(tensor, [&](const std::byte* row, int64_t at) {
    if (tensor.dtype == DType::kF32) {
      std::memcpy(out + at, row, static_cast<size_t>(n) * sizeof(float));
      return;
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(row);
    if (tensor.dtype == DType::kF16)
      for (int64_t e = 0; e < n; ++e) out[at + e] = half_to_float(halves[e]);
    else
      for (int64_t e = 0; e < n; ++e) out[at + e] = bfloat16_to_float(halves[e]);
  });
}

void from_floats(const float* rows, const MutableTensorView& out) noexcept {
  const int64_t n = out.head_dim;
  for_each_row(out, [&](const std::byte* row, int64_t at) {
    auto* bytes = const_cast<std::byte*>(row);  // out's own
    if (out.dtype == DType::kF32) {
      std::memcpy(bytes, rows + at, static_cast<size_t>(n) * sizeof(float));
      return;
    }
    auto* halves = reinterpret_cast<uint16_t*>(bytes);
    if (out.dtype == DType::kF16)
      for (int64_t e = 0; e < n; ++e) halves[e] = float_to_half(rows[at + e]);
    else
      for (int64_t e = 0; e < n; ++e) halves[e] = float_to_bfloat16(rows[at + e]);
  });
}

}  // namespace pagedkv
