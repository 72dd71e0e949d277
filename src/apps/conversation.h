// The messages of a chat, and where the last conversation is kept for --continue.
#pragma once

#include <string>
#include <vector>

#include "models/text.h"

namespace pagedkv::apps {

class Conversation {
 public:
  const std::vector<ChatMessage>& messages() const noexcept { return messages_; }
  bool empty() const noexcept { return messages_.empty(); }

  // The system message stands first; a second one takes the place of the first, an empty one removes it.
  void set_system(const std::string& text);
  void add(std::string role, std::string content);
  void drop_last() { messages_.pop_back(); }
  void clear();  // all but the system message

  // Throws std::invalid_argument when there is none, std::runtime_error when it cannot be read.
  static Conversation load(const std::string& path);
  // Replaces the file at once, readable by its owner alone. Throws std::runtime_error.
  void save(const std::string& path) const;
  // The same, but a failure is a warning: what was said is there all the same. Whether it was saved.
  bool keep(const std::string& path) const;

 private:
  std::vector<ChatMessage> messages_;
};

// $XDG_STATE_HOME/pagedkv/conversation.json, or under ~/.local/state.
std::string conversation_path();

}  // namespace pagedkv::apps
