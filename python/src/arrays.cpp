#include "arrays.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pagedkv::python {
namespace {

// str(object), which may fail; for messages.
std::string text_of(nb::handle object) {
  const nb::object text = nb::steal(PyObject_Str(object.ptr()));
  const char* utf8 = text.is_valid() ? PyUnicode_AsUTF8(text.ptr()) : nullptr;
  if (utf8 != nullptr) return utf8;
  PyErr_Clear();
  return "?";
}

std::string text_of_shape(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text.append(i == 0 ? "" : ", ").append(std::to_string(shape[i]));
  return text + "]";
}

std::string type_text(nb::handle object) { return text_of(object.type()); }

// The dtype as its library writes it, for messages.
std::string dtype_text(nb::handle array) {
  if (!nb::hasattr(array, "dtype")) return type_text(array);
  return text_of(nb::object(array.attr("dtype")));
}

// numpy has no bfloat16 of its own; ml_dtypes gives it one that DLPack does not know.
bool is_numpy_bfloat16(nb::handle array) {
  return nb::hasattr(array, "dtype") && nb::hasattr(array, "view") &&
         nb::hasattr(array.attr("dtype"), "name") && dtype_text(array) == "bfloat16" &&
         nb::hasattr(array, "__array_interface__");
}

void check_device(nb::handle array, const char* name) {
  if (!nb::hasattr(array, "__dlpack_device__")) return;
  const nb::object device = array.attr("__dlpack_device__")();
  const long type = PyLong_AsLong(nb::object(device[0]).ptr());  // numpy's is an enumerator
  if (type == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  // Unified memory (Metal, CUDA managed) is for those who import it: mlx answers kDLCPU or kDLMetal by its default
  // device, and its arrays are in memory that the CPU reads either way.
  if (type == nb::device::cpu::value || type == nb::device::metal::value) return;
  throw nb::value_error((std::string(name) + " are on device (" + std::to_string(type) + ", " +
                         text_of(nb::object(device[1])) +
                         "): pages are in CPU memory, copy them there first")
                            .c_str());
}

[[noreturn]] void refuse_dtype(nb::handle array, const char* name) {
  const std::string dtype = dtype_text(array);
  for (const char* known : {"float32", "float16", "bfloat16"})
    if (dtype.ends_with(known))
      throw nb::type_error(
          (std::string(name) + ": the " + dtype +
           " array cannot be read: inside a graph that is being compiled, or of an "
           "array that asks for gradients, there are no values to be had")
              .c_str());
  throw nb::type_error((std::string(name) + ": dtype " + dtype_text(array) +
                        ": must be float32, float16 or bfloat16")
                           .c_str());
}

template <class T>
nb::object owned(std::vector<T> values, const std::vector<size_t>& shape, nb::dlpack::dtype dtype) {
  auto* held = new std::vector<T>(std::move(values));
  const nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  static T nothing{};  // numpy wants an address, also of no element
  return nb::cast(nb::ndarray<nb::numpy>(held->empty() ? &nothing : held->data(), shape.size(),
                                         shape.data(), owner, nullptr, dtype));
}

constexpr nb::dlpack::dtype kFloat16{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
constexpr nb::dlpack::dtype kBFloat16{static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

// A uint16 array of numpy as the bfloat16 values whose bits it has.
nb::object as_bfloat16(nb::handle bits) {
  return bits.attr("view")(nb::module_::import_("ml_dtypes").attr("bfloat16"));
}

nb::dlpack::dtype page_dtype(PageFormat format) {
  switch (format) {
    case PageFormat::kF32:
      return nb::dtype<float>();
    case PageFormat::kF16:
      return kFloat16;
    case PageFormat::kBF16:
      return kBFloat16;
    case PageFormat::kQ8:
      return nb::dtype<int8_t>();
    case PageFormat::kQ6:
    case PageFormat::kQ4:
      break;
  }
  return nb::dtype<uint8_t>();
}

// Calls f with the offset, in elements, of each row along the last axis, in C order.
template <class F>
void for_each_row(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, F&& f) {
  const size_t outer = shape.empty() ? 0 : shape.size() - 1;
  int64_t rows = 1;
  for (size_t axis = 0; axis < outer; ++axis) rows *= shape[axis];
  std::vector<int64_t> index(outer, 0);
  for (int64_t row = 0, offset = 0; row < rows; ++row) {
    f(offset);
    for (size_t axis = outer; axis-- > 0;) {
      offset += strides[axis];
      if (++index[axis] < shape[axis]) break;
      offset -= strides[axis] * shape[axis];
      index[axis] = 0;
    }
  }
}

}  // namespace

FloatArray::FloatArray(nb::handle array, const char* name) : name_(name) {
  nb::object plain = nb::borrow(array);
  if (nb::hasattr(plain.type(), "resolve_neg"))
    plain = plain.attr("resolve_neg")();  // torch's lazy minus
  const bool read = nb::try_cast(plain, array_);
  bool bits = false;
  if (!read) {
    bits = is_numpy_bfloat16(plain);
    if (bits) plain = plain.attr("view")("uint16");
    if (!bits || !nb::try_cast(plain, array_)) refuse(plain);
  }
  take_layout(array, bits);
  make_rows_contiguous();
}

// Why there is no reading an array.
[[noreturn]] void FloatArray::refuse(nb::handle array) const {
  check_device(array, name_);
  if (!nb::hasattr(array, "__dlpack__") && !nb::hasattr(array, "__array__"))
    throw nb::type_error((std::string(name_) + ": " + type_text(array) +
                          " is no array: must be one of numpy, torch, mlx or another with DLPack")
                             .c_str());
  refuse_dtype(array, name_);
}

void FloatArray::take_layout(nb::handle array, bool bfloat16_bits) {
  const nb::dlpack::dtype dtype = array_.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (bfloat16_bits || (code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16))
    dtype_ = DType::kBF16;
  else if (code == nb::dlpack::dtype_code::Float && dtype.bits == 32)
    dtype_ = DType::kF32;
  else if (code == nb::dlpack::dtype_code::Float && dtype.bits == 16)
    dtype_ = DType::kF16;
  else
    refuse_dtype(array, name_);
  data_ = static_cast<const std::byte*>(array_.data());
  for (size_t i = 0; i < array_.ndim(); ++i) {
    shape_.push_back(static_cast<int64_t>(array_.shape(i)));
    strides_.push_back(array_.stride(i));
  }
}

int64_t FloatArray::size() const noexcept {
  int64_t size = 1;
  for (const int64_t n : shape_) size *= n;
  return size;
}

void FloatArray::make_rows_contiguous() {
  // The library reads rows that lie apart; what overlaps (np.broadcast_to) or runs backwards is copied.
  bool apart = !shape_.empty() && (strides_.back() == 1 || shape_.back() <= 1);
  for (size_t axis = 0; axis + 1 < shape_.size(); ++axis)
    apart = apart && (shape_[axis] <= 1 || strides_[axis] >= shape_.back());
  if (shape_.empty() || size() == 0 || apart) return;
  const auto width = static_cast<size_t>(dtype_bytes(dtype_));
  copy_.resize(static_cast<size_t>(size()) * width);
  const int64_t dim = shape_.back(), step = strides_.back() * static_cast<int64_t>(width);
  std::byte* to = copy_.data();
  for_each_row(shape_, strides_, [&](int64_t offset) {
    const std::byte* from = data_ + offset * static_cast<int64_t>(width);
    if (strides_.back() == 1)
      std::memcpy(to, from, static_cast<size_t>(dim) * width);
    else
      for (int64_t i = 0; i < dim; ++i)
        std::memcpy(to + static_cast<size_t>(i) * width, from + i * step, width);
    to += static_cast<size_t>(dim) * width;
  });
  data_ = copy_.data();
  for (size_t axis = shape_.size(), stride = 1; axis-- > 0;) {
    strides_[axis] = static_cast<int64_t>(stride);
    stride *= static_cast<size_t>(shape_[axis]);
  }
}

std::string FloatArray::shape_text() const { return text_of_shape(shape_); }

namespace {

// Strides of axes with at most one element mean nothing; the library wants rows that do not overlap.
TensorView view_of(const void* data, DType dtype, int64_t heads, int64_t tokens, int64_t dim,
                   int64_t head_stride, int64_t token_stride) {
  if (tokens <= 1) token_stride = dim;
  if (heads <= 1) head_stride = std::max<int64_t>(dim, tokens * token_stride);
  return {data, dtype, heads, tokens, dim, head_stride, token_stride};
}

}  // namespace

TensorView FloatArray::heads_first() const {
  const size_t first = ndim() == 4 ? 1 : 0;
  if (ndim() < 3 || ndim() > 4 || (ndim() == 4 && shape_[0] != 1))
    throw nb::value_error((std::string(name_) + " of shape " + shape_text() +
                           ": must be [heads, tokens, head_dim], or with a batch of 1 before them")
                              .c_str());
  return view_of(data_, dtype_, shape_[first], shape_[first + 1], shape_[first + 2],
                 strides_[first], strides_[first + 1]);
}

TensorView FloatArray::tokens_first() const {
  if (ndim() != 3)
    throw nb::value_error(
        (std::string(name_) + " of shape " + shape_text() + ": must be [tokens, heads, head_dim]")
            .c_str());
  return view_of(data_, dtype_, shape_[1], shape_[0], shape_[2], strides_[1], strides_[0]);
}

std::vector<float> FloatArray::floats() const {
  // One row after the other: as many tokens as there are rows, of one head.
  const int64_t dim = shape_.empty() ? 1 : shape_.back();
  std::vector<float> out(static_cast<size_t>(size()));
  if (out.empty()) return out;
  const auto width = static_cast<int64_t>(dtype_bytes(dtype_));
  float* to = out.data();
  for_each_row(shape_, strides_, [&](int64_t offset) {
    to_floats(TensorView::heads_first(data_ + offset * width, dtype_, 1, 1, dim), to);
    to += dim;
  });
  return out;
}

namespace {

// rows 0: [columns].
void check_shape(const std::vector<int64_t>& shape, int64_t rows, int64_t columns,
                 const char* name) {
  std::vector<int64_t> want{columns};
  if (rows != 0) want.insert(want.begin(), rows);
  const size_t extra = shape.size() > want.size() && rows != 0 ? shape.size() - want.size() : 0;
  if (shape.size() - extra == want.size() &&
      std::all_of(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(extra),
                  [](int64_t n) { return n == 1; }) &&
      std::equal(want.begin(), want.end(), shape.begin() + static_cast<std::ptrdiff_t>(extra)))
    return;
  throw nb::value_error(
      (std::string(name) + " of shape " + text_of_shape(shape) + ": must be " + text_of_shape(want))
          .c_str());
}

}  // namespace

std::vector<float> FloatArray::floats(int64_t rows, int64_t columns) const {
  check_shape(shape_, rows, columns, name_);
  return floats();
}

std::vector<uint8_t> mask_bytes(nb::handle array, int64_t rows, int64_t columns, const char* name) {
  nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig> mask;
  if (!nb::try_cast(array, mask, true))
    throw nb::type_error((std::string(name) + ": " + type_text(array) + " is no array").c_str());
  const nb::dlpack::dtype dtype = mask.dtype();
  const auto code = static_cast<nb::dlpack::dtype_code>(dtype.code);
  if (dtype.bits != 8 ||
      (code != nb::dlpack::dtype_code::Bool && code != nb::dlpack::dtype_code::UInt))
    throw nb::type_error(
        (std::string(name) + ": dtype " + dtype_text(array) + ": must be bool").c_str());
  std::vector<int64_t> shape;
  for (size_t i = 0; i < mask.ndim(); ++i) shape.push_back(static_cast<int64_t>(mask.shape(i)));
  check_shape(shape, rows, columns, name);
  const auto* data = static_cast<const uint8_t*>(mask.data());
  return {data, data + mask.size()};
}

nb::object to_array(Tensor tensor, const std::vector<size_t>& shape) {
  switch (tensor.dtype) {
    case DType::kF32:
      return owned(std::move(tensor.bytes), shape, nb::dtype<float>());
    case DType::kF16:
      return owned(std::move(tensor.bytes), shape, kFloat16);
    case DType::kBF16:
      break;
  }
  return as_bfloat16(owned(std::move(tensor.bytes), shape, nb::dtype<uint16_t>()));
}

nb::object to_array(std::vector<float> values, const std::vector<size_t>& shape) {
  return owned(std::move(values), shape, nb::dtype<float>());
}
nb::object to_array(std::vector<int32_t> values, const std::vector<size_t>& shape) {
  return owned(std::move(values), shape, nb::dtype<int32_t>());
}
nb::object to_array(std::vector<int64_t> values, const std::vector<size_t>& shape) {
  return owned(std::move(values), shape, nb::dtype<int64_t>());
}
nb::object to_array(std::vector<uint8_t> values, const std::vector<size_t>& shape, bool is_bool) {
  return owned(std::move(values), shape, is_bool ? nb::dtype<bool>() : nb::dtype<uint8_t>());
}
nb::object to_array(std::vector<std::byte> values, const std::vector<size_t>& shape,
                    bool is_signed) {
  return owned(std::move(values), shape, is_signed ? nb::dtype<int8_t>() : nb::dtype<uint8_t>());
}

nb::object to_object(std::unique_ptr<Exports::View> view) {
  return nb::capsule(view.release(),
                     [](void* p) noexcept { delete static_cast<Exports::View*>(p); });
}

void Exports::check_none(const char* what) const {
  if (const int64_t count = count_->load(); count != 0)
    throw nb::buffer_error((std::string(what) + ": views of pages are alive (" +
                            std::to_string(count) + "); delete them first")
                               .c_str());
}

nb::tuple page_views(const PageArray& pages, int64_t num_pages, int page_size, int num_kv_heads,
                     nb::handle owner) {
  const nb::dlpack::dtype dtype = page_dtype(pages.format);
  const auto row = static_cast<size_t>(row_bytes(pages.format, pages.head_dim)) * 8 / dtype.bits;
  const auto both = [&](void* data, size_t width, nb::dlpack::dtype type) {
    const size_t shape[] = {static_cast<size_t>(num_pages), static_cast<size_t>(page_size),
                            static_cast<size_t>(num_kv_heads), width};
    const bool bfloat16 = pages.format == PageFormat::kBF16 && type == dtype;
    nb::object array = nb::cast(nb::ndarray<nb::numpy>(data, 4, shape, owner, nullptr,
                                                       bfloat16 ? nb::dtype<uint16_t>() : type));
    if (bfloat16) array = as_bfloat16(array);
    return nb::make_tuple(nb::ndarray<nb::array_api>(data, 4, shape, owner, nullptr, type), array);
  };
  nb::object scales = nb::none();
  if (pages.scales != nullptr) scales = both(pages.scales, 1, nb::dtype<float>());
  return nb::make_tuple(both(pages.data, row, dtype), scales);
}

}  // namespace pagedkv::python
