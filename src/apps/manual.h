// What is made from the flags themselves: shell completions and the manual page.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace pagedkv::apps {

// `pagedkv completion bash|zsh|fish` and `pagedkv manual`, of all subcommands that `app` has when they run.
void add_manual(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
