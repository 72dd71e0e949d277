#include "apps/cli.h"

#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "apps/plan.h"
#include "apps/progress.h"
#include "base/units.h"
#include "core/memory_budget.h"
#include "engine/threads.h"
#include "models/ggml/ggml_model.h"
#include "models/ggml/ggml_text.h"
#include "models/toy/toy_model.h"
#include "pagedkv/base/log.h"
#include "pagedkv/core/paged_kv_cache.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {
namespace {

constexpr const char* kSmallModel = "models/SmolLM2-135M-Instruct.Q4_1.gguf";

ExactMode parse_exact(const std::string& word) {
  if (word == "auto") return ExactMode::kAuto;
  if (word == "on") return ExactMode::kOn;
  if (word == "off") return ExactMode::kOff;
  throw std::invalid_argument("--exact " + word + ": must be auto, on or off");
}

}  // namespace

std::string printable(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text;
}

std::string format_bytes(int64_t bytes) {
  if (bytes == kUnlimitedBytes) return "unlimited";
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double x = static_cast<double>(bytes);
  int unit = 0;
  while (x >= 1024 && unit < 4) x /= 1024, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", x, kUnits[unit]);
  return text;
}

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string out;
  for (const auto& word : words) out += (out.empty() ? "" : between) + word;
  return out;
}

std::string shortest(double x) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};
}

std::string read_all(std::istream& in, const std::string& name) {
  constexpr size_t kMostBytes = size_t{64} << 20;
  std::string text;
  char part[65536];
  while (in.read(part, sizeof part), in.gcount() > 0) {
    text.append(part, static_cast<size_t>(in.gcount()));
    if (text.size() > kMostBytes)
      throw std::invalid_argument(name + ": a text may have at most " + format_bytes(kMostBytes));
  }
  return text;
}

std::string read_file(const std::string& path, const std::string& name) {
  std::ifstream in(path, std::ios::binary);
  if (!in.is_open() || std::filesystem::is_directory(path))
    throw std::invalid_argument(name + ": cannot be read");
  return read_all(in, name);
}

std::vector<std::string> rewrite_short_flags(int argc, const char* const* argv) {
  static const std::pair<const char*, const char*> kFlags[] = {
      {"-ctk", "--cache-type-k"}, {"-ctv", "--cache-type-v"}, {"-ngl", "--n-gpu-layers"},
      {"-fa", "--flash-attn"},    {"-np", "--parallel"},      {"--n", "--num-answers"}};
  std::vector<std::string> out;
  bool options = true;
  for (int i = 1; i < argc; ++i) {
    std::string arg = argv[i];
    if (arg == "--") options = false;
    if (options)
      for (const auto& [from, to] : kFlags)
        if (arg == from || arg.rfind(std::string(from) + "=", 0) == 0)
          arg.replace(0, std::string(from).size(), to);
    out.push_back(arg);
  }
  return out;
}

CLI::Validator whole_number() {
  return CLI::Validator(
      [](std::string& text) {
        int64_t x = 0;
        const char* first = text.data() + text.starts_with('+');
        const auto [end, error] = std::from_chars(first, text.data() + text.size(), x);
        const bool fits = error == std::errc() && end == text.data() + text.size();
        return fits ? std::string() : text + " is no integer of 64 bits";
      },
      "");
}

CLI::Validator in_range(float least, float most) {
  char range[64];
  std::snprintf(range, sizeof range, "%g - %g", least, most);
  return CLI::Validator(
      [=, range = std::string(range)](std::string& text) {
        float x = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
        const bool inside =
            error == std::errc() && end == text.data() + text.size() && x >= least && x <= most;
        return inside ? std::string() : text + " is not in " + range;
      },
      "FLOAT in [" + std::string(range) + "]");
}

CLI::Option* name_variable(CLI::Option* option) {
  const auto& names = option->get_lnames();
  if (names.empty()) return option;
  std::string variable = "PAGEDKV_";
  for (char c : names.front())
    variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return option->envname(variable);
}

std::string own_folder(const char* variable, const char* below_home) {
  const char* folder = std::getenv(variable);
  const char* home = std::getenv("HOME");
  return (folder && *folder ? folder : std::string(home ? home : "") + below_home) + "/pagedkv";
}

