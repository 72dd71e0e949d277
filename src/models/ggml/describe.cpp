#include "models/ggml/describe.h"

#include <cstdio>

#include "models/ggml/paged_attention.h"
#include "models/ggml/step_graph.h"

namespace pagedkv {
namespace {

std::string with_unit(double value, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text, value < 9.95 ? "%.2f %s" : "%.0f %s", value, unit);
  return text;
}

std::string show_count(int64_t n) {
  const auto v = static_cast<double>(n);
  return v < 1e9 ? with_unit(v / 1e6, "M") : with_unit(v / 1e9, "G");
}

}  // namespace

ModelInfo describe(const Family& family, const Hyperparameters& hp, int64_t num_params,
                   const std::string& weight_types, int max_step_tokens) {
  ModelInfo info;
  info.family = family.name;
  info.vocab_size = static_cast<int32_t>(hp.vocab_size);
  info.context_length = static_cast<int32_t>(hp.context_length);
  info.num_layers = hp.num_layers;
  info.num_q_heads = hp.num_q_heads;
  info.num_params = num_params;
  info.step_bytes = step_buffer_bytes(hp, max_step_tokens);
  info.description = info.family + " " + show_count(num_params) + " parameters, " + weight_types;
  info.groups = layer_groups(hp).groups;
  return info;
}

}  // namespace pagedkv
