// Rows for tests of PagedKVCache.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "pagedkv/base/tensor.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv::testing {

// DATA(seed)[...] of the field cases: splitmix64, values in [-1, 1).
inline std::vector<float> data(uint64_t seed, int64_t count) {
  std::vector<float> out;
  uint64_t state = seed;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    out.push_back(static_cast<float>(z >> 40) / 8388608.0f - 1.0f);
  }
  return out;
}

// [num_heads, num_tokens, head_dim] of random rows in the dtype.
inline Tensor rows(uint64_t seed, int64_t heads, int64_t tokens, int64_t dim,
                   DType dtype = DType::kF32) {
  Tensor out(dtype, heads, tokens, dim);
  from_floats(data(seed, heads * tokens * dim).data(), out.view());
  return out;
}

inline std::vector<float> floats(const Tensor& tensor) {  // [token, head, dim]
  std::vector<float> out(
      static_cast<size_t>(tensor.num_heads * tensor.num_tokens * tensor.head_dim));
  to_floats(tensor, out.data());
  return out;
}

// What two tensors have in common: dtype, shape and every bit.
inline bool same(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.num_heads == b.num_heads && a.num_tokens == b.num_tokens &&
         a.head_dim == b.head_dim && a.bytes == b.bytes;
}

inline Tensor copy_of(const TensorView& view) {
  Tensor out(view.dtype, view.num_heads, view.num_tokens, view.head_dim);
  std::vector<float> rows(static_cast<size_t>(view.num_heads * view.num_tokens * view.head_dim));
  to_floats(view, rows.data());
  from_floats(rows.data(), out.view());
  return out;
}

// The text of the exception of type E that f throws; empty where it throws none.
template <class E, class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

}  // namespace pagedkv::testing