std::string cache_folder() {
  const char* own = std::getenv("PAGEDKV_CACHE_DIR");
  return own && *own ? own : own_folder("XDG_CACHE_HOME", "/.cache");
}

void ModelOptions::add_model(CLI::App& app) {
  add_option(app, "-m,--model", model, "GGUF file (default: the small model in the cache folder)")
      ->type_name("FILE")
      ->default_str("");
  add_option(app, "-t,--threads", num_threads, "threads (0: the cores that are free)")
      ->check(CLI::Range(0, 1024));
  add_option(app, "--exact", exact,
             "one arithmetic: auto (where it is free or nearly), on, off (fastest)")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  add_option(app, "--n-gpu-layers,--gpu-layers", num_gpu_layers,
             "(-ngl) layers on a GPU: the engine runs on the CPU, so 0");
}

void ModelOptions::add_pages(CLI::App& app) {
  auto* group = "Pages";
  add_option(app, "--kv-cache-dtype,--paged-kv-quantization,--paged-kv-quant,--kv-quant", kv_format,
             "page format of keys and values: " + page_format_names() + " (off = f16)")
      ->default_str("f16")
      ->group(group);
  add_option(app, "--cache-type-k", key_format, "(-ctk) page format of keys alone")
      ->default_str("")
      ->group(group);
  add_option(app, "--cache-type-v", value_format, "(-ctv) page format of values alone")
      ->default_str("")
      ->group(group);
  add_option(app, "--block-size", page_size, "tokens in a page")
      ->default_str("16")
      ->check(CLI::Range(1, 256))
      ->group(group);
  add_option(app, "--num-blocks", num_pages,
             "pages to begin with (default: 1024, or what the context needs)")
      ->default_str("")
      ->check(CLI::Range(1, std::numeric_limits<int32_t>::max()))
      ->group(group);
  dynamic_flag = name_variable(app.add_flag("--dynamic,!--no-dynamic", dynamic,
                                            "grow beyond --num-blocks (default), or not"));
  dynamic_flag->default_str("true");
  dynamic_flag->group(group);
  add_option(app, "--sliding-window", sliding_window,
             "see the last N tokens only, in every layer (0: all; default: as the model says)")
      ->default_str("")
      ->type_name("INT")
      ->check(CLI::Range(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()))
      ->group(group);
  add_option(app, "--kv-cache-memory-bytes,--max-bytes", max_bytes,
             "most bytes for pages, e.g. 512MiB (default: what the machine allows)")
      ->default_str("")
      ->type_name("SIZE")
      ->group(group);
  add_option(app, "--shuffle-pages", shuffle_seed,
             "hand out page ids in an order shuffled with this seed")
      ->group("");
}

namespace {

// The word for keys or for values in "k=q8,v=q4"; one word is for both.
std::string side_of(const std::string& text, bool keys) {
  const size_t comma = text.find(",v=");
  if (text.rfind("k=", 0) != 0 || comma == std::string::npos) return text;
  return keys ? text.substr(2, comma - 2) : text.substr(comma + 3);
}

}  // namespace

KvSettings ModelOptions::kv_settings() const {
  KvSettings s;
  PagedKVCacheOptions given;
  if (page_size > 0) given.block_size = page_size;
  if (num_pages > 0) given.num_blocks = num_pages;
  if (dynamic_flag != nullptr && dynamic_flag->count() > 0) given.dynamic = dynamic;
  if (!sliding_window.empty()) given.sliding_window = std::max(0, std::stoi(sliding_window));
  if (context > 0) given.context_window = context;
  const auto o = PagedKVCacheOptions::from_environment(given);
  const auto format = [&](const std::string& own, bool keys, PagedKVQuantMode mode) {
    const std::string word = own.empty() ? side_of(kv_format, keys) : own;
    return word.empty() ? page_format(mode, o.dtype.value_or(DType::kF16))
                        : parse_page_format(word);
  };
  const PagedKVQuantConfig quant = o.quant.value_or(PagedKVQuantConfig());
  s.key_format = format(key_format, true, quant.keys());
  s.value_format = format(value_format, false, quant.values());
  s.page_size = o.block_size.value_or(s.page_size);
  s.num_pages = o.num_blocks;
  s.dynamic = o.dynamic.value_or(s.dynamic);
  s.context_window = o.context_window.value_or(0);
  s.sliding_window = o.sliding_window;
  if (context == 0 || context < -1)
    throw std::invalid_argument("-c " + std::to_string(context) +
                                ": must be at least 1; leave it out for the model's own context");
  s.context = std::max<int64_t>(0, context);
  if (!max_bytes.empty()) {
    s.max_bytes = parse_bytes(max_bytes);
    if (s.max_bytes == 0)
      throw std::invalid_argument("--kv-cache-memory-bytes " + max_bytes + ": must be positive");
  }
  s.shuffle_seed = shuffle_seed;
  return s;
}

