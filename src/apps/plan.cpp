#include "apps/plan.h"

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "apps/cli.h"
#include "base/units.h"
#include "core/memory_budget.h"
#include "core/page_layout.h"
#include "models/ggml/ggml_model.h"
#include "models/ggml/hf_config.h"
#include "models/toy/toy_model.h"
#include "pagedkv/base/log.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv::apps {
namespace {

using nlohmann::ordered_json;

constexpr PageFormat kFormats[] = {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16,
                                   PageFormat::kQ8,  PageFormat::kQ6,  PageFormat::kQ4};

struct PlanOptions {
  ModelOptions model;
  std::string weight_bytes;  // empty: what the model's file says
  bool json = false;
};

// What a run's prompts take at most in a step.
int64_t step_tokens() { return GgmlModelOptions().max_step_tokens; }

int64_t pages_held(const PagePoolOptions& pool, const LayerGroupSpec& group, int64_t length) {
  return most_pages_held(length, step_tokens(), pool.page_size, group.sliding_window);
}

}  // namespace

int64_t sequence_bytes(const PagePoolOptions& pool, int64_t length) {
  int64_t bytes = 0;
  for (const LayerGroupSpec& group : pool.groups)
    bytes += pages_held(pool, group, length) * group_page_bytes(group, pool.page_size);
  return bytes;
}

namespace {

// Sequences of `length` tokens that `bytes` of pages hold at once.
int64_t sequences_that_fit(const PagePoolOptions& pool, int64_t bytes, int64_t length) {
  int64_t most = bytes / sequence_bytes(pool, length);
  const int64_t pages = pool.dynamic ? INT32_MAX : pool.num_pages;  // of each group
  for (const LayerGroupSpec& group : pool.groups)
    most = std::min(most, pages / pages_held(pool, group, length));
  return most;
}

}  // namespace

int64_t tokens_that_fit(const PagePoolOptions& pool, int64_t bytes) {
  int64_t fit = 0, too_many = int64_t{INT32_MAX} + 1;
  while (too_many - fit > 1) {
    const int64_t pages = (fit + too_many) / 2;
    (sequences_that_fit(pool, bytes, pages * pool.page_size) > 0 ? fit : too_many) = pages;
  }
  return fit * pool.page_size;
}

