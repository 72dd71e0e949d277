// The pagedkv program: arguments in, exit codes out.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <new>

#include "apps/bench.h"
#include "apps/cli.h"
#include "apps/perplexity.h"
#include "apps/run.h"
#include "pagedkv/base/log.h"

namespace pagedkv::apps {
namespace {

void connect_log() {
  auto logger = spdlog::stderr_color_mt("pagedkv");  // colours on a terminal only
  logger->set_pattern("pagedkv: %^%v%$");
  spdlog::set_default_logger(logger);
  if (const char* no_color = std::getenv("NO_COLOR"); no_color && *no_color)
    static_cast<spdlog::sinks::stderr_color_sink_mt*>(logger->sinks().front().get())
        ->set_color_mode(spdlog::color_mode::never);
  set_log_sink([](LogLevel level, std::string_view text) {
    std::string message(text);  // may quote a file: nothing in it may steer a terminal
    for (char& c : message)
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    if (level == LogLevel::kInfo) spdlog::info("{}", message);
    if (level == LogLevel::kWarning) spdlog::warn("warning: {}", message);
    if (level == LogLevel::kError) spdlog::error("error: {}", message);
  });
}

int report(const std::exception& e, ExitCode code) {
  log(LogLevel::kError, e.what());
  return code;
}

// A flag that sets what narrower variables refine wins over them: flags before variables.
void prefer_flag(const std::vector<std::string>& args, std::initializer_list<const char*> flags,
                 std::initializer_list<const char*> variables) {
  for (const auto& arg : args)
    for (const std::string flag : flags)
      if (arg == flag || arg.rfind(flag + "=", 0) == 0)
        for (const char* variable : variables) unsetenv(variable);
}

bool given(const std::vector<std::string>& args, const CLI::Option& option) {
  std::vector<std::string> names;
  for (const auto& name : option.get_lnames()) names.push_back("--" + name);
  for (const auto& name : option.get_fnames()) names.push_back("--" + name);
  for (const auto& arg : args) {
    if (arg == "--") return false;
    for (const auto& name : names)
      if (arg == name || arg.rfind(name + "=", 0) == 0) return true;
    for (const auto& name : option.get_snames())
      if (arg.rfind("-" + name, 0) == 0) return true;
  }
  return false;
}

using Variables = std::vector<std::pair<std::string, std::string>>;  // flag, NAME=value

// Puts the variables of flags that are not given in front of the arguments, so that a bad value is an error like any
// other: CLI11 drops such values in some versions. Returns those it put there.
Variables add_variables(const CLI::App& sub, std::vector<std::string>& args) {
  Variables added;
  for (const CLI::Option* option : sub.get_options()) {
    const std::string variable = option->get_envname();
    const char* value = variable.empty() ? nullptr : std::getenv(variable.c_str());
    if (!value) continue;
    if (std::string_view(value).find_first_not_of(" \t") == std::string_view::npos) {
      unsetenv(variable.c_str());  // blank counts as unset; CLI11 would read it
      continue;
    }
    if (given(args, *option)) continue;
    const std::string flag = "--" + option->get_lnames().front();
    args.insert(args.begin() + 1, std::string(flag).append("=").append(value));
    added.emplace_back(flag, std::string(variable).append("=").append(value));
  }
  return added;
}

// Which variable set the flag that an error names.
void name_variables(const std::string& error, const Variables& added) {
  for (const auto& [flag, variable] : added)
    if (error.find(flag + ":") != std::string::npos || error.find(flag + " ") != std::string::npos)
      log(LogLevel::kError, flag + " was set by the variable " + variable);
}

int run_main(int argc, char** argv) {
  CLI::App app("pagedkv runs language models (GGUF) on a paged KV cache.", "pagedkv");
  app.set_version_flag("--version", PAGEDKV_VERSION_TEXT);
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  std::function<int()> command;
  add_run(app, command);
  add_bench(app, command);
  add_perplexity(app, command);
  auto args = rewrite_short_flags(argc, argv);
  const CLI::App* sub = nullptr;
  for (const CLI::App* each : app.get_subcommands([](const CLI::App*) { return true; }))
    if (!args.empty() && each->check_name(args[0])) sub = each;
  if (!args.empty() && args[0].rfind('-', 0) != 0 && !sub)
    throw std::invalid_argument("\"" + args[0] +
                                "\" is no subcommand: there are run, bench and perplexity");
  prefer_flag(args,
              {"--kv-cache-dtype", "--paged-kv-quantization", "--paged-kv-quant", "--kv-quant"},
              {"PAGEDKV_CACHE_TYPE_K", "PAGEDKV_CACHE_TYPE_V"});
  Variables added;
  if (sub) added = add_variables(*sub, args);
  std::reverse(args.begin(), args.end());  // CLI11 takes them last first
  try {
    app.parse(args);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);  // prints help and version on stdout, errors on stderr
    if (code != 0) name_variables(e.what(), added);
    if (!std::cout.flush()) throw std::runtime_error("standard output: cannot be written");
    return code == 0 ? kOk : kUsage;
  }
  return command();
}

}  // namespace
}  // namespace pagedkv::apps

// The one place that turns errors into exit codes.
int main(int argc, char** argv) {
  using namespace pagedkv;
  using namespace pagedkv::apps;
  try {
    connect_log();
    return run_main(argc, argv);
  } catch (const ModelError& e) {
    return report(e, kModel);
  } catch (const EnvironmentError& e) {
    return report(e, kEnvironment);
  } catch (const CapacityError& e) {
    return report(e, kResource);
  } catch (const MemoryError& e) {
    return report(e, kResource);
  } catch (const std::bad_alloc&) {
    return report(std::runtime_error("out of memory"), kResource);
  } catch (const std::invalid_argument& e) {
    return report(e, kUsage);
  } catch (const std::exception& e) {
    return report(e, kFailure);
  }
}
