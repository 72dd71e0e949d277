// A pool under a memory limit that the kernel enforces: growth ends in a refusal, not in a kill.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "core/memory_budget.h"
#include "core/pool_testing.h"

namespace pagedkv {
namespace {

namespace fs = std::filesystem;
using testing::group;
using testing::layer;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kLimit = 1024 * kMiB;
constexpr int64_t kTaken = 600 * kMiB;

// Grows pools page by page until they refuse, beside kTaken bytes of others. Returns what is wrong.
std::string grow_until_refused(PagePoolOptions o) {
  o.groups = {group(2, layer(8, 128))};
  o.max_pages = 100000;
  PagePool pool(o);
  PageId page;
  while (pool.try_allocate(0, {&page, 1}))
    if (pool.stats().bytes_committed > kLimit) return "the pool has grown beyond the limit";
  const int64_t committed = pool.stats().bytes_committed;
  if (pool.refusal() != PagePool::Refusal::kBudget) return "refused: " + pool.refusal_text();
  if (committed + kTaken + o.headroom_bytes > kLimit)
    return "committed " + std::to_string(committed) + " of too little";
  if (committed + kTaken + o.headroom_bytes < kLimit - 64 * kMiB)
    return "refused at " + std::to_string(committed) + ": " + pool.refusal_text();
  pool.verify();
  page = 0;
  pool.release(0, {&page, 1});  // the pool goes on
  return pool.try_allocate(0, {&page, 1}) ? "" : "no page after a release";
}

// A cgroup below that of this process, of its own limit; gone at the end.
class Cgroup {
 public:
  explicit Cgroup(int64_t limit) {
    std::ifstream file("/proc/self/cgroup");
    bool v1 = false;
    for (std::string line; !v1 && std::getline(file, line);) {
      const std::string path = line.substr(line.rfind(':') + 1);
      v1 = line.find(":memory:") != std::string::npos;
      if (v1)
        make("/sys/fs/cgroup/memory" + path, "memory.limit_in_bytes", limit);
      else if (line.starts_with("0::") && fs::exists("/sys/fs/cgroup/cgroup.controllers"))
        make("/sys/fs/cgroup" + path, "memory.max", limit);
    }
  }
  ~Cgroup() {
    if (!folder_.empty()) rmdir(folder_.c_str());
  }
  Cgroup(const Cgroup&) = delete;
  Cgroup& operator=(const Cgroup&) = delete;

  const std::string& why_not() const { return why_not_; }  // empty: it is there
  bool enter() const {
    std::ofstream file(folder_ + "/cgroup.procs");
    return static_cast<bool>(file << getpid() << std::flush);
  }

 private:
  void make(const std::string& parent, const char* limit_file, int64_t limit) {
    const std::string folder = parent + "/pagedkv_test_" + std::to_string(getpid());
    why_not_ = folder + ": ";
    if (mkdir(folder.c_str(), 0755) != 0) {
      why_not_ += std::strerror(errno);
      return;
    }
    folder_ = folder;
    std::ofstream file(folder + "/" + limit_file);
    if (file << limit << std::flush)
      why_not_.clear();
    else
      why_not_ += std::string(limit_file) + " cannot be written";
  }

  std::string folder_;
  std::string why_not_ = "no memory cgroup is mounted";
};

// Runs `body` in a child that has entered a cgroup; it returns what is wrong.
void expect_in_cgroup(const std::function<std::string()>& body) {
  if (testing::kSanitized) GTEST_SKIP() << "a sanitizer maps memory of its own";
  if (available_memory() < kLimit + 512 * kMiB) GTEST_SKIP() << "less than 1.5 GiB are free";
  const Cgroup cgroup(kLimit);
  if (!cgroup.why_not().empty()) GTEST_SKIP() << cgroup.why_not();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::string fault = cgroup.enter() ? body() : "the cgroup cannot be entered";
    if (!fault.empty()) std::fprintf(stderr, "%s\n", fault.c_str());
    _exit(fault.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_FALSE(WIFSIGNALED(status)) << "killed by signal " << WTERMSIG(status);
  ASSERT_EQ(WEXITSTATUS(status), 0);
}

TEST(Cgroup, GrowthEndsInARefusalAndNotInAKill) {
  for (int run = testing::scaled(2); run > 0 && !HasFailure() && !IsSkipped(); --run)
    expect_in_cgroup([&] {
      const std::vector<char> taken(static_cast<size_t>(kTaken), 1);
      PagePoolOptions o;
      o.headroom_bytes = (run % 2 == 0 ? 256 : 64) * kMiB;
      const std::string fault = grow_until_refused(o);
      return taken[taken.size() / 2] == 1 ? fault : "memory was lost";
    });
}

// Of huge pages given back in part, too: the kernel would keep them whole.
TEST(Cgroup, WhatIsGivenBackIsThereForOthersAtOnce) {
  expect_in_cgroup([]() -> std::string {
    PagePoolOptions o = testing::options(1, 16, group(2, layer(8, 128)));
    PagePool pool(o);
    std::vector<PageId> freed = testing::take(pool, 2048);  // 256 MiB in one commit: huge pages
    std::erase_if(freed, [](PageId page) { return page % 32 == 31; });
    pool.release(0, freed);
    const int64_t before = available_memory();
    pool.shrink_to(0, 1);
    const int64_t given = pool.stats().bytes_given_back, more = available_memory() - before;
    if (given == 2048 / 32 * 31 * (128 << 10) && std::abs(more - given) <= given / 20) return "";
    return std::to_string(given) + " bytes given back, " + std::to_string(more) + " are there";
  });
}

// The same numbers on a machine made of files, whose usage follows the pool's.
TEST(Cgroup, GrowthEndsInARefusalByTheFilesOfOne) {
  const fs::path root =
      fs::path(::testing::TempDir()) / ("pagedkv_pool_cgroup_" + std::to_string(getpid()));
  const auto file = [&](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  file("proc/self/cgroup", "0::/app\n");
  file("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  file("sys/fs/cgroup/app/memory.max", std::to_string(kLimit));
  file("sys/fs/cgroup/app/memory.stat", "inactive_file 0\n");
  int64_t used = kTaken;
  PagePoolOptions o;
  o.available_bytes = [&] {
    file("sys/fs/cgroup/app/memory.current", std::to_string(used));
    return available_memory(root.string());
  };
  o.commit_hook = [&](int64_t bytes) {
    used += bytes;
    return true;
  };
  EXPECT_EQ(grow_until_refused(o), "");
  EXPECT_LE(used, kLimit - o.headroom_bytes);
  fs::remove_all(root);
}

}  // namespace
}  // namespace pagedkv
