#include "core/memory_budget.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <optional>
#include <string_view>

namespace pagedkv {
namespace {

struct CgroupFiles {
  const char* limit;
  const char* usage;
  std::string_view inactive_file;  // key in memory.stat; v1's plain key leaves the children out
};

constexpr CgroupFiles kV1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                             "total_inactive_file"};
constexpr CgroupFiles kV2 = {"/memory.max", "/memory.current", "inactive_file"};

// v1 writes "no limit" as the largest multiple of the OS page; no machine comes near this.
constexpr int64_t kNoLimit = int64_t{1} << 60;

// Plain reads: iostreams would take four times as long as the kernel does.
std::string read_text(const std::string& path) {
  const struct File {
    int descriptor;
    ~File() {
      if (descriptor >= 0) close(descriptor);
    }
  } file{open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  std::string text;
  char buffer[8192];
  while (file.descriptor >= 0) {
    const ssize_t got = read(file.descriptor, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

// Cuts the part up to the next separator off the front of `text`.
std::string_view next(std::string_view& text, char separator) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return part;
}

std::string_view next_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
  const size_t end = std::min(line.find_first_of(" \t\n"), line.size());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(end);
  return word;
}

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty())
    if (next(list, ',') == word) return true;
  return false;
}

std::optional<int64_t> parse_bytes(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || value < 0) return std::nullopt;
  return value;
}

// The first word of the file as a number; nothing for "max" or a file that is not there.
std::optional<int64_t> read_bytes(const std::string& path) {
  const std::string text = read_text(path);
  std::string_view rest = text;
  return parse_bytes(next_word(rest));
}

// The number after `key` in a file of "key number" lines.
std::optional<int64_t> read_field(const std::string& path, std::string_view key) {
  const std::string text = read_text(path);
  for (std::string_view rest = text; !rest.empty();) {
    std::string_view line = next(rest, '\n');
    if (next_word(line) == key) return parse_bytes(next_word(line));
  }
  return std::nullopt;
}

// What one cgroup may use, its ancestors aside.
int64_t limit_of_cgroup(const std::string& folder, const CgroupFiles& files) {
  const auto limit = read_bytes(folder + files.limit);
  return !limit || *limit >= kNoLimit ? kUnlimitedBytes : *limit;
}

// What it leaves.
int64_t left_in_cgroup(const std::string& folder, const CgroupFiles& files) {
  const int64_t limit = limit_of_cgroup(folder, files);
  if (limit == kUnlimitedBytes) return kUnlimitedBytes;
  const auto usage = read_bytes(folder + files.usage);
  if (!usage) return kUnlimitedBytes;
  const int64_t cache = read_field(folder + "/memory.stat", files.inactive_file).value_or(0);
  return std::max<int64_t>(0, limit - *usage + std::min(cache, *usage));
}

// The process's place in the v1 memory hierarchy (lines "4:memory:/path") or in v2 ("0::/path").
std::optional<std::string> cgroup_path(std::string_view cgroups, bool v2) {
  while (!cgroups.empty()) {
    std::string_view line = next(cgroups, '\n');
    const std::string_view id = next(line, ':');
    const std::string_view controllers = next(line, ':');
    if (line.empty()) continue;
    if (v2 ? id == "0" && controllers.empty() : has_word(controllers, "memory"))
      return std::string(line);
  }
  return std::nullopt;
}

struct Mount {
  std::string root;   // the part of the hierarchy that is mounted
  std::string point;  // where
};

// Lines of mountinfo: id parent device root point options [more] - type source super_options.
std::optional<Mount> cgroup_mount(std::string_view mounts, bool v2) {
  while (!mounts.empty()) {
    std::string_view left = next(mounts, '\n');
    const size_t dash = left.find(" - ");
    if (dash == std::string_view::npos) continue;
    std::string_view right = left.substr(dash + 3);
    left = left.substr(0, dash);
    const std::string_view type = next_word(right);
    next_word(right);
    if (v2 ? type != "cgroup2" : type != "cgroup" || !has_word(next_word(right), "memory"))
      continue;
    for (int skipped = 0; skipped < 3; ++skipped) next_word(left);
    const std::string_view root = next_word(left);
    return Mount{std::string(root), std::string(next_word(left))};
  }
  return std::nullopt;
}

using AskCgroup = int64_t (*)(const std::string& folder, const CgroupFiles& files);

// The least that `ask` tells of the process's cgroup and of each of its ancestors.
int64_t least_in_hierarchy(const std::string& root, const std::string& cgroups,
                           const std::string& mounts, bool v2, AskCgroup ask) {
  const auto path = cgroup_path(cgroups, v2);
  const auto mount = cgroup_mount(mounts, v2);
  if (!path || !mount) return kUnlimitedBytes;
  // In a container the mounted part may begin at our own cgroup, or our path may lie outside of it:
  // then the mount point itself is the best that can be seen.
  std::string below = *path == "/" ? "" : *path;
  if (mount->root != "/")
    below = below.starts_with(mount->root) ? below.substr(mount->root.size()) : "";
  if (below.find("..") != std::string::npos) below.clear();

  int64_t least = kUnlimitedBytes;
  for (;;) {
    least = std::min(least, ask(root + mount->point + below, v2 ? kV2 : kV1));
    const size_t slash = below.rfind('/');
    if (slash == std::string::npos) return least;
    below.resize(slash);
  }
}

int64_t least_in_cgroups(const std::string& root, AskCgroup ask) {
  const std::string cgroups = read_text(root + "/proc/self/cgroup");
  const std::string mounts = read_text(root + "/proc/self/mountinfo");
  return std::min(least_in_hierarchy(root, cgroups, mounts, false, ask),
                  least_in_hierarchy(root, cgroups, mounts, true, ask));
}

int64_t meminfo(const std::string& root, std::string_view key) {
  const auto kib = read_field(root + "/proc/meminfo", key);
  return kib && *kib < kUnlimitedBytes / 1024 ? *kib * 1024 : kUnlimitedBytes;
}

}  // namespace

int64_t available_memory(const std::string& root) {
  return std::min(meminfo(root, "MemAvailable:"), least_in_cgroups(root, left_in_cgroup));
}

int64_t memory_limit(const std::string& root) {
  return std::min(meminfo(root, "MemTotal:"), least_in_cgroups(root, limit_of_cgroup));
}

int64_t commit_room(const std::string& root) {
  const std::string mode = read_text(root + "/proc/sys/vm/overcommit_memory");
  if (!mode.starts_with('2')) return kUnlimitedBytes;
  const int64_t limit = meminfo(root, "CommitLimit:");
  const int64_t used = meminfo(root, "Committed_AS:");
  return used == kUnlimitedBytes ? limit : std::max<int64_t>(0, limit - used);
}

PoolLimit pool_limit(const PagePoolOptions& options, int64_t available,
                     int64_t committed) noexcept {
  const int64_t more = std::max<int64_t>(0, available - options.headroom_bytes);
  const int64_t machine = more > kUnlimitedBytes - committed ? kUnlimitedBytes : committed + more;
  if (options.max_bytes > 0 && options.max_bytes <= machine) return {options.max_bytes, false};
  return {machine, true};
}

}  // namespace pagedkv
