// Reading rows back out of pages, for each instruction set: the same floats as base/page_codec.h.
#include "kernels/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fetch.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include <algorithm>

#include "base/float_environment.h"
#include "base/page_codec.h"
#include "pagedkv/kernels/kernel_set.h"

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_NEON
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace pagedkv::cpu::HWY_NAMESPACE {

// One row in element order, times its scale.
template <class Format>
HWY_INLINE void fetch_row(const std::byte* HWY_RESTRICT row, float scale, int n,
                          float* HWY_RESTRICT out) {
  using Read = Reader<Format>;
  const Vec factor = hn::Set(kFloats, scale);
  const auto scaled = [&](Vec x)
                          PAGEDKV_LAMBDA { return Format::kHasScales ? hn::Mul(x, factor) : x; };
  const int whole = n / Format::kChunk;
  for (int chunk = 0; chunk < whole; ++chunk)
    PAGEDKV_UNROLL (part, kParts) {
      const typename Read::Raw raw = Read::load(row, chunk, part);
      float* const at = out + chunk * Format::kChunk + part * kNative * Format::kGroups;
      const Vec x0 = scaled(Read::template get<0>(raw));
      if constexpr (Format::kGroups == 1)
        hn::StoreU(x0, kFloats, at);
      else if constexpr (Format::kGroups == 2)
        hn::StoreInterleaved2(x0, scaled(Read::template get<1>(raw)), kFloats, at);
      else
        hn::StoreInterleaved4(x0, scaled(Read::template get<1>(raw)),
                              scaled(Read::template get<2>(raw)),
                              scaled(Read::template get<3>(raw)), kFloats, at);
    }
  for (int e = whole * Format::kChunk; e < n; ++e)
    out[e] = Format::kHasScales ? Format::load(row, e) * scale : Format::load(row, e);
}

template <class Format>
void fetch_heads(const PageArray& array, int num_kv_heads, int64_t slot, float* rows) {
  const int64_t bytes = row_bytes(Format::kFormat, array.head_dim);
  for (int h = 0; h < num_kv_heads; ++h) {
    const int64_t at = slot * num_kv_heads + h;
    fetch_row<Format>(array.data + at * bytes, Format::kHasScales ? array.scales[at] : 1.0f,
                      array.head_dim, rows + int64_t{h} * array.head_dim);
  }
}

void fetch(const FetchArgs& args, Executor& executor) noexcept {
  const LayerPages& p = args.pages;
  const auto pick = [](auto format) { return &fetch_heads<decltype(format)>; };
  const auto fetch_keys = with_page_format(p.keys.format, pick);
  const auto fetch_values = with_page_format(p.values.format, pick);
  const int64_t key_floats = int64_t{p.num_kv_heads} * p.keys.head_dim;
  const int64_t value_floats = int64_t{p.num_kv_heads} * p.values.head_dim;
  // Whole tokens, a few items for each worker.
  const int64_t block = std::max<int64_t>(1, args.num_tokens / (4 * executor.num_workers()));
  executor.run((args.num_tokens + block - 1) / block, [&](int64_t item, int) {
    const FloatEnvironment environment;
    for (int64_t t = item * block; t < std::min<int64_t>(args.num_tokens, (item + 1) * block);
         ++t) {
      const int64_t slot = args.slot_mapping[t];
      if (args.keys) fetch_keys(p.keys, p.num_kv_heads, slot, args.keys + t * key_floats);
      if (args.values) fetch_values(p.values, p.num_kv_heads, slot, args.values + t * value_floats);
    }
  });
}

}  // namespace pagedkv::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
