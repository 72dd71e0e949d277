#include <atomic>

#include "base/float_environment.h"
#include "base/page_codec.h"
#include "kernels/reference/reference.h"

namespace pagedkv::reference {
namespace {

// All heads of one token into one array. A row that cannot be stored leaves the others alone.
bool store_token(const PageArray& array, int num_kv_heads, const float* rows, int64_t slot) {
  return with_page_format(array.format, [&](auto format) {
    using Format = decltype(format);
    bool ok = true;
    for (int h = 0; h < num_kv_heads; ++h) {
      const int64_t at = slot * num_kv_heads + h;
      std::byte* row = array.data + at * row_bytes(array.format, array.head_dim);
      ok &= Format::store_row(rows + int64_t{h} * array.head_dim, array.head_dim, row,
                              Format::kHasScales ? array.scales + at : nullptr);
    }
    return ok;
  });
}

// All heads of one token out of one array.
void fetch_token(const PageArray& array, int num_kv_heads, int64_t slot, float* rows) {
  with_page_format(array.format, [&](auto format) {
    using Format = decltype(format);
    for (int h = 0; h < num_kv_heads; ++h, rows += array.head_dim) {
      const int64_t at = slot * num_kv_heads + h;
      const std::byte* row = array.data + at * row_bytes(array.format, array.head_dim);
      for (int e = 0; e < array.head_dim; ++e)
        rows[e] =
            Format::kHasScales ? Format::load(row, e) * array.scales[at] : Format::load(row, e);
    }
  });
}

}  // namespace

bool store(const StoreArgs& args, Executor& executor) noexcept {
  std::atomic<bool> ok{true};
  executor.run(args.num_tokens, [&](int64_t t, int) {
    const int64_t slot = args.slot_mapping[t];
    if (slot < 0) return;
    const FloatEnvironment environment;
    const LayerPages& p = args.pages;
    const bool keys =
        store_token(p.keys, p.num_kv_heads, args.keys + t * p.num_kv_heads * p.keys.head_dim, slot);
    const bool values = store_token(p.values, p.num_kv_heads,
                                    args.values + t * p.num_kv_heads * p.values.head_dim, slot);
    if (!keys || !values) ok.store(false, std::memory_order_relaxed);
  });
  return ok;
}

void fetch(const FetchArgs& args, Executor& executor) noexcept {
  executor.run(args.num_tokens, [&](int64_t t, int) {
    const FloatEnvironment environment;
    const LayerPages& p = args.pages;
    const int64_t slot = args.slot_mapping[t];
    if (args.keys)
      fetch_token(p.keys, p.num_kv_heads, slot, args.keys + t * p.num_kv_heads * p.keys.head_dim);
    if (args.values)
      fetch_token(p.values, p.num_kv_heads, slot,
                  args.values + t * p.num_kv_heads * p.values.head_dim);
  });
}

}  // namespace pagedkv::reference
