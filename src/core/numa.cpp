#include "core/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

namespace pagedkv {
namespace {

constexpr int kMaxNodes = 1024;  // the kernel's own limit
constexpr int kInterleave = 3;   // MPOL_INTERLEAVE of linux/mempolicy.h
constexpr int kWordBits = 8 * sizeof(unsigned long);

}  // namespace

std::vector<int> memory_nodes(const std::string& root) {
  std::ifstream in(root + "/sys/devices/system/node/has_memory");
  std::vector<int> nodes;
  for (std::string range; std::getline(in, range, ',');) {  // "0-1,4"
    std::istringstream text(range);
    int first, last;
    char dash;
    if (!(text >> first)) continue;
    if (!(text >> dash >> last)) last = first;
    for (int node = first; node <= last && node < kMaxNodes; ++node) nodes.push_back(node);
  }
  return nodes;
}

bool interleave(void* begin, size_t bytes, const std::vector<int>& nodes) noexcept {
  if (nodes.size() < 2) return false;
  unsigned long mask[kMaxNodes / kWordBits] = {};
  for (const int node : nodes) mask[node / kWordBits] |= 1ul << node % kWordBits;
  return syscall(SYS_mbind, begin, bytes, kInterleave, mask, kMaxNodes + 1, 0) == 0;
}

}  // namespace pagedkv
