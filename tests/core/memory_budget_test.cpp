#include "core/memory_budget.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace pagedkv {
namespace {

namespace fs = std::filesystem;

// A machine made of files.
class FakeMachine : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::path(::testing::TempDir()) /
            ("pagedkv_budget_" + std::string(test->name()) + "_" + std::to_string(getpid()));
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  void file(const std::string& path, const std::string& text) {
    fs::create_directories((root_.string() + path).substr(0, (root_.string() + path).rfind('/')));
    std::ofstream(root_.string() + path) << text;
  }
  void mem_available(int64_t kib) {
    file("/proc/meminfo", "MemTotal:       16000000 kB\nMemFree:  5 kB\nMemAvailable:   " +
                              std::to_string(kib) + " kB\n");
  }
  void cgroup_v2(const std::string& path, const std::string& max, int64_t current,
                 int64_t inactive) {
    const std::string folder = "/sys/fs/cgroup" + path;
    file(folder + "/memory.max", max + "\n");
    file(folder + "/memory.current", std::to_string(current) + "\n");
    file(folder + "/memory.stat",
         "anon 7\nfile 900\ninactive_file " + std::to_string(inactive) + "\nactive_file 3\n");
  }
  void cgroup_v1(const std::string& path, int64_t limit, int64_t usage, int64_t inactive) {
    const std::string folder = "/sys/fs/cgroup/memory" + path;
    file(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    file(folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    file(folder + "/memory.stat",
         "inactive_file 1\ntotal_inactive_file " + std::to_string(inactive) + "\n");
  }
  void mounts_v2(const std::string& mount_root = "/") {
    file("/proc/self/mountinfo",
         "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n"
         "30 22 0:26 " +
             mount_root + " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void mounts_v1(const std::string& mount_root = "/") {
    file("/proc/self/mountinfo",
         "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
         "35 31 0:32 " +
             mount_root + " /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n");
  }
  int64_t available() { return available_memory(root_.string()); }

  fs::path root_;
};

TEST_F(FakeMachine, WithoutAnyFileNothingLimits) { EXPECT_EQ(available(), kUnlimitedBytes); }

TEST_F(FakeMachine, MemAvailableLimits) {
  mem_available(1000);
  EXPECT_EQ(available(), 1000 * 1024);
}

TEST_F(FakeMachine, CgroupV2LeavesItsLimitLessUsagePlusCache) {
  mem_available(1 << 20);
  file("/proc/self/cgroup", "0::/user.slice/app\n");
  mounts_v2();
  cgroup_v2("/user.slice/app", "1000000", 600000, 50000);
  EXPECT_EQ(available(), 450000);
}

TEST_F(FakeMachine, CgroupV2WithoutALimitIsTheMachine) {
  mem_available(1 << 20);
  file("/proc/self/cgroup", "0::/user.slice/app\n");
  mounts_v2();
  cgroup_v2("/user.slice/app", "max", 600000, 50000);
  EXPECT_EQ(available(), int64_t{1} << 30);
}

TEST_F(FakeMachine, TheTightestAncestorDecides) {
  mem_available(1 << 20);
  file("/proc/self/cgroup", "0::/a/b/c\n");
  mounts_v2();
  cgroup_v2("/a", "500000", 450000, 1000);
  cgroup_v2("/a/b", "max", 450000, 1000);
  cgroup_v2("/a/b/c", "900000", 100000, 0);
  EXPECT_EQ(available(), 51000);
}

TEST_F(FakeMachine, AnOverdrawnCgroupLeavesNothing) {
  file("/proc/self/cgroup", "0::/a\n");
  mounts_v2();
  cgroup_v2("/a", "1000", 5000, 100);
  EXPECT_EQ(available(), 0);
}

TEST_F(FakeMachine, AContainersOwnNamespaceIsItsMountPoint) {
  file("/proc/self/cgroup", "0::/\n");
  mounts_v2();
  cgroup_v2("", "70000", 20000, 0);
  EXPECT_EQ(available(), 50000);
}

TEST_F(FakeMachine, CgroupV1CountsTheCacheOfItsChildren) {
  mem_available(1 << 20);
  file("/proc/self/cgroup", "9:name=systemd:/x\n4:memory:/app\n3:cpu,cpuacct:/y\n0::/\n");
  mounts_v1();
  cgroup_v1("/app", 1000000, 600000, 50000);
  cgroup_v1("", 9223372036854771712, 700000, 0);
  EXPECT_EQ(available(), 450000);
}

TEST_F(FakeMachine, CgroupV1InAContainerIsReadAtTheMountPoint) {
  file("/proc/self/cgroup", "4:memory:/docker/abc\n");
  mounts_v1("/docker/abc");
  cgroup_v1("", 300000, 100000, 0);
  EXPECT_EQ(available(), 200000);
}

TEST_F(FakeMachine, APathOutsideOfTheMountIsReadAtTheMountPoint) {
  file("/proc/self/cgroup", "0::/../other\n");
  mounts_v2();
  cgroup_v2("", "300000", 100000, 0);
  EXPECT_EQ(available(), 200000);
}

TEST_F(FakeMachine, TheLimitIsTheLeastOfMachineAndCgroups) {
  EXPECT_EQ(memory_limit(root_.string()), kUnlimitedBytes);
  mem_available(8'000'000);
  EXPECT_EQ(memory_limit(root_.string()), 16'000'000LL * 1024);
  file("/proc/self/cgroup", "0::/a/b\n");
  file("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  cgroup_v2("/a", "5000000", 4999999, 0);  // whatever is in use
  cgroup_v2("/a/b", "max", 10, 0);
  EXPECT_EQ(memory_limit(root_.string()), 5000000);
  cgroup_v2("/a/b", "4000000", 10, 0);
  EXPECT_EQ(memory_limit(root_.string()), 4000000);
}

TEST_F(FakeMachine, CommitsAreLimitedInModeTwoAlone) {
  file("/proc/meminfo", "CommitLimit:     1000 kB\nCommitted_AS:     400 kB\n");
  EXPECT_EQ(commit_room(root_.string()), kUnlimitedBytes);
  file("/proc/sys/vm/overcommit_memory", "1\n");
  EXPECT_EQ(commit_room(root_.string()), kUnlimitedBytes);
  file("/proc/sys/vm/overcommit_memory", "2\n");
  EXPECT_EQ(commit_room(root_.string()), 600 * 1024);
  file("/proc/meminfo", "CommitLimit:     1000 kB\nCommitted_AS:     1400 kB\n");
  EXPECT_EQ(commit_room(root_.string()), 0);
}

TEST_F(FakeMachine, GarbageDoesNotLimit) {
  file("/proc/meminfo", "MemAvailable: many kB\nMemAvailable\n\n");
  file("/proc/self/cgroup", "nonsense\n0:\n0::/a\n");
  file("/proc/self/mountinfo",
       "1 2 3\n - cgroup2\n30 22 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  cgroup_v2("/a", "-5", 1, 1);
  EXPECT_EQ(available(), kUnlimitedBytes);
}

TEST(AvailableMemory, OfThisMachineIsWithinItsMemory) {
  const int64_t left = available_memory();
  EXPECT_GT(left, 0);
  EXPECT_LE(left, int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace pagedkv
