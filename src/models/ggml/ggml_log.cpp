#include "models/ggml/ggml_log.h"

#include <mutex>
#include <string_view>

#include "llama.h"
#include "pagedkv/base/log.h"

namespace pagedkv {
namespace {

thread_local std::string* capture = nullptr;

void forward(ggml_log_level level, std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  if (text.empty()) return;
  log(level == GGML_LOG_LEVEL_ERROR ? LogLevel::kError : LogLevel::kWarning, text);
}

// A line may come in pieces, the later ones marked CONT; a piece that ends a dropped line is dropped.
void on_log(ggml_log_level level, const char* text, void*) {
  thread_local ggml_log_level line_level = GGML_LOG_LEVEL_NONE;
  if (level != GGML_LOG_LEVEL_CONT) line_level = level;
  if (line_level != GGML_LOG_LEVEL_WARN && line_level != GGML_LOG_LEVEL_ERROR) return;
  if (capture) {
    *capture += text;
  } else {
    forward(line_level, text);
  }
}

// "gguf_init: tensor 'x' is bad" becomes "tensor 'x' is bad".
std::string_view without_function_name(std::string_view line) {
  const size_t colon = line.find(": ");
  if (colon == std::string_view::npos) return line;
  for (const char c : line.substr(0, colon)) {
    const bool name = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '_' || c == ':';
    if (!name) return line;
  }
  return line.substr(colon + 2);
}

}  // namespace

void route_ggml_log() {
  static std::once_flag once;
  std::call_once(once, [] { llama_log_set(on_log, nullptr); });
}

LogCapture::LogCapture() {
  route_ggml_log();
  capture = &lines_;
}

LogCapture::~LogCapture() { capture = nullptr; }

std::string LogCapture::text() const {
  std::string out;
  std::string_view rest = lines_;
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::string_view line = without_function_name(rest.substr(0, end));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
    if (line.empty()) continue;
    if (!out.empty()) out += "; ";
    out += line;
  }
  return out;
}

}  // namespace pagedkv
