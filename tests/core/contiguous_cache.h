// The plain model that random tests hold PagedKVCache to: every layer's keys and values in one contiguous run, encoded by
// quantize_symmetric() and the conversions of half.h; sizes and counters by the formulas of the headers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/half.h"
#include "pagedkv/base/quantize.h"
#include "pagedkv/base/tensor.h"
#include "pagedkv/core/paged_kv_cache.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::testing {

inline int quant_bits(PagedKVQuantMode mode) {
  return mode == PagedKVQuantMode::kQ8 ? 8 : mode == PagedKVQuantMode::kQ6 ? 6 : 4;
}

// The keys or the values of one layer: rows [tokens, heads, head_dim].
struct ContiguousRows {
  PagedKVQuantMode mode = PagedKVQuantMode::kOff;
  DType dtype = DType::kF32;
  int heads = 0, dim = 0;
  std::vector<std::byte> codes = {};
  std::vector<float> scales = {};

  bool quantised() const { return mode != PagedKVQuantMode::kOff; }
  int64_t row_size() const {
    return quantised() ? packed_dim(dim, quant_bits(mode)) : dim * dtype_bytes(dtype);
  }
  int64_t token_bytes() const { return heads * (row_size() + (quantised() ? 4 : 0)); }
  std::string format() const {
    if (quantised()) return std::string(quant_mode_name(mode));
    return dtype == DType::kF32 ? "f32" : dtype == DType::kF16 ? "f16" : "bf16";
  }

  void append(std::span<const float> rows) {
    const size_t before = codes.size(), num_rows = rows.size() / static_cast<size_t>(dim);
    codes.resize(before + num_rows * static_cast<size_t>(row_size()));
    if (quantised()) {
      const size_t first = scales.size();
      scales.resize(first + num_rows);
      quantize_symmetric(rows, dim, quant_bits(mode), std::span(codes).subspan(before),
                         std::span(scales).subspan(first));
      return;
    }
    std::byte* out = codes.data() + before;
    for (float x : rows) {
      const uint16_t half = dtype == DType::kF16 ? float_to_half(x) : float_to_bfloat16(x);
      if (dtype == DType::kF32)
        std::memcpy(out, &x, 4);
      else
        std::memcpy(out, &half, 2);
      out += dtype_bytes(dtype);
    }
  }

  void cut(int64_t tokens) {
    codes.resize(static_cast<size_t>(tokens * heads * row_size()));
    if (quantised()) scales.resize(static_cast<size_t>(tokens * heads));
  }

  int64_t tokens() const {
    return heads == 0 ? 0 : static_cast<int64_t>(codes.size()) / (heads * row_size());
  }

  // As a read gives them: rounded to the dtype.
  Tensor tensor() const {
    if (codes.empty()) return {};
    const size_t count = static_cast<size_t>(tokens() * heads * dim);
    std::vector<float> x(count);
    if (quantised()) {
      dequantize_symmetric(codes, scales, dim, quant_bits(mode), x);
    } else {
      const std::byte* in = codes.data();
      for (float& v : x) {
        uint16_t half;
        std::memcpy(&half, in, 2);
        if (dtype == DType::kF32)
          std::memcpy(&v, in, 4);
        else
          v = dtype == DType::kF16 ? half_to_float(half) : bfloat16_to_float(half);
        in += dtype_bytes(dtype);
      }
    }
    Tensor out(dtype, heads, tokens(), dim);
    from_floats(x.data(), out.view());
    return out;
  }
};

// What a call must come to.
enum class Outcome { kDone, kInvalid, kCapacity, kMemory };

inline std::vector<float> to_rows(const TensorView& view) {
  std::vector<float> rows(static_cast<size_t>(view.num_tokens * view.num_heads * view.head_dim));
  to_floats(view, rows.data());
  return rows;
}

class ContiguousCache {
 public:
  struct Layer {
    ContiguousRows keys, values;
    int64_t offset() const { return keys.tokens(); }
  };

  explicit ContiguousCache(const PagedKVCacheOptions& o)
      : options(o),
        quant(o.quant.value_or(PagedKVQuantConfig())),
        block_size(o.block_size.value_or(16)),
        blocks(o.num_blocks.value_or(1024)),
        layers(static_cast<size_t>(o.num_layers)) {}

  // ---- sizes

  bool dynamic() const { return options.dynamic.value_or(true); }
  int64_t max_bytes() const { return options.max_bytes.value_or(0); }
  int64_t capacity() const { return blocks * block_size; }
  int64_t offset() const {
    int64_t least = layers[0].offset();
    for (const Layer& layer : layers) least = std::min(least, layer.offset());
    return has_pages ? least : 0;
  }
  int64_t pages_of(int64_t tokens) const { return (tokens + block_size - 1) / block_size; }
  int64_t pages_in_use() const { return pages_of(length); }
  int64_t page_bytes() const { return page_bytes(layers[0]); }
  int64_t page_bytes(const Layer& shape) const {
    return block_size * static_cast<int64_t>(layers.size()) *
           (shape.keys.token_bytes() + shape.values.token_bytes());
  }
  bool fits_budget(int64_t pages, const Layer& shape) const {
    return max_bytes() == 0 || pages * page_bytes(shape) <= max_bytes();
  }
  // The seed's rule, in blocks.
  int64_t grown(int64_t required) const {
    const int64_t wanted = std::max({required, (3 * blocks + 1) / 2, blocks + 1});
    const int64_t window = pages_of(options.context_window.value_or(0));
    if (window == 0 || required > window) return wanted;
    return std::min(wanted, std::max(window, blocks));
  }

