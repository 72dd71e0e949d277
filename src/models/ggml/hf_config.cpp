#include "models/ggml/hf_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "base/bounded_text.h"
#include "models/ggml/describe.h"
#include "models/ggml/family.h"
#include "models/ggml/ggml_model.h"
#include "models/ggml/hyperparameters.h"
#include "models/ggml/weights.h"

namespace pagedkv {
namespace {

using nlohmann::json;

constexpr int64_t kMostBytes = 16 << 20;  // a config.json has some thousand

// Which layers have the window that sliding_window gives, where layer_types does not say.
enum class Windows {
  kNone,      // none, whatever the file says
  kAll,       // all
  kFrom,      // with use_sliding_window those from max_window_layers on
  kPeriodic,  // all but every sliding_window_pattern-th
};

// A model_type, the family that runs it, and what transformers takes where a key is left out, as Gemma's files do
// (0: the key must be there). Source: transformers, models/*/configuration_*.py.
struct ConfigType {
  std::string_view name;
  std::string_view family;
  Windows windows;
  bool tied = false;  // tie_word_embeddings
  int64_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0, context = 0, window = 0, vocab_size = 0;
};

constexpr ConfigType kTypes[] = {
    {.name = "llama", .family = "llama", .windows = Windows::kNone},
    {.name = "mistral", .family = "llama", .windows = Windows::kAll},
    {.name = "qwen2", .family = "qwen2", .windows = Windows::kFrom},
    {.name = "qwen3", .family = "qwen3", .windows = Windows::kFrom},
    {.name = "gemma3_text",
     .family = "gemma3",
     .windows = Windows::kPeriodic,
     .tied = true,
     .num_q_heads = 8,
     .num_kv_heads = 4,
     .head_dim = 256,
     .context = 131072,
     .window = 4096,
     .vocab_size = 262208},
};
constexpr std::string_view kWithText = "gemma3";  // has its text model in text_config

class Config {
 public:
  Config(const std::string& path, json object) : path_(path), object_(std::move(object)) {}

  [[noreturn]] void fail(const std::string& what) const { throw ModelError(path_ + ": " + what); }

  // Null is what transformers writes for "none" and counts as absent.
  const json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }
  std::optional<int64_t> integer(const char* key, int64_t least, int64_t most) const {
    const json* value = find(key);
    if (!value) return std::nullopt;
    // What does not fit int64 fits no limit.
    const bool fits = value->is_number_integer() &&
                      (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
    const int64_t n = fits ? value->get<int64_t>() : least - 1;
    if (n < least || n > most)
      fail(std::string(key) + " is " + shown(*value) + "; it must be an integer in " +
           std::to_string(least) + ".." + std::to_string(most));
    return n;
  }
  // `otherwise` 0: the key must be there.
  int64_t needed(const char* key, int64_t most, int64_t otherwise = 0) const {
    const auto value = integer(key, 1, most);
    if (!value && otherwise == 0) fail(std::string(key) + " is missing");
    return value.value_or(otherwise);
  }
  bool boolean(const char* key, bool otherwise) const {
    const json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_boolean())
      fail(std::string(key) + " is " + shown(*value) + "; it must be true or false");
    return value->get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    const json* value = find(key);
    if (!value) return otherwise;
    if (!value->is_string())
      fail(std::string(key) + " is " + shown(*value) + "; it must be a string");
    return value->get<std::string>();
  }
  std::optional<Config> object(const char* key) const {
    const json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->is_object())
      fail(std::string(key) + " is " + shown(*value) + "; it must be an object");
    return Config(path_, *value);
  }

  static std::string shown(const json& value) {
    std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
    if (text.size() > 40) text = text.substr(0, 40) + "...";
    return text;
  }

 private:
  std::string path_;
  json object_;
};

Config read_config(const std::string& path) {
  const auto fail = [&](const std::string& what) { throw ModelError(path + ": " + what); };
  std::string text;
  try {
    text = read_regular_file(path, kMostBytes);
  } catch (const std::runtime_error& error) {
    fail(error.what());
  }
  if (json_depth(text) > kMostJsonDepth)
    fail("is nested " + std::to_string(json_depth(text)) + " deep; the limit is " +
         std::to_string(kMostJsonDepth));
  json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) fail("cannot be read as a JSON object");
  return {path, std::move(object)};
}

std::string supported() {
  std::string out;
  for (const ConfigType& type : kTypes) out += std::string(type.name) + ", ";
  return out + std::string(kWithText);
}

const ConfigType& find_type(const Config& config, const std::string& name) {
  if (name.empty()) config.fail("model_type is missing; supported: " + supported());
  for (const ConfigType& type : kTypes)
    if (type.name == name) return type;
  config.fail("model_type " + name + " is not supported; supported: " + supported());
}

