// What ggml and libllama say, sent where the rest of pagedkv's messages go.
//
// Both libraries log through one callback of the process. Warnings and errors go to pagedkv::log; the
// rest is dropped. Where an error text is needed for an exception, LogCapture takes it instead.
#pragma once

#include <string>

namespace pagedkv {

// Installs the callback. Cheap; called by every entry into the two libraries.
void route_ggml_log();

// While one lives, what the libraries log on this thread is kept here instead. Not to be nested.
class LogCapture {
 public:
  LogCapture();
  ~LogCapture();
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;
  // The warnings and errors so far as one line, without the names of the functions that logged them.
  std::string text() const;

 private:
  std::string lines_;
};

}  // namespace pagedkv
