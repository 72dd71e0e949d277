#include "core/memory_budget.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace pagedkv {
namespace {

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive_file;  // key in memory.stat; v1's plain key leaves the children out
};

constexpr CgroupFiles kV1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                             "total_inactive_file"};
constexpr CgroupFiles kV2 = {"/memory.max", "/memory.current", "inactive_file"};

std::optional<int64_t> parse_bytes(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || value < 0) return std::nullopt;
  return value;
}

// The first word of the file as a number; nothing for "max" or a file that is not there.
std::optional<int64_t> read_bytes(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return parse_bytes(word);
}

// The number after `key` in a file of "key number" lines.
std::optional<int64_t> read_field(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name, value;
    if (words >> name >> value && name == key) return parse_bytes(value);
  }
  return std::nullopt;
}

// What one cgroup leaves, its ancestors aside.
int64_t left_in_cgroup(const std::string& folder, const CgroupFiles& files) {
  const auto limit = read_bytes(folder + files.limit);
  const auto usage = read_bytes(folder + files.usage);
  if (!limit || !usage) return kUnlimitedBytes;
  const int64_t cache = read_field(folder + "/memory.stat", files.inactive_file).value_or(0);
  return std::max<int64_t>(0, *limit - *usage + std::min(cache, *usage));
}

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == word) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

// The process's place in the v1 memory hierarchy (lines "4:memory:/path") or in v2 ("0::/path").
std::optional<std::string> cgroup_path(const std::string& root, bool v2) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers =
        std::string_view(line).substr(first + 1, second - first - 1);
    if (v2 ? line.starts_with("0::") : has_word(controllers, "memory"))
      return line.substr(second + 1);
  }
  return std::nullopt;
}

struct Mount {
  std::string root;   // the part of the hierarchy that is mounted
  std::string point;  // where
};

// Lines of mountinfo: id parent device root point options [more] - type source super_options.
std::optional<Mount> cgroup_mount(const std::string& root, bool v2) {
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line.substr(0, dash)), right(line.substr(dash + 3));
    std::string id, parent, device, type, source, options;
    Mount mount;
    left >> id >> parent >> device >> mount.root >> mount.point;
    right >> type >> source >> options;
    if (v2 ? type == "cgroup2" : type == "cgroup" && has_word(options, "memory")) return mount;
  }
  return std::nullopt;
}

int64_t left_in_hierarchy(const std::string& root, bool v2) {
  const auto path = cgroup_path(root, v2);
  const auto mount = cgroup_mount(root, v2);
  if (!path || !mount) return kUnlimitedBytes;
  // In a container the mounted part may begin at our own cgroup, or our path may lie outside of it:
  // then the mount point itself is the best that can be seen.
  std::string below = *path == "/" ? "" : *path;
  if (mount->root != "/")
    below = below.starts_with(mount->root) ? below.substr(mount->root.size()) : "";
  if (below.find("..") != std::string::npos) below.clear();

  int64_t left = kUnlimitedBytes;
  for (;;) {
    left = std::min(left, left_in_cgroup(root + mount->point + below, v2 ? kV2 : kV1));
    const size_t slash = below.rfind('/');
    if (slash == std::string::npos) return left;
    below.resize(slash);
  }
}

int64_t left_in_machine(const std::string& root) {
  const auto kib = read_field(root + "/proc/meminfo", "MemAvailable:");
  return kib ? *kib * 1024 : kUnlimitedBytes;
}

}  // namespace

int64_t available_memory(const std::string& root) {
  return std::min(
      {left_in_machine(root), left_in_hierarchy(root, false), left_in_hierarchy(root, true)});
}

}  // namespace pagedkv