namespace {

PlannedFormat plan_format(const ModelInfo& model, const KvSettings& settings, const Plan& plan) {
  PlannedFormat row;
  row.format = format_label(settings);
  const PagePoolOptions pool = pool_options(model, settings);
  try {
    check_options(pool);
  } catch (const std::invalid_argument& error) {
    row.impossible = error.what();
    return row;
  }
  for (const LayerGroupSpec& group : pool.groups)
    row.page_bytes += group_page_bytes(group, pool.page_size);
  row.bytes_per_token = row.page_bytes / pool.page_size;
  row.context_bytes = sequence_bytes(pool, plan.context);
  row.tokens = tokens_that_fit(pool, plan.bytes);
  row.longest = std::min<int64_t>(row.tokens, model.context_length);
  for (const int64_t length : plan.lengths)
    row.sequences.push_back(sequences_that_fit(pool, plan.bytes, length));
  return row;
}

std::vector<FormatPair> listed_formats(const ModelOptions& options, const KvSettings& settings) {
  std::vector<FormatPair> out;
  const bool asked =
      !options.kv_format.empty() || !options.key_format.empty() || !options.value_format.empty();
  if (!asked)
    for (const PageFormat format : kFormats) out.emplace_back(format, format);
  const FormatPair chosen{settings.key_format, settings.value_format};
  if (std::ranges::count(out, chosen) == 0) out.push_back(chosen);
  return out;
}

bool has_windows(const ModelInfo& model, const KvSettings& settings) {
  return settings.sliding_window.value_or(0) > 0 ||
         std::ranges::any_of(model.groups, [](const auto& g) { return g.sliding_window > 0; });
}

std::vector<std::string> assumptions(const ModelInfo& model, const KvSettings& settings,
                                     const PlanOptions& o) {
  std::vector<std::string> out;
  out.push_back("available: the least of MemAvailable and what the memory cgroups leave, now");
  out.push_back(!o.weight_bytes.empty() ? "weights: as --weight-bytes says"
                : o.model.model.ends_with(".json")
                    ? "weights: every parameter in the config's dtype; --weight-bytes for another"
                    : "weights: all of the file's tensors stay in memory, and none is there yet");
  out.push_back(
      "compute: two graphs of the longest step; tokenizer and program are in the headroom");
  if (has_windows(model, settings))
    out.push_back("layers with a window keep the pages of it and of a step of " +
                  std::to_string(step_tokens()) + " tokens; tokens in all: of one sequence");
  return out;
}

ordered_json groups_json(const ModelInfo& model) {
  ordered_json out = ordered_json::array();
  for (const LayerGroupSpec& group : model.groups)
    out.push_back({{"layers", group.layers.size()},
                   {"sliding_window", group.sliding_window},
                   {"num_kv_heads", group.layers[0].num_kv_heads},
                   {"key_head_dim", group.layers[0].key_head_dim},
                   {"value_head_dim", group.layers[0].value_head_dim}});
  return out;
}

ordered_json formats_json(const Plan& plan) {
  ordered_json out = ordered_json::array();
  for (const PlannedFormat& f : plan.formats) {
    ordered_json& row = out.emplace_back(ordered_json{{"format", f.format}, {"chosen", f.chosen}});
    if (!f.impossible.empty()) {
      row["impossible"] = f.impossible;
      continue;
    }
    row["bytes_per_token"] = f.bytes_per_token;
    row["bytes_per_page"] = f.page_bytes;
    row["context_bytes"] = f.context_bytes;
    row["max_tokens"] = f.tokens;
    row["max_context"] = f.longest;
    for (size_t i = 0; i < plan.lengths.size(); ++i)
      row["fits"].push_back({{"context", plan.lengths[i]}, {"sequences", f.sequences[i]}});
  }
  return out;
}

ordered_json plan_json(const std::string& path, const ModelInfo& model, const KvSettings& settings,
                       const Plan& plan, const std::vector<std::string>& assumed) {
  const auto or_null = [](int64_t bytes) {
    return bytes == kUnlimitedBytes ? ordered_json() : ordered_json(bytes);
  };
  return {
      {"model", path},
      {"family", model.family},
      {"description", model.description},
      {"num_layers", model.num_layers},
      {"context_length", model.context_length},
      {"layer_groups", groups_json(model)},
      {"page_size", settings.page_size},
      {"context", plan.context},
      {"memory",
       {{"available", or_null(plan.available)},
        {"headroom", plan.headroom},
        {"weights", plan.weights},
        {"compute", plan.compute},
        {"max_bytes", settings.max_bytes > 0 ? ordered_json(settings.max_bytes) : ordered_json()},
        {"pages", or_null(plan.bytes)},
        {"limited_by", plan.by_machine ? "machine" : "max_bytes"}}},
      {"formats", formats_json(plan)},
      {"assumptions", assumed}};
}

std::string groups_text(const ModelInfo& model) {
  std::string out;
  for (const LayerGroupSpec& group : model.groups) {
    const LayerSpec& l = group.layers[0];
    out += (out.empty() ? "" : "; ") + std::to_string(group.layers.size()) + " layers of " +
           std::to_string(l.num_kv_heads) + " kv heads x " + std::to_string(l.key_head_dim);
    if (l.value_head_dim != l.key_head_dim) out += " and " + std::to_string(l.value_head_dim);
    if (group.sliding_window > 0)
      out += " with a window of " + std::to_string(group.sliding_window) + " tokens";
  }
  return out;
}

// Columns as wide as their widest entry, the first to the left, the others to the right.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string out;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      out += i == 0 ? row[i] + pad : "  " + pad + row[i];
    }
    out.erase(out.find_last_not_of(' ') + 1);
    out += '\n';
  }
  return out;
}

std::string plan_text(const ModelInfo& model, const KvSettings& settings, const Plan& plan,
                      const std::vector<std::string>& assumed) {
  std::string out = model.description + " | " + groups_text(model) + " | context " +
                    std::to_string(plan.context) + " tokens, pages of " +
                    std::to_string(settings.page_size) + "\n";
  out +=
      "memory for pages: " + format_bytes(plan.bytes) +
      (plan.by_machine ? " = available " + format_bytes(plan.available) + " - headroom " +
                             format_bytes(plan.headroom) + " - weights " +
                             format_bytes(plan.weights) + " - compute " + format_bytes(plan.compute)
                       : " (--kv-cache-memory-bytes)") +
      "\n\n";
  std::vector<std::vector<std::string>> rows{
      {"format", "bytes/token", "context", "tokens in all", "longest"}};
  for (const int64_t length : plan.lengths)
    rows[0].push_back("sequences of " + std::to_string(length));
  std::string notes;
  for (const PlannedFormat& f : plan.formats) {
    auto& row = rows.emplace_back();
    row.push_back(f.format + (f.chosen ? " *" : ""));
    if (!f.impossible.empty()) {
      row.insert(row.end(), rows[0].size() - 1, "-");
      notes += f.format + ": " + f.impossible + "\n";
      continue;
    }
    row.push_back(std::to_string(f.bytes_per_token));
    row.push_back(format_bytes(f.context_bytes));
    row.push_back(std::to_string(f.tokens));
    row.push_back(std::to_string(f.longest));
    for (const int64_t n : f.sequences) row.push_back(std::to_string(n));
  }
  out += table(rows) + "\n* what run stores with these settings\n" + notes;
  for (const std::string& text : assumed) out += "assumed: " + text + "\n";
  return out;
}

