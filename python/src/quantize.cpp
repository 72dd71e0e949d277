#include "pagedkv/base/quantize.h"

#include <nanobind/stl/string.h>

#include <span>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "pagedkv/base/page_format.h"
#include "pagedkv/core/kv_quant.h"

namespace pagedkv::python {
namespace {

nb::tuple quantize(nb::handle x, int bits) {
  const FloatArray array(x, "x");
  if (array.ndim() == 0 || array.shape(array.ndim() - 1) < 1)
    throw nb::value_error(
        ("x of shape " + array.shape_text() + ": needs rows along its last axis").c_str());
  const auto dim = static_cast<int>(std::min<int64_t>(array.shape(array.ndim() - 1), INT32_MAX));
  const int packed = packed_dim(dim, bits);
  const std::vector<float> values = array.floats();
  const auto rows = static_cast<size_t>(array.size() / dim);
  std::vector<std::byte> codes(rows * static_cast<size_t>(packed));
  std::vector<float> scales(rows);
  {
    const GilRelease release;
    quantize_symmetric(values, dim, bits, codes, scales);
  }
  std::vector<size_t> shape;
  for (size_t i = 0; i + 1 < array.ndim(); ++i)
    shape.push_back(static_cast<size_t>(array.shape(i)));
  shape.push_back(static_cast<size_t>(packed));
  nb::object out = to_array(std::move(codes), shape, bits == 8);
  shape.back() = 1;
  return nb::make_tuple(out, to_array(std::move(scales), shape));
}

nb::object dequantize(nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig> codes,
                      nb::ndarray<const float, nb::ro, nb::device::cpu, nb::c_contig> scales,
                      int bits, int head_dim) {
  const auto packed = static_cast<size_t>(packed_dim(head_dim, bits));
  const auto code = static_cast<nb::dlpack::dtype_code>(codes.dtype().code);
  if (codes.dtype().bits != 8 ||
      code != (bits == 8 ? nb::dlpack::dtype_code::Int : nb::dlpack::dtype_code::UInt))
    throw nb::type_error(bits == 8 ? "codes: must be int8" : "codes: must be uint8");
  if (codes.ndim() == 0 || codes.shape(codes.ndim() - 1) != packed)
    throw nb::value_error(
        ("codes have " + std::to_string(codes.ndim() == 0 ? 0 : codes.shape(codes.ndim() - 1)) +
         " bytes a row: head_dim " + std::to_string(head_dim) + " takes " + std::to_string(packed))
            .c_str());
  const size_t rows = packed == 0 ? 0 : codes.size() / packed;
  if (scales.size() != rows)
    throw nb::value_error(
        (std::to_string(scales.size()) + " scales for " + std::to_string(rows) + " rows").c_str());
  std::vector<float> x(rows * static_cast<size_t>(head_dim));
  {
    const GilRelease release;
    dequantize_symmetric({static_cast<const std::byte*>(codes.data()), codes.size()},
                         {scales.data(), scales.size()}, head_dim, bits, x);
  }
  std::vector<size_t> shape;
  for (size_t i = 0; i + 1 < codes.ndim(); ++i) shape.push_back(codes.shape(i));
  shape.push_back(static_cast<size_t>(head_dim));
  return to_array(std::move(x), shape);
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_symmetric", &quantize, nb::arg("x").none(), nb::arg("bits"),
        nb::sig(
            "def quantize_symmetric(x: object, bits: int) -> tuple[numpy.ndarray, numpy.ndarray]"),
        "Rows along the last axis, [..., D] -> codes [..., packed_dim(D, bits)] (int8 for bits 8, "
        "else uint8) and "
        "scales [..., 1] float32.");
  m.def("dequantize_symmetric", &dequantize, nb::arg("codes"), nb::arg("scales"), nb::arg("bits"),
        nb::arg("head_dim"),
        nb::sig("def dequantize_symmetric(codes: object, scales: object, bits: int, head_dim: int) "
                "-> numpy.ndarray"),
        "code * scale, [..., head_dim] float32.");
  m.def("packed_dim", &packed_dim, nb::arg("head_dim"), nb::arg("bits"), "Bytes of a row's codes.");
  m.def("compression_ratio", &compression_ratio, nb::arg("head_dim"), nb::arg("bits"),
        "Bytes of K and V in float16 over those of their codes and scales.");
  m.def(
      "parse_quant_mode", [](const std::string& word) { return PagedKVQuantConfig(word).mode(); },
      nb::arg("word"), "The mode that a word names: off, q8, q6, q4, or k=MODE,v=MODE.");
  m.def(
      "quant_mode_from_env",
      [] { return PagedKVQuantConfig(paged_kv_quant_mode_from_env()).mode(); },
      "The mode that MTPLX_VLLM_METAL_PAGED_KV_QUANT, else MTPLX_PAGED_KV_QUANT asks for, else "
      "off.");
  m.def(
      "parse_page_format",
      [](const std::string& word) {
        return std::string(page_format_name(parse_page_format(word)));
      },
      nb::arg("word"), "The page format that a word names: f32, f16, bf16, q8, q6 or q4.");
}

}  // namespace pagedkv::python