  // ---- writing

  // The layer that a first write of these rows would make; nothing where formats cannot hold them.
  std::optional<Layer> shaped(const TensorView& k, const TensorView& v) const {
    Layer layer;
    layer.keys = {quant.keys(), options.dtype.value_or(k.dtype), static_cast<int>(k.num_heads),
                  static_cast<int>(k.head_dim)};
    layer.values = {quant.values(), options.dtype.value_or(v.dtype), static_cast<int>(v.num_heads),
                    static_cast<int>(v.head_dim)};
    for (const ContiguousRows* rows : {&layer.keys, &layer.values}) {
      const int group = rows->mode == PagedKVQuantMode::kQ6   ? 4
                        : rows->mode == PagedKVQuantMode::kQ4 ? 2
                                                              : 1;
      if (rows->dim < 1 || rows->dim > 512 || rows->dim % group != 0) return std::nullopt;
    }
    return layer;
  }

  static bool same_shape(const Layer& a, const Layer& b) {
    const auto same = [](const ContiguousRows& x, const ContiguousRows& y) {
      return x.mode == y.mode && x.dtype == y.dtype && x.heads == y.heads && x.dim == y.dim;
    };
    return same(a.keys, b.keys) && same(a.values, b.values);
  }

  static bool storable(const Layer& shape, const TensorView& k, const TensorView& v) {
    const auto finite = [](const TensorView& view) {
      const std::vector<float> rows = to_rows(view);
      return std::all_of(rows.begin(), rows.end(), [](float x) { return std::isfinite(x); });
    };
    return (!shape.keys.quantised() || finite(k)) && (!shape.values.quantised() || finite(v));
  }

  Outcome update(const TensorView& k, const TensorView& v, int layer) {
    const std::optional<Layer> shape = shaped(k, v);
    if (!shape) return Outcome::kInvalid;
    if (has_pages && !same_shape(*shape, layers[0])) return Outcome::kInvalid;
    ContiguousCache next = *this;
    if (!has_pages && !next.start(*shape)) return Outcome::kMemory;
    const Outcome outcome = next.write(k, v, layer);
    if (outcome == Outcome::kDone) *this = std::move(next);
    return outcome;
  }

  Outcome set_state(std::span<const PagedKVCache::Pair> pairs) {
    const std::optional<Layer> shape = shaped(pairs[0].first, pairs[0].second);
    if (!shape) return Outcome::kInvalid;
    ContiguousCache next = *this;
    next.drop();
    if (!next.start(*shape)) return Outcome::kMemory;
    for (size_t layer = 0; layer < pairs.size(); ++layer) {
      const Outcome outcome =
          next.write(pairs[layer].first, pairs[layer].second, static_cast<int>(layer));
      if (outcome != Outcome::kDone) return outcome;
    }
    *this = std::move(next);
    return Outcome::kDone;
  }

  // Takes rows of its own formats as they are.
  Outcome copy(const Layer& rows, int index) {
    if (!has_pages && !start(empty_like(rows))) return Outcome::kMemory;
    const Outcome room = make_room(rows.offset());
    if (room != Outcome::kDone) return room;
    layers[static_cast<size_t>(index)] = rows;
    ++updates;
    return Outcome::kDone;
  }

  void drop() {
    has_pages = false;
    length = 0;
    for (Layer& layer : layers) layer = {};
  }

  int64_t trim(int64_t tokens) {
    const int64_t dropped = std::min(tokens, offset());
    cut(offset() - dropped);
    return dropped;
  }

  void cut(int64_t tokens) {
    if (!has_pages) return;
    length = std::min(length, tokens);
    for (Layer& layer : layers) {
      layer.keys.cut(std::min(tokens, layer.keys.tokens()));
      layer.values.cut(std::min(tokens, layer.values.tokens()));
    }
  }

  Outcome grow_to(int64_t tokens) {
    if (tokens > capacity() && !dynamic()) return Outcome::kCapacity;
    const int64_t need = dynamic() ? pages_of(tokens) : blocks;
    if (has_pages && tokens > 0 && !fits_budget(need, layers[0])) return Outcome::kMemory;
    if (tokens > capacity()) raise(pages_of(tokens));
    return Outcome::kDone;
  }

  void shrink_to(int64_t tokens) {
    blocks = std::min(blocks, std::max<int64_t>({1, pages_of(tokens), pages_in_use()}));
  }

