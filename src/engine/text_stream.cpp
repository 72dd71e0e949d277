#include "engine/text_stream.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace pagedkv {
namespace {

// Bytes of the character that starts at text[0]: 1..4 when whole; 0 when no character starts so;
// -n when the n bytes there begin one but the text ends too soon. Source: Unicode 15, table 3-7.
int character_length(std::string_view text) noexcept {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  const int length = lead >= 0xc2 && lead <= 0xdf   ? 2
                     : lead >= 0xe0 && lead <= 0xef ? 3
                     : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                    : 0;
  if (length == 0) return 0;
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == text.size()) return -i;
    uint8_t low = 0x80, high = 0xbf;
    if (i == 1) {
      if (lead == 0xe0) low = 0xa0;
      if (lead == 0xed) high = 0x9f;
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;
    }
    if (byte(i) < low || byte(i) > high) return 0;
  }
  return length;
}

}  // namespace

size_t whole_characters(std::string_view bytes) noexcept {
  // An unfinished character is at most 3 bytes at the end.
  for (size_t back = 1; back <= std::min<size_t>(3, bytes.size()); ++back) {
    const std::string_view tail = bytes.substr(bytes.size() - back);
    if ((static_cast<uint8_t>(tail[0]) & 0xc0) == 0x80)
      continue;  // a continuation byte: look further left
    return character_length(tail) < 0 ? bytes.size() - back : bytes.size();
  }
  return bytes.size();
}

std::string valid_utf8(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    const int length = character_length(bytes);
    if (length > 0) {
      out.append(bytes.substr(0, length));
      bytes.remove_prefix(length);
      continue;
    }
    out += "\xef\xbf\xbd";
    if (length < 0) break;
    // The longest run that began like a character is one replacement, as the WHATWG decoder does.
    size_t skip = 1;
    while (skip < bytes.size() && skip < 4 && character_length(bytes.substr(0, skip)) < 0 &&
           character_length(bytes.substr(0, skip + 1)) < 0)
      ++skip;
    bytes.remove_prefix(skip);
  }
  return out;
}

TextStream::TextStream(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const auto& s : stops_)
    if (s.empty()) throw std::invalid_argument("stop: a stop text must not be empty");
}

std::string TextStream::push(std::string_view bytes, bool may_stop) {
  if (stopped_) return {};
  held_ += bytes;
  if (!may_stop) return release(whole_characters(held_));
  size_t end = std::string::npos;
  for (const auto& s : stops_) end = std::min(end, held_.find(s));
  if (end != std::string::npos) {
    stopped_ = true;
    std::string out = valid_utf8(std::string_view(held_).substr(0, end));
    held_.clear();
    return out;
  }
  size_t free = whole_characters(held_);
  for (const auto& s : stops_) {  // keep the longest tail that may become a stop text
    const size_t longest = std::min(s.size() - 1, held_.size());
    for (size_t n = longest; n > 0; --n) {
      if (held_.compare(held_.size() - n, n, s, 0, n) == 0) {
        free = std::min(free, held_.size() - n);
        break;
      }
    }
  }
  return release(whole_characters(std::string_view(held_).substr(0, free)));
}

// The first `length` bytes that are held.
std::string TextStream::release(size_t length) {
  std::string out = valid_utf8(std::string_view(held_).substr(0, length));
  held_.erase(0, length);
  return out;
}

std::string TextStream::finish() {
  std::string out = stopped_ ? std::string() : valid_utf8(held_);
  held_.clear();
  return out;
}

}  // namespace pagedkv