ModelInfo describe_model(const std::string& path) {
  if (path == "toy:") return make_toy_model()->info();
  return path.ends_with(".json") ? describe_hf_config(path) : describe_ggml_model(path);
}

int64_t parse_weights(const PlanOptions& o, const ModelInfo& model) {
  return o.weight_bytes.empty() ? model.weight_bytes : parse_bytes(o.weight_bytes);
}

int plan(const PlanOptions& o) {
  const KvSettings settings = o.model.kv_settings();
  const std::string path = o.model.path();
  const ModelInfo model = describe_model(path);
  const Plan plan = make_plan(model, settings, listed_formats(o.model, settings),
                              parse_weights(o, model), available_memory());
  const auto assumed = assumptions(model, settings, o);
  if (o.json)
    std::cout << plan_json(path, model, settings, plan, assumed)
                     .dump(2, ' ', false, ordered_json::error_handler_t::replace)
              << std::endl;
  else
    std::cout << plan_text(model, settings, plan, assumed) << std::flush;
  if (!std::cout) throw std::runtime_error("standard output: cannot be written");
  const auto& chosen = *std::ranges::find(plan.formats, true, &PlannedFormat::chosen);
  if (!chosen.impossible.empty()) throw std::invalid_argument(chosen.impossible);
  if (settings.context > 0 && chosen.sequences.back() == 0)
    throw CapacityError("-c " + std::to_string(settings.context) + ": a sequence in " +
                        chosen.format + " takes " + format_bytes(chosen.context_bytes) +
                        (chosen.context_bytes <= plan.bytes
                             ? ", the pool has room for " + std::to_string(chosen.tokens) +
                                   " tokens and does not grow"
                             : ", there are " + format_bytes(plan.bytes) + " for pages"));
  return kOk;
}

}  // namespace

Plan make_plan(const ModelInfo& model, const KvSettings& settings,
               const std::vector<FormatPair>& formats, int64_t weights, int64_t available) {
  const PagePoolOptions pool = pool_options(model, settings);
  Plan plan;
  plan.context = context_tokens(model, settings);
  for (const int64_t part : {16, 4, 1})
    if (plan.context / part >= 1) plan.lengths.push_back(plan.context / part);
  plan.available = available;
  plan.headroom = pool.headroom_bytes;
  plan.weights = weights;
  plan.compute = model.step_bytes;
  const int64_t left =
      available == kUnlimitedBytes
          ? available
          : std::max<int64_t>(0, std::max<int64_t>(0, available - weights) - plan.compute);
  const PoolLimit limit = pool_limit(pool, left, 0);
  plan.bytes = left == kUnlimitedBytes && limit.by_machine ? kUnlimitedBytes : limit.bytes;
  plan.by_machine = limit.by_machine;
  for (const auto& [keys, values] : formats) {
    KvSettings s = settings;
    s.key_format = keys;
    s.value_format = values;
    PlannedFormat& row = plan.formats.emplace_back(plan_format(model, s, plan));
    row.chosen = keys == settings.key_format && values == settings.value_format;
  }
  return plan;
}

void add_plan(CLI::App& app, std::function<int()>& command) {
  auto o = std::make_shared<PlanOptions>();
  auto* sub = app.add_subcommand("plan", "what a model's pages take, and what fits this machine");
  add_option(
      *sub, "-m,--model,model", o->model.model,
      "GGUF file, or a Hugging Face config.json (default: the small model in the cache folder)")
      ->type_name("FILE")
      ->default_str("");
  add_option(*sub, "-c,--ctx-size,--max-model-len", o->model.context,
             "context in tokens (default: the model's)")
      ->default_str("");
  add_option(*sub, "--weight-bytes", o->weight_bytes,
             "bytes of the weights, e.g. 4GiB (default: of the file; of a config's parameters)")
      ->default_str("")
      ->type_name("SIZE");
  o->model.add_pages(*sub);
  name_variable(sub->add_flag("--json", o->json, "one JSON object on stdout instead of the table"));
  sub->parse_complete_callback([o, &command] { command = [=] { return plan(*o); }; });
}

}  // namespace pagedkv::apps