  // ---- attention: the reference over one run of contiguous pages

  Tensor attend(const TensorView& queries, const AttendOptions& o, float* log_sum_exp) const {
    constexpr int kPage = 256;
    const Layer& layer = layers[static_cast<size_t>(o.layer)];
    Tensor out(queries.dtype, queries.num_heads, queries.num_tokens, layer.values.dim);
    if (queries.num_tokens == 0) return out;
    const auto padded = [&](const ContiguousRows& rows, std::vector<std::byte>& bytes,
                            std::vector<float>& scales) {
      const size_t slots = static_cast<size_t>((rows.tokens() + kPage - 1) / kPage * kPage);
      bytes = rows.codes;
      bytes.resize(slots * static_cast<size_t>(rows.heads * rows.row_size()) + 64);
      scales = rows.scales;
      scales.resize(slots * static_cast<size_t>(rows.heads));
      return PageArray{bytes.data(), rows.quantised() ? scales.data() : nullptr,
                       parse_page_format(rows.format()), rows.dim};
    };
    std::vector<std::byte> key_bytes, value_bytes;
    std::vector<float> key_scales, value_scales;
    AttentionArgs args;
    args.pages.keys = padded(layer.keys, key_bytes, key_scales);
    args.pages.values = padded(layer.values, value_bytes, value_scales);
    args.pages.page_size = kPage;
    args.pages.num_kv_heads = layer.keys.heads;
    const int64_t held = layer.offset();
    std::vector<PageId> table(static_cast<size_t>((held + kPage - 1) / kPage));
    std::iota(table.begin(), table.end(), 0);
    const int32_t start[] = {0, static_cast<int32_t>(queries.num_tokens)},
                  seq_len = static_cast<int32_t>(held);
    const std::vector<float> q = to_rows(queries);
    std::vector<float> rows(static_cast<size_t>(out.num_tokens * out.num_heads * layer.values.dim));
    args.queries = q.data();
    args.out = rows.data();
    args.log_sum_exp = log_sum_exp;
    args.num_q_heads = static_cast<int>(queries.num_heads);
    args.num_seqs = 1;
    args.query_start = start;
    args.seq_lens = &seq_len;
    args.block_table = table.data();
    args.block_table_stride = static_cast<int64_t>(table.size());
    args.scale = o.scale.value_or(1.0f / std::sqrt(static_cast<float>(layer.keys.dim)));
    args.causal = o.causal;
    args.sliding_window = options.sliding_window.value_or(o.sliding_window);
    args.logit_softcap = o.logit_softcap;
    if (!o.sinks.empty()) args.sinks = o.sinks.data();
    if (!o.mask.empty()) args.mask = o.mask.data();
    if (!o.bias.empty()) args.bias = o.bias.data();
    args.mask_stride = args.bias_stride = held;
    ThreadPool one(1);
    AttentionPlan plan;
    plan.prepare(args, 1);
    kernel_sets().back().attend(args, plan.impl(), one);
    from_floats(rows.data(), out.view());
    return out;
  }

  PagedKVCacheOptions options;
  PagedKVQuantConfig quant;
  int64_t block_size, blocks;  // blocks: of capacity
  std::vector<Layer> layers;
  bool has_pages = false;
  int64_t length = 0;  // tokens there are pages for

  int64_t updates = 0, allocation_events = 0, grow_events = 0, shrink_events = 0, pages_peak = 0;
  int64_t reads = 0, dequant_reads = 0, dequant_tokens = 0;
  std::array<int64_t, 2> attention_calls{};

 private:
  static Layer empty_like(Layer rows) {
    rows.keys.cut(0);
    rows.values.cut(0);
    return rows;
  }

  bool start(const Layer& shape) {
    if (!fits_budget(dynamic() ? 1 : blocks, shape)) return false;
    for (Layer& layer : layers) layer = shape;
    has_pages = true;
    return true;
  }

  void raise(int64_t required) {
    blocks = grown(required);
    if (has_pages) ++grow_events;
  }

  Outcome make_room(int64_t end) {
    if (end <= length) return Outcome::kDone;
    if (end > capacity() && !dynamic()) return Outcome::kCapacity;
    if (!fits_budget(dynamic() ? pages_of(end) : blocks, layers[0])) return Outcome::kMemory;
    if (end > capacity()) raise(pages_of(end));
    if (pages_of(end) > pages_in_use()) ++allocation_events;
    length = end;
    pages_peak = std::max(pages_peak, pages_in_use());
    return Outcome::kDone;
  }

  Outcome write(const TensorView& k, const TensorView& v, int index) {
    Layer& layer = layers[static_cast<size_t>(index)];
    if (!storable(layer, k, v)) return Outcome::kInvalid;
    const Outcome room = make_room(layer.offset() + k.num_tokens);
    if (room != Outcome::kDone) return room;
    layer.keys.append(to_rows(k));
    layer.values.append(to_rows(v));
    ++updates;
    return Outcome::kDone;
  }
};

}  // namespace pagedkv::testing