std::optional<std::vector<bool>> read_layer_types(const Config& config, size_t num_layers) {
  const json* list = config.find("layer_types");
  if (!list) return std::nullopt;
  if (!list->is_array() || list->size() != num_layers)
    config.fail("layer_types is not a list of " + std::to_string(num_layers) +
                " entries, one for each of num_hidden_layers");
  std::vector<bool> out;
  for (const json& word : *list) {
    if (word != "full_attention" && word != "sliding_attention")
      config.fail("layer_types has " + Config::shown(word) +
                  "; supported: full_attention, sliding_attention");
    out.push_back(word == "sliding_attention");
  }
  return out;
}

void read_windows(const Config& config, const ConfigType& type, const Family& family,
                  Hyperparameters& hp) {
  hp.is_windowed.assign(static_cast<size_t>(hp.num_layers), false);
  if (type.windows == Windows::kNone) return;
  if (type.windows == Windows::kFrom && !config.boolean("use_sliding_window", false)) return;
  hp.sliding_window =
      static_cast<int>(config.integer("sliding_window", 0, kMaxContext).value_or(type.window));
  if (hp.sliding_window == 0) return;
  if (const auto listed = read_layer_types(config, hp.is_windowed.size())) {
    hp.is_windowed = *listed;
  } else if (type.windows == Windows::kPeriodic) {
    const auto period = config.integer("sliding_window_pattern", 1, kMaxLayers);
    hp.is_windowed = windowed_layers(hp.num_layers, period.value_or(family.graph.full_period));
  } else {
    const int64_t first = type.windows == Windows::kAll
                              ? 0
                              : config.integer("max_window_layers", 0, kMaxLayers).value_or(28);
    for (int64_t i = first; i < hp.num_layers; ++i) hp.is_windowed[static_cast<size_t>(i)] = true;
  }
}

Hyperparameters read_hyperparameters(const Config& config, const ConfigType& type,
                                     const Family& family) {
  Hyperparameters hp;
  hp.num_layers = static_cast<int>(config.needed("num_hidden_layers", kMaxLayers));
  hp.num_q_heads =
      static_cast<int>(config.needed("num_attention_heads", kMaxHeads, type.num_q_heads));
  hp.num_kv_heads =
      static_cast<int>(config.needed("num_key_value_heads", kMaxHeads, type.num_kv_heads));
  if (hp.num_q_heads % hp.num_kv_heads != 0)
    config.fail("num_attention_heads is " + std::to_string(hp.num_q_heads) +
                "; it must be a multiple of num_key_value_heads, " +
                std::to_string(hp.num_kv_heads));
  hp.context_length = config.needed("max_position_embeddings", kMaxContext, type.context);
  hp.embedding_length = config.needed("hidden_size", kMaxWidth);
  hp.feed_forward_length = config.needed("intermediate_size", kMaxWidth);
  hp.vocab_size = config.needed("vocab_size", kMaxWidth * 16, type.vocab_size);
  int64_t head_dim = config.integer("head_dim", 1, kMaxHeadDim).value_or(type.head_dim);
  if (head_dim == 0) {
    head_dim = hp.embedding_length / hp.num_q_heads;
    if (head_dim < 1 || head_dim > kMaxHeadDim || hp.embedding_length % hp.num_q_heads != 0)
      config.fail("head_dim is missing, and hidden_size " + std::to_string(hp.embedding_length) +
                  " over num_attention_heads " + std::to_string(hp.num_q_heads) +
                  " is no integer in 1.." + std::to_string(kMaxHeadDim));
  }
  hp.key_head_dim = hp.value_head_dim = static_cast<int>(head_dim);
  read_windows(config, type, family, hp);
  return hp;
}

}  // namespace

ModelInfo describe_hf_config(const std::string& path) {
  const Config file = read_config(path);
  std::string name = file.text("model_type", "");
  std::optional<Config> text;
  if (name == kWithText) {
    text = file.object("text_config");
    if (!text) file.fail("text_config is missing");
    name = text->text("model_type", "gemma3_text");
  }
  const Config& config = text ? *text : file;
  const ConfigType& type = find_type(config, name);
  const Family& family = *std::ranges::find(families(), type.family, &Family::name);
  const Hyperparameters hp = read_hyperparameters(config, type, family);

  const auto word = [](const Config& c) { return c.text("dtype", c.text("torch_dtype", "")); };
  std::string dtype = word(config).empty() ? word(file) : word(config);
  if (dtype.empty()) dtype = "bfloat16";
  if (dtype != "float32" && dtype != "float16" && dtype != "bfloat16")
    file.fail("dtype is " + dtype + "; supported: float32, float16, bfloat16");
  const bool tied =
      file.boolean("tie_word_embeddings", config.boolean("tie_word_embeddings", type.tied));
  const int64_t num_params = count_parameters(family, hp, !tied);
  ModelInfo info = describe(family, hp, num_params, dtype, GgmlModelOptions().max_step_tokens);
  info.weight_bytes = num_params * (dtype == "float32" ? 4 : 2);
  return info;
}

}  // namespace pagedkv
