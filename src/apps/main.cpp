// The pagedkv program: arguments in, exit codes out.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <new>
#include <optional>
#include <string>

#include "apps/bench.h"
#include "apps/cli.h"
#include "apps/doctor.h"
#include "apps/manual.h"
#include "apps/perplexity.h"
#include "apps/plan.h"
#include "apps/run.h"
#include "apps/serve.h"
#include "apps/settings.h"
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
    const std::string message = printable(std::string(text));
    if (level == LogLevel::kInfo) spdlog::info("{}", message);
    if (level == LogLevel::kWarning) spdlog::warn("warning: {}", message);
    if (level == LogLevel::kError) spdlog::error("error: {}", message);
  });
}

int report(const std::exception& e, ExitCode code) {
  log(LogLevel::kError, e.what());
  return code;
}

int run_main(int argc, char** argv) {
  CLI::App app("pagedkv runs language models (GGUF) on a paged KV cache.", "pagedkv");
  app.set_version_flag("--version", PAGEDKV_VERSION_TEXT);
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  std::function<int()> command;
  add_run(app, command);
  add_serve(app, command);
  add_bench(app, command);
  add_perplexity(app, command);
  add_plan(app, command);
  add_doctor(app, command);
  for (CLI::App* each : app.get_subcommands({})) add_configuration(*each);
  add_manual(app, command);
  auto args = rewrite_short_flags(argc, argv);
  const auto commands = app.get_subcommands([](const CLI::App*) { return true; });
  const CLI::App* sub = nullptr;
  for (const CLI::App* each : commands)
    if (!args.empty() && each->check_name(args[0])) sub = each;
  if (!args.empty() && args[0].rfind('-', 0) != 0 && !sub) {
    std::string names;
    for (const CLI::App* each : commands) names += (names.empty() ? "" : ", ") + each->get_name();
    throw std::invalid_argument("\"" + args[0] + "\" is no subcommand: there are " + names);
  }
  std::optional<Settings> settings;
  if (sub && sub->get_option_no_throw("--config")) settings.emplace(app, *sub, args);
  std::reverse(args.begin(), args.end());  // CLI11 takes them last first
  try {
    app.parse(args);
  } catch (const CLI::ParseError& e) {
    const int code = app.exit(e);  // prints help and version on stdout, errors on stderr
    if (code != 0 && settings) settings->explain(e.what());
    if (!std::cout.flush()) throw std::runtime_error("standard output: cannot be written");
    return code == 0 ? kOk : kUsage;
  }
  if (settings && sub->count("--print-config") > 0) {
    if (!(std::cout << settings->show(*sub)).flush())
      throw std::runtime_error("standard output: cannot be written");
    return kOk;
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
