#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace pagedkv::apps {

// `pagedkv run`: text from a prompt. The answer alone goes to stdout.
// When the arguments name it, `command` becomes what runs it and returns the exit code.
void add_run(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
