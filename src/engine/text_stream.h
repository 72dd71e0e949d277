// Turns token bytes into text that can be sent: whole UTF-8 characters only, and nothing that is or
// may still become a stop text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace pagedkv {

class TextStream {
 public:
  // Throws std::invalid_argument when a stop text is empty.
  explicit TextStream(std::vector<std::string> stops = {});

  // Adds the bytes of a token and returns the text that became free. After a stop text was found,
  // stopped() is true and nothing more comes. may_stop false: it is not looked for yet.
  std::string push(std::string_view bytes, bool may_stop = true);

  // The end: returns what was held back; an unfinished character becomes one U+FFFD.
  std::string finish();

  bool stopped() const noexcept { return stopped_; }

 private:
  std::string release(size_t length);

  std::vector<std::string> stops_;
  std::string held_;  // valid UTF-8 but for an unfinished character at its end
  bool stopped_ = false;
};

// Length of the longest prefix of `bytes` that does not end inside a UTF-8 character. Bytes that can
// be no part of a character count as whole.
size_t whole_characters(std::string_view bytes) noexcept;

// `bytes` with each maximal invalid part replaced by U+FFFD.
std::string valid_utf8(std::string_view bytes);

}  // namespace pagedkv
