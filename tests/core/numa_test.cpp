#include "core/numa.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace pagedkv {
namespace {

namespace fs = std::filesystem;

TEST(Numa, NodesAreReadAsTheKernelWritesThem) {
  const fs::path root =
      fs::path(::testing::TempDir()) / ("pagedkv_numa_" + std::to_string(getpid()));
  const fs::path folder = root / "sys/devices/system/node";
  fs::create_directories(folder);
  const auto nodes = [&](const std::string& text) {
    std::ofstream(folder / "has_memory") << text;
    return memory_nodes(root.string());
  };
  EXPECT_EQ(nodes("0\n"), std::vector<int>({0}));
  EXPECT_EQ(nodes("0-1\n"), std::vector<int>({0, 1}));
  EXPECT_EQ(nodes("0,2-4,7\n"), std::vector<int>({0, 2, 3, 4, 7}));
  EXPECT_TRUE(nodes("\n").empty());
  fs::remove_all(root);
  EXPECT_TRUE(memory_nodes(root.string()).empty());
}

TEST(Numa, OneNodeIsLeftAlone) {
  std::byte untouched[1];
  EXPECT_FALSE(interleave(untouched, 1, {}));
  EXPECT_FALSE(interleave(untouched, 1, {0}));
}

TEST(Numa, SeveralNodesShareARange) {
  const std::vector<int> nodes = memory_nodes();
  if (nodes.size() < 2) GTEST_SKIP() << "one node";
  const size_t bytes = 64 * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const space =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(space, MAP_FAILED);
  EXPECT_TRUE(interleave(space, bytes, nodes));
  munmap(space, bytes);
}

}  // namespace
}  // namespace pagedkv
