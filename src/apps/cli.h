// What the subcommands share: options of model and cache, units, exit codes, log output.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <istream>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/kv_settings.h"
#include "models/model.h"
#include "models/text.h"

namespace pagedkv::apps {

enum ExitCode : int {
  kOk = 0,
  kFailure = 1,
  kUsage = 2,
  kVerification = 3,  // a result differs from what defines it
  kModel = 4,         // unsupported or corrupt
  kEnvironment = 5,   // no device, a folder that cannot be used
  kResource = 6,      // does not fit
  kInterrupted = 130,
};

// Something the machine lacks (exit code 5).
struct EnvironmentError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `text`, which may quote a file, so that nothing in it steers a terminal.
std::string printable(std::string text);

// "1.5 GiB"; kUnlimitedBytes: "unlimited"
std::string format_bytes(int64_t bytes);

// "a, b, c"
std::string joined(const std::vector<std::string>& words, const char* between);

// The shortest decimals that read back to the same bits.
std::string shortest(double x);

// A text of at most 64 MiB, which keeps an endless file from eating the memory. Throw std::invalid_argument; `name` is
// what the error calls it.
std::string read_all(std::istream& in, const std::string& name);
std::string read_file(const std::string& path, const std::string& name);

// Rewrites familiar flags that CLI11 has no form for to long ones: several letters behind one dash (-ctk, -ctv, -ngl,
// -fa, -np), one behind two (--n).
std::vector<std::string> rewrite_short_flags(int argc, const char* const* argv);

// An integer that 64 bits hold, where CLI11 would take the nearest.
CLI::Validator whole_number();

// A number within [least, most]; NaN is none.
CLI::Validator in_range(float least, float most);

// Adds an option with its PAGEDKV_<UPPER_SNAKE> variable, named after its first long name. An empty variable counts as unset.
template <class T>
CLI::Option* add_option(CLI::App& app, const std::string& names, T& value, const std::string& help);
CLI::Option* name_variable(CLI::Option* option);

// -m, -t, --exact and the page options.
struct ModelOptions {
  std::string model;    // empty: the small model from the cache folder
  int num_threads = 0;  // 0: default_num_threads()
  std::string exact = "auto";
  int num_gpu_layers = 0;
  int max_step_tokens = 0;  // 0: the model's default
  // Of the page options, what is left out (empty, -1 or 0) is taken from the seed's variables where
  // they are set, as PagedKVCacheOptions::from_environment() says.
  std::string kv_format, key_format, value_format;  // the last two win where given
  int page_size = 0;
  int64_t context = -1;  // -1: the model's
  int32_t num_pages = 0;
  bool dynamic = true;
  CLI::Option* dynamic_flag = nullptr;
  std::string sliding_window;
  std::string max_bytes;
  uint64_t shuffle_seed = 0;

  void add_model(CLI::App& app);
  void add_pages(CLI::App& app);
  KvSettings kv_settings() const;  // throws std::invalid_argument
  int threads() const;
  std::string path() const;  // of the model file; "toy:" for the toy model
};

// "f16,q8,k=f16,v=q4": `settings` once with each page format of the list. Throws std::invalid_argument naming the word.
std::vector<KvSettings> with_each_format(const KvSettings& settings, const std::string& list);

// A model with all that goes with it.
struct LoadedModel {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;
  std::unique_ptr<Model> model;
  std::unique_ptr<Sampler> make_sampler(const SamplerOptions& options) const;
  bool toy = false;
};

// Loads options.model ("toy:" is the toy model). `progress` shows a bar on a terminal.
LoadedModel load_model(const ModelOptions& options, bool progress, bool text = true);

// The start-up line: family, pages, bytes per token, exact or not, kernels, threads, what fits.
std::string startup_line(const ModelInfo& info, const KvSettings& settings, const PagePool& pool,
                         int num_threads);

// pagedkv's folder below the one that `variable` names, an XDG one, or below that place in the home folder.
std::string own_folder(const char* variable, const char* below_home);

// $XDG_CACHE_HOME/pagedkv, or ~/.cache/pagedkv; PAGEDKV_CACHE_DIR wins.
std::string cache_folder();

template <class T>
CLI::Option* add_option(CLI::App& app, const std::string& names, T& value,
                        const std::string& help) {
  auto* option = app.add_option(names, value, help)->capture_default_str();
  constexpr bool kList = requires { value.push_back({}); } && !std::is_same_v<T, std::string>;
  if (!kList) option->take_last();  // as everywhere: of a flag given twice the last one counts
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) option->check(whole_number());
  return name_variable(option);
}

}  // namespace pagedkv::apps
