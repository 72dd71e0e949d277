#pragma once

#include <CLI/CLI.hpp>

namespace pagedkv::apps {

// `pagedkv run`: text from a prompt. The answer alone goes to stdout.
void add_run(CLI::App& app, int& exit_code);

}  // namespace pagedkv::apps
