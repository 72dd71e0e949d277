#pragma once

#include <CLI/CLI.hpp>

namespace pagedkv::apps {

// `pagedkv bench`: prompt and generation speed with llama-bench's flags and JSON fields.
void add_bench(CLI::App& app, int& exit_code);

}  // namespace pagedkv::apps
