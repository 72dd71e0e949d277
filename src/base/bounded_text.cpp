#include "base/bounded_text.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace pagedkv {

std::string read_regular_file(const std::string& path, int64_t most) {
  struct Descriptor {
    int fd;
    ~Descriptor() {
      if (fd >= 0) close(fd);
    }
  };
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status{};
  if (file.fd < 0 || fstat(file.fd, &status) != 0)
    throw std::runtime_error(std::string("cannot be opened: ") + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) throw std::runtime_error("is not a regular file");
  if (status.st_size > most)
    throw std::runtime_error("has " + std::to_string(status.st_size) + " bytes; at most " +
                             std::to_string(most) + " are read");
  std::string text(static_cast<size_t>(most), '\0');
  size_t done = 0;
  for (;;) {  // a file of /proc says that it has no bytes
    const ssize_t n = read(file.fd, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::runtime_error(std::string("cannot be read: ") + std::strerror(errno));
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  return text;
}

int64_t json_depth(std::string_view text) noexcept {
  int64_t depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') ++i;
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    if (c == ']' || c == '}') --depth;
  }
  return deepest;
}

}  // namespace pagedkv
