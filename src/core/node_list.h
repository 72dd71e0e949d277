// Lists of nodes, oldest first, whose links lie in the nodes: links(node) gives them.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/prefix_tree.h"

namespace pagedkv {

struct NodeList {
  NodeId first = kNoNode, last = kNoNode;

  template <class Links>
  void push_back(NodeId id, Links links) noexcept {
    links(id) = {last, kNoNode};
    (last == kNoNode ? first : links(last).next) = id;
    last = id;
  }
  template <class Links>
  void erase(NodeId id, Links links) noexcept {
    const NodeLinks at = links(id);
    (at.previous == kNoNode ? first : links(at.previous).next) = at.next;
    (at.next == kNoNode ? last : links(at.next).previous) = at.previous;
  }
};

// One list for each priority, 0..100.
class PriorityLists {
 public:
  template <class Links>
  void push_back(NodeId id, int priority, Links links) noexcept {
    lists_[priority].push_back(id, links);
    used_[priority / 64] |= uint64_t{1} << priority % 64;
    ++size_;
  }
  template <class Links>
  void erase(NodeId id, int priority, Links links) noexcept {
    lists_[priority].erase(id, links);
    if (lists_[priority].first == kNoNode) used_[priority / 64] &= ~(uint64_t{1} << priority % 64);
    --size_;
  }
  // The oldest of the lowest priority, or kNoNode.
  NodeId first() const noexcept {
    for (size_t word = 0; word < used_.size(); ++word)
      if (used_[word] != 0)
        return lists_[64 * word + static_cast<size_t>(std::countr_zero(used_[word]))].first;
    return kNoNode;
  }
  int64_t size() const noexcept { return size_; }
  const NodeList& of(int priority) const noexcept { return lists_[priority]; }

 private:
  std::array<NodeList, 101> lists_;
  std::array<uint64_t, 2> used_{};
  int64_t size_ = 0;
};

}  // namespace pagedkv
