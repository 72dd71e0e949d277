#include "engine/kv_settings.h"

#include <algorithm>
#include <stdexcept>

namespace pagedkv {

int64_t context_tokens(const ModelInfo& model, const KvSettings& settings) {
  if (settings.context < 0)
    throw std::invalid_argument("context " + std::to_string(settings.context) +
                                ": must be positive");
  if (settings.context == 0)
    return settings.context_window > 0
               ? std::min<int64_t>(settings.context_window, model.context_length)
               : model.context_length;
  if (settings.context > model.context_length)
    throw std::invalid_argument("context " + std::to_string(settings.context) +
                                ": the model's limit is " + std::to_string(model.context_length) +
                                " tokens");
  return settings.context;
}

PagePoolOptions pool_options(const ModelInfo& model, const KvSettings& settings) {
  if (settings.page_size < 1 || settings.page_size > 256)
    throw std::invalid_argument("page_size " + std::to_string(settings.page_size) +
                                ": must be in 1..256");
  PagePoolOptions options;
  options.groups = model.groups;
  for (auto& group : options.groups) {
    group.sliding_window = settings.sliding_window.value_or(group.sliding_window);
    for (auto& layer : group.layers) {
      layer.key_format = settings.key_format;
      layer.value_format = settings.value_format;
    }
  }
  options.page_size = settings.page_size;
  const int64_t context = context_tokens(model, settings);
  const int64_t pages = (context + settings.page_size - 1) / settings.page_size * settings.max_seqs;
  options.num_pages =
      settings.num_pages.value_or(static_cast<int32_t>(std::min<int64_t>(1024, pages)));
  options.dynamic = settings.dynamic;
  options.max_bytes = settings.max_bytes;
  options.shuffle_seed = settings.shuffle_seed;
  return options;
}

std::string format_label(const KvSettings& settings) {
  const std::string k(page_format_name(settings.key_format)),
      v(page_format_name(settings.value_format));
  return k == v ? k : "k=" + k + ",v=" + v;
}

}  // namespace pagedkv
