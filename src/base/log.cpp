#include "pagedkv/base/log.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace pagedkv {
namespace {

void write_to_stderr(LogLevel level, std::string_view message) {
  if (level == LogLevel::kInfo) return;
  std::fprintf(stderr, "pagedkv: %s: %.*s\n", level == LogLevel::kError ? "error" : "warning",
               static_cast<int>(message.size()), message.data());
}

struct State {
  std::mutex mutex;
  LogSink sink = write_to_stderr;
  std::set<std::string, std::less<>> warned;
};

State& state() {
  static State* const s = new State;  // never destroyed: threads may log while the process ends
  return *s;
}

}  // namespace

LogSink set_log_sink(LogSink sink) {
  std::lock_guard lock(state().mutex);
  return std::exchange(state().sink, std::move(sink));
}

void log(LogLevel level, std::string_view message) {
  LogSink sink;
  {
    std::lock_guard lock(state().mutex);
    sink = state().sink;
  }
  if (sink) sink(level, message);
}

void warn_once(std::string_view key, std::string_view message) {
  {
    std::lock_guard lock(state().mutex);
    if (!state().warned.emplace(key).second) return;
  }
  log(LogLevel::kWarning, message);
}

}  // namespace pagedkv
