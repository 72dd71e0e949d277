// Where the library's few messages go: a callback, so that the library has no logging dependency.
#pragma once

#include <functional>
#include <string_view>

namespace [[gnu::visibility("default")]] pagedkv {

enum class LogLevel { kInfo, kWarning, kError };

// `message` is one line without its newline, valid during the call alone. May be called from any thread.
using LogSink = std::function<void(LogLevel level, std::string_view message)>;

// Replaces the sink of the process and returns the one before. The first sink writes warnings and
// errors to stderr. An empty sink discards everything.
LogSink set_log_sink(LogSink sink);

void log(LogLevel level, std::string_view message);

// Logs `message` at most once per process for each `key`.
void warn_once(std::string_view key, std::string_view message);

}  // namespace pagedkv
