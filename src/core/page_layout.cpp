#include "core/page_layout.h"

#include <stdexcept>
#include <string>

namespace pagedkv {
namespace {

template <class Number>
[[noreturn]] void refuse(const std::string& name, Number value, const std::string& rule) {
  throw std::invalid_argument(name + " " + std::to_string(value) + ": must be " + rule);
}

void check_layer(const LayerSpec& layer) {
  if (layer.num_kv_heads < 1 || layer.num_kv_heads > 65536)
    refuse("num_kv_heads", layer.num_kv_heads, "in 1..65536");
  check_head_dim(layer.key_format, layer.key_head_dim);
  check_head_dim(layer.value_format, layer.value_head_dim);
}

void check_address_space(const LayerGroupSpec& group, int page_size, int64_t num_pages) {
  const int64_t bytes = group_page_bytes(group, page_size);
  if (bytes > kAddressSpace / num_pages)
    throw std::invalid_argument(std::to_string(num_pages) + " pages of " + std::to_string(bytes) +
                                " bytes: must be at most " + std::to_string(kAddressSpace) +
                                " bytes together");
}

}  // namespace

PageBytes page_bytes(PageFormat format, int head_dim, int num_kv_heads, int page_size) noexcept {
  const int64_t rows = int64_t{page_size} * num_kv_heads;
  return {rows * row_bytes(format, head_dim),
          has_scales(format) ? rows * int64_t{sizeof(float)} : 0};
}

int64_t group_page_bytes(const LayerGroupSpec& group, int page_size) noexcept {
  int64_t sum = 0;
  for (const LayerSpec& l : group.layers) {
    const PageBytes keys = page_bytes(l.key_format, l.key_head_dim, l.num_kv_heads, page_size);
    const PageBytes values =
        page_bytes(l.value_format, l.value_head_dim, l.num_kv_heads, page_size);
    sum += keys.rows + keys.scales + values.rows + values.scales;
  }
  return sum;
}

void check_options(const PagePoolOptions& options) {
  if (options.page_size < 1 || options.page_size > 256)
    refuse("page_size", options.page_size, "in 1..256");
  if (options.num_pages < 1) refuse("num_pages", options.num_pages, "at least 1");
  if (options.max_bytes < 0)
    refuse("max_bytes", options.max_bytes, "at least 0 (0: what the machine allows)");
  if (options.headroom_bytes < 0) refuse("headroom_bytes", options.headroom_bytes, "at least 0");
  if (options.max_pages != 0 && options.max_pages < options.num_pages)
    refuse(
        "max_pages", options.max_pages,
        "0 (from the memory there is) or at least num_pages " + std::to_string(options.num_pages));
  if (!(options.idle_seconds >= 0 && options.idle_seconds <= 1e6))
    refuse("idle_seconds", options.idle_seconds, "in 0..1000000 (0: nothing goes back by itself)");
  if (!(options.idle_keep >= 1 && options.idle_keep <= 1000))
    refuse("idle_keep", options.idle_keep, "in 1..1000");
  if (options.idle_floor_bytes < 0)
    refuse("idle_floor_bytes", options.idle_floor_bytes, "at least 0");
  if (options.groups.empty())
    throw std::invalid_argument("groups: a pool needs at least one layer group");
  for (const LayerGroupSpec& group : options.groups) {
    if (group.sliding_window < 0)
      refuse("sliding_window", group.sliding_window, "at least 0 (0: none)");
    if (group.layers.empty())
      throw std::invalid_argument("groups: a layer group needs at least one layer");
    for (const LayerSpec& layer : group.layers) check_layer(layer);
    check_address_space(group, options.page_size, std::max(options.num_pages, options.max_pages));
  }
}

}  // namespace pagedkv
