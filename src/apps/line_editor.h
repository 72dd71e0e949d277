// Lines typed at a terminal, with editing and a history (libedit; ~/.editrc is honoured). Draws on stderr, so that stdout has
// the answers alone.
#pragma once

#include <memory>
#include <string>

namespace pagedkv::apps {

class LineEditor {
 public:
  // Throws std::runtime_error when the terminal cannot be used.
  LineEditor();
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  enum class Read { kLine, kInterrupted, kEnd };
  // A line without its newline. kInterrupted: Ctrl-C; kEnd: Ctrl-D on an empty line, or no more input.
  Read read(const std::string& prompt, std::string& line);
  void remember(const std::string& text);  // for the arrow keys

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv::apps
