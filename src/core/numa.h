// Memory of machines with several NUMA nodes.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pagedkv {

// Nodes that have memory, in ascending order; empty where the kernel does not say. `root` is put before the path that
// is read (tests).
std::vector<int> memory_nodes(const std::string& root = {});

// Has the pages of [begin, begin + bytes), not touched yet, come from all `nodes` in turn: threads pick up work as they get
// free, so no node is nearer to the one that will read. Best effort: with one node, or where the kernel refuses, the
// range stays as it is. begin: at the start of an OS page. Returns whether the range is interleaved.
bool interleave(void* begin, size_t bytes, const std::vector<int>& nodes) noexcept;

}  // namespace pagedkv
