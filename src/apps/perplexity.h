#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace pagedkv::apps {

// `pagedkv perplexity`: how well the model predicts a text, by page format (llama-perplexity's numbers).
// When the arguments name it, `command` becomes what runs it and returns the exit code.
void add_perplexity(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
