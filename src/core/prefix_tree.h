// The keys of a prefix index: a tree whose nodes are pages of tokens. A node stands for all tokens from its root to its
// end; roots stand for what else must be equal (a scope).
//
// A full page is found by hash of (path, tokens), and its parent and tokens are always compared. The children of a node
// are also a treap ordered by their tokens, so that the one with the longest common beginning is found without looking
// at all of them. Ids are reused; a generation tells a node from one that had its id before.
//
// add_root() and add() may throw std::bad_alloc, then nothing has changed; nothing else throws. Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "pagedkv/core/page_name.h"
#include "pagedkv/kernels/pages.h"

namespace pagedkv {

using NodeId = int32_t;
inline constexpr NodeId kNoNode = -1;

// Links of a doubly linked list through nodes.
struct NodeLinks {
  NodeId previous = kNoNode, next = kNoNode;
};

struct PrefixNode {
  uint64_t hash = 0;  // of everything from the root on
  NodeId parent = kNoNode;
  NodeId next_in_bucket = kNoNode;
  NodeId left = kNoNode, right = kNoNode;  // among its siblings
  NodeId children = kNoNode;               // the root of their treap
  int32_t scope = -1;
  uint32_t generation = 0;
  int32_t pins = 0;         // of itself and of all below it
  int32_t heap_index = -1;  // in the index's heap of times
  uint16_t num_tokens = 0;  // page_size, or fewer where a sequence ended; 0: a root
  uint8_t priority = 0;     // at least that of each child
  int64_t ttl_ns = 0;       // at least that of each child
  int64_t expires_at = 0;   // while in the heap
  int64_t stored_at = 0;
  int64_t cached_at = 0;  // the last time
  NodeLinks in_scope;     // the index's list of the scope's cached pages
};

class PrefixTree {
 public:
  // hash_bits < 64 cuts hashes short (tests of collisions).
  // has_names: each node has room for a name.
  PrefixTree(int page_size, int num_groups, uint64_t seed, int hash_bits, bool has_names);

  NodeId add_root(uint64_t hash);
  // Of a parent's path and the tokens that follow: what find() and add() go by.
  uint64_t hash(NodeId parent, std::span<const int32_t> tokens) const noexcept;
  // A child for `tokens`, 1..page_size of them, which parent has not; its pages are kNoPage.
  NodeId add(NodeId parent, std::span<const int32_t> tokens, uint64_t hash);
  // Without children.
  void remove(NodeId node) noexcept;

  // The child with exactly these page_size tokens, or kNoNode.
  NodeId find(NodeId parent, std::span<const int32_t> tokens, uint64_t hash) const noexcept;
  // The child that has most tokens in common with the beginning of `tokens`.
  struct Similar {
    NodeId node = kNoNode;
    int num_common = 0;
  };
  Similar find_similar(NodeId parent, std::span<const int32_t> tokens) const noexcept;

  PrefixNode& node(NodeId id) noexcept { return nodes_[id]; }
  const PrefixNode& node(NodeId id) const noexcept { return nodes_[id]; }
  std::span<const int32_t> tokens(NodeId id) const noexcept {
    return {tokens_.at(id), nodes_[id].num_tokens};
  }
  PageId& page(NodeId id, int group) noexcept { return pages_.at(id)[group]; }
  PageId page(NodeId id, int group) const noexcept { return pages_.at(id)[group]; }
  PageName& name(NodeId id) noexcept { return names_[id]; }
  NodeLinks& links(NodeId id, int group) noexcept { return links_.at(id)[group]; }
  const NodeLinks& links(NodeId id, int group) const noexcept { return links_.at(id)[group]; }
  bool is_root(NodeId id) const noexcept { return nodes_[id].num_tokens == 0; }

  int64_t num_nodes() const noexcept { return num_nodes_; }  // roots too
  int64_t bytes() const noexcept;                            // that all of this takes
  // Calls visit(NodeId) for each node and root, parents in no order.
  template <class Visit>
  void for_each(Visit visit) const {
    for (NodeId id = 0; id < num_ids_; ++id)
      if (nodes_[id].generation % 2 == 1) visit(id);
  }
  // Recounts hash table and treaps. Throws std::logic_error naming the first fault.
  void verify() const;

 private:
  // [ids, width] in chunks, so that growth moves nothing.
  template <class T>
  class Rows {
   public:
    explicit Rows(int width) : width_(width) {}
    void reserve(int64_t rows);
    T* at(NodeId id) const noexcept {
      return chunks_[static_cast<size_t>(id) / kChunk].get() +
             static_cast<size_t>(id) % kChunk * static_cast<size_t>(width_);
    }
    T& operator[](NodeId id) const noexcept { return *at(id); }
    int64_t bytes() const noexcept {
      return static_cast<int64_t>(chunks_.size() * kChunk * sizeof(T)) * width_;
    }

   private:
    static constexpr size_t kChunk = 256;
    int width_;
    std::vector<std::unique_ptr<T[]>> chunks_;
  };

  NodeId new_id();
  void reserve_bucket();
  void link_in_bucket(NodeId id) noexcept;
  NodeId& bucket(uint64_t hash) noexcept { return buckets_[hash & (buckets_.size() - 1)]; }
  NodeId bucket(uint64_t hash) const noexcept { return buckets_[hash & (buckets_.size() - 1)]; }
  // < 0: `a` stands before `b` among siblings.
  static int order(std::span<const int32_t> a, std::span<const int32_t> b,
                   int* num_common) noexcept;
  void link_sibling(NodeId id) noexcept;
  void unlink_sibling(NodeId id) noexcept;

  int page_size_, num_groups_;
  uint64_t seed_, hash_mask_;
  bool has_names_;
  Rows<PrefixNode> nodes_{1};
  Rows<int32_t> tokens_;     // [page_size]
  Rows<PageId> pages_;       // [num_groups]
  Rows<PageName> names_{1};  // where has_names_
  Rows<NodeLinks> links_;    // [num_groups]
  std::vector<NodeId> buckets_;
  std::vector<NodeId> unused_;  // ids; has room for all
  NodeId num_ids_ = 0;
  int64_t num_nodes_ = 0;
};

template <class T>
void PrefixTree::Rows<T>::reserve(int64_t rows) {
  while (static_cast<int64_t>(chunks_.size() * kChunk) < rows)
    chunks_.push_back(std::make_unique<T[]>(kChunk * static_cast<size_t>(width_)));
}

}  // namespace pagedkv