std::vector<KvSettings> with_each_format(const KvSettings& settings, const std::string& list) {
  std::vector<KvSettings> out;
  std::istringstream words(list + ",");  // so that nothing after the last comma is a word too
  for (std::string word; std::getline(words, word, ',');) {
    if (word.rfind("k=", 0) == 0)
      if (std::string values; std::getline(words, values, ',')) word += "," + values;
    if (word.find('=') != std::string::npos && word.find(",v=") == std::string::npos)
      throw std::invalid_argument("page format \"" + word + "\": write k=FORMAT,v=FORMAT");
    KvSettings& s = out.emplace_back(settings);
    s.key_format = parse_page_format(side_of(word, true));
    s.value_format = parse_page_format(side_of(word, false));
  }
  return out;
}

std::string ModelOptions::path() const {
  if (!model.empty()) return model;
  const std::string path = cache_folder() + "/" + kSmallModel;
  std::error_code none;
  if (!std::filesystem::exists(path, none))
    throw ModelError("no model given, and the small model is not at " + path +
                     ": pass -m FILE.gguf, or run scripts/setup.sh, which fetches it");
  return path;
}

int ModelOptions::threads() const { return num_threads > 0 ? num_threads : default_num_threads(); }

LoadedModel load_model(const ModelOptions& options, bool progress, bool text) {
  if (options.num_gpu_layers > 0)
    throw EnvironmentError("-ngl " + std::to_string(options.num_gpu_layers) +
                           ": the engine runs on the CPU; use 0 or leave it out");
  kernels();  // a bad PAGEDKV_KERNELS is told before anything is loaded
  LoadedModel m;
  if (options.model == "toy:") {
    m.toy = true;
    m.tokenizer = make_toy_tokenizer();
    m.chat_template = make_toy_chat_template();
    ToyOptions toy;
    if (options.max_step_tokens > 0) toy.max_step_tokens = options.max_step_tokens;
    m.model = make_toy_model(toy);
    return m;
  }
  const std::string path = options.path();
  if (options.threads() > usable_cores())
    log(LogLevel::kWarning, "-t " + std::to_string(options.threads()) + ": this process has " +
                                std::to_string(usable_cores()) +
                                " cores; threads that wait spin, so more than that is much slower");
  ProgressBar bar("loading", progress);
  GgmlModelOptions o;
  o.num_threads = options.threads();
  if (options.max_step_tokens > 0) o.max_step_tokens = options.max_step_tokens;
  o.exact = parse_exact(options.exact);
  o.progress = [&](float done) { bar.show(done); };
  m.model = load_ggml_model(path, o);
  if (text) {
    m.tokenizer = load_tokenizer(path);
    m.chat_template = make_chat_template(*m.tokenizer);
  }
  return m;
}

std::unique_ptr<Sampler> LoadedModel::make_sampler(const SamplerOptions& options) const {
  return toy ? make_toy_sampler(options) : pagedkv::make_sampler(options, model->info().vocab_size);
}

std::string startup_line(const ModelInfo& info, const KvSettings& settings, const PagePool& pool,
                         int num_threads) {
  const PagePoolOptions options = pool_options(info, settings);
  const int64_t context = context_tokens(info, settings);
  return info.description + " | pages " + format_label(settings) + ", " +
         std::to_string(settings.page_size) + " tokens, " + std::to_string(pool.bytes_per_token()) +
         " bytes/token | " + (info.exact ? "exact: " : "not exact: ") + info.exact_reason +
         " | kernels " + kernels().name + ", " + std::to_string(num_threads) +
         (num_threads == 1 ? " thread" : " threads") + " | context " + std::to_string(context) +
         " tokens = " + format_bytes(sequence_bytes(options, context)) + ", memory fits " +
         std::to_string(tokens_that_fit(options, pool.stats().bytes_limit)) + " tokens";
}

}  // namespace pagedkv::apps
