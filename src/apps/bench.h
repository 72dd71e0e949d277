#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace pagedkv::apps {

// `pagedkv bench`: prompt and generation speed with llama-bench's flags and JSON fields.
// When the arguments name it, `command` becomes what runs it and returns the exit code.
void add_bench(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
