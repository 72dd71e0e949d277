#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace pagedkv::apps {

// `pagedkv serve`: an OpenAI-compatible server for one model. When the arguments name it, `command` becomes what runs it and
// returns the exit code.
void add_serve(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
