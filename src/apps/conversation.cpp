#include "apps/conversation.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "engine/text_stream.h"

namespace pagedkv::apps {
namespace {

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
  ~File() { close(fd); }
};

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
  if (!std::filesystem::exists(path))
    throw std::invalid_argument("--continue: there is no conversation at " + path);
  std::ifstream in(path, std::ios::binary);
  Conversation out;
  try {
    const auto all = ordered_json::parse(in);
    for (const auto& message : all.at("messages"))
      out.add(message.at("role").get<std::string>(), message.at("content").get<std::string>());
  } catch (const ordered_json::exception& error) {
    fail(path, std::string("is no conversation: ") + error.what());
  }
  return out;
}

void Conversation::save(const std::string& path) const {
  ordered_json list = ordered_json::array();
  for (const auto& m : messages_)
    list.push_back({{"role", m.role}, {"content", valid_utf8(m.content)}});
  const std::string text = ordered_json{{"messages", list}}.dump(1) + "\n";
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail(folder.string(), "cannot be made: " + error.message());
  chmod(folder.c_str(), 0700);
  const std::string part = path + "." + std::to_string(getpid()) + ".part";
  {
    const File file{open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
    if (file.fd < 0) fail(part, std::string("cannot be written: ") + std::strerror(errno));
    write_all(file.fd, text, part);
  }
  if (std::rename(part.c_str(), path.c_str()) != 0)
    fail(path, std::string("cannot be replaced: ") + std::strerror(errno));
}

std::string conversation_path() {
  const char* state = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  const std::string folder =
      state && *state ? state : std::string(home ? home : "") + "/.local/state";
  return folder + "/pagedkv/conversation.json";
}

}  // namespace pagedkv::apps
