// Arrays of numpy, torch, mlx and whatever else speaks DLPack, as the library's views, and back.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pagedkv/base/tensor.h"
#include "pagedkv/kernels/pages.h"

namespace pagedkv::python {

namespace nb = nanobind;

// An array in CPU memory, float32, float16 or bfloat16 (also numpy's of ml_dtypes), without a copy where its last
// axis is contiguous. Throws nb::type_error (no array, another dtype) and nb::value_error (another device), naming
// `name` and what was given. Keeps the array alive.
class FloatArray {
 public:
  FloatArray(nb::handle array, const char* name);

  size_t ndim() const noexcept { return shape_.size(); }
  int64_t shape(size_t axis) const noexcept { return shape_[axis]; }
  int64_t size() const noexcept;
  DType dtype() const noexcept { return dtype_; }
  std::string shape_text() const;

  // [1, num_heads, num_tokens, head_dim] or without the batch of 1; nb::value_error for others.
  TensorView heads_first() const;
  // [num_tokens, num_heads, head_dim].
  TensorView tokens_first() const;
  // All elements, contiguous, as floats.
  std::vector<float> floats() const;
  // The same of [rows, columns], or where rows is 0 of [columns]; nb::value_error for other shapes.
  std::vector<float> floats(int64_t rows, int64_t columns) const;

 private:
  [[noreturn]] void refuse(nb::handle array) const;
  void take_layout(nb::handle array, bool bfloat16_bits);
  void make_rows_contiguous();

  const char* name_;
  nb::ndarray<nb::ro, nb::device::cpu> array_;
  const std::byte* data_ = nullptr;
  DType dtype_ = DType::kF32;
  std::vector<int64_t> shape_, strides_;  // strides in elements
  std::vector<std::byte> copy_;           // where rows were not contiguous or overlapped
};

// A mask, bool or uint8 [rows, columns] (axes of one element may stand before them), as bytes.
std::vector<uint8_t> mask_bytes(nb::handle array, int64_t rows, int64_t columns, const char* name);

// numpy arrays that own their elements; bfloat16 as ml_dtypes' dtype.
nb::object to_array(Tensor tensor, const std::vector<size_t>& shape);
nb::object to_array(std::vector<float> values, const std::vector<size_t>& shape);
nb::object to_array(std::vector<int32_t> values, const std::vector<size_t>& shape);
nb::object to_array(std::vector<int64_t> values, const std::vector<size_t>& shape);
nb::object to_array(std::vector<uint8_t> values, const std::vector<size_t>& shape, bool is_bool);
nb::object to_array(std::vector<std::byte> values, const std::vector<size_t>& shape,
                    bool is_signed);

// How many views of its pages a cache or pool has given out that still live. Memory under them must stay.
class Exports {
 public:
  // Counts as one view while it lives, and keeps the pages alive.
  struct View {
    View(std::shared_ptr<const void> p, std::shared_ptr<std::atomic<int64_t>> c)
        : pages(std::move(p)), count(std::move(c)) {
      ++*count;
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() { --*count; }
    std::shared_ptr<const void> pages;
    std::shared_ptr<std::atomic<int64_t>> count;
  };
  std::unique_ptr<View> add(std::shared_ptr<const void> pages) const {
    return std::make_unique<View>(std::move(pages), count_);
  }
  // Throws nb::buffer_error naming `what` where there is one. Needs no GIL.
  void check_none(const char* what) const;

 private:
  std::shared_ptr<std::atomic<int64_t>> count_ = std::make_shared<std::atomic<int64_t>>(0);
};

// A Python object that holds the view.
nb::object to_object(std::unique_ptr<Exports::View> view);

// Views of pages without a copy: (elements or codes, scales or None), each as (array for DLPack, numpy's).
nb::tuple page_views(const PageArray& pages, int64_t num_pages, int page_size, int num_kv_heads,
                     nb::handle owner);

}  // namespace pagedkv::python
