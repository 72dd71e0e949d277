#include "apps/conversation.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "apps/cli.h"
#include "base/bounded_text.h"
#include "engine/text_stream.h"
#include "pagedkv/base/log.h"

namespace pagedkv::apps {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error(path + ": " + what);
}

void write_all(int fd, const std::string& text, const std::string& path) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, std::string("cannot be written: ") + std::strerror(errno));
    done += static_cast<size_t>(n);
  }
}

struct File {
  int fd;
  ~File() {
    if (fd >= 0) close(fd);
  }
};

constexpr int64_t kMostBytes = int64_t{64} << 20;

}  // namespace

void Conversation::set_system(const std::string& text) {
  if (!empty() && messages_[0].role == "system") messages_.erase(messages_.begin());
  if (!text.empty()) messages_.insert(messages_.begin(), {"system", text});
}

void Conversation::add(std::string role, std::string content) {
  messages_.push_back({std::move(role), std::move(content)});
}

void Conversation::clear() {
  const bool system = !empty() && messages_[0].role == "system";
  messages_.resize(system ? 1 : 0);
}

Conversation Conversation::load(const std::string& path) {
  std::error_code none;
  if (!fs::exists(path, none))
    throw std::invalid_argument("--continue: there is no conversation at " + path);
  const std::string text = [&] {
    try {
      return read_regular_file(path, kMostBytes);
    } catch (const std::runtime_error& error) {
      fail(path, error.what());
    }
  }();
  if (json_depth(text) > kMostJsonDepth) fail(path, "is no conversation: it is nested too deep");
  Conversation out;
  try {
    const auto all = ordered_json::parse(text);
    const auto& list = all.at("messages");
    if (!list.is_array()) fail(path, "is no conversation: messages is not a list");
    for (const auto& message : list)
      out.add(message.at("role").get<std::string>(), message.at("content").get<std::string>());
  } catch (const ordered_json::exception& error) {
    fail(path, std::string("is no conversation: ") + error.what());
  }
  for (const ChatMessage& m : out.messages())
    if (m.role != "system" && m.role != "user" && m.role != "assistant")
      fail(path, "is no conversation: there is no role \"" + m.role + "\"");
  return out;
}

void Conversation::save(const std::string& path) const {
  ordered_json list = ordered_json::array();
  for (const auto& m : messages_)
    list.push_back({{"role", m.role}, {"content", valid_utf8(m.content)}});
  const std::string text = ordered_json{{"messages", list}}.dump(1) + "\n";
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  fs::create_directories(folder, error);
  if (error) fail(folder.string(), "cannot be made: " + error.message());
  chmod(folder.c_str(), 0700);
  const fs::path linked = fs::canonical(path, error);  // a link stays one
  const std::string target = error ? path : linked.string();
  const std::string part = target + "." + std::to_string(getpid()) + ".part";
  try {
    const File file{open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
    if (file.fd < 0) fail(part, std::string("cannot be written: ") + std::strerror(errno));
    write_all(file.fd, text, part);
    if (fsync(file.fd) != 0 || std::rename(part.c_str(), target.c_str()) != 0)
      fail(target, std::string("cannot be replaced: ") + std::strerror(errno));
  } catch (...) {
    unlink(part.c_str());
    throw;
  }
}

bool Conversation::keep(const std::string& path) const {
  try {
    save(path);
    return true;
  } catch (const std::runtime_error& error) {
    log(LogLevel::kWarning,
        "the conversation is not kept for --continue: " + std::string(error.what()));
    return false;
  }
}

std::string conversation_path() {
  return own_folder("XDG_STATE_HOME", "/.local/state") + "/conversation.json";
}

}  // namespace pagedkv::apps
