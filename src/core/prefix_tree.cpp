#include "core/prefix_tree.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pagedkv {
namespace {

// One step of a multiply-and-fold hash (the mixing of wyhash, Wang Yi 2019).
uint64_t mix(uint64_t a, uint64_t b) noexcept {
  const auto product =
      static_cast<unsigned __int128>(a ^ 0x2d358dccaa6c78a5) * (b ^ 0x8bb84b93962eacc9);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

PrefixTree::PrefixTree(int page_size, int num_groups, uint64_t seed, int hash_bits, bool has_names)
    : page_size_(page_size),
      num_groups_(num_groups),
      seed_(seed),
      hash_mask_(hash_bits < 64 ? (uint64_t{1} << hash_bits) - 1 : ~uint64_t{0}),
      has_names_(has_names),
      tokens_(page_size),
      pages_(num_groups),
      links_(num_groups),
      buckets_(64, kNoNode) {}

uint64_t PrefixTree::hash(NodeId parent, std::span<const int32_t> tokens) const noexcept {
  uint64_t h = mix(nodes_[parent].hash, seed_);
  size_t i = 0;
  for (; i + 2 <= tokens.size(); i += 2)
    h = mix(
        h, static_cast<uint32_t>(tokens[i]) | uint64_t{static_cast<uint32_t>(tokens[i + 1])} << 32);
  if (i < tokens.size()) h = mix(h, static_cast<uint32_t>(tokens[i]));
  return mix(h, tokens.size()) & hash_mask_;
}

// ---- nodes

NodeId PrefixTree::new_id() {
  if (unused_.empty()) {
    if (num_ids_ == std::numeric_limits<NodeId>::max()) throw std::bad_alloc();
    const int64_t ids = int64_t{num_ids_} + 1;
    nodes_.reserve(ids);
    tokens_.reserve(ids);
    pages_.reserve(ids);
    links_.reserve(ids);
    if (has_names_) names_.reserve(ids);
    if (unused_.capacity() < static_cast<size_t>(ids))
      unused_.reserve(static_cast<size_t>(ids + ids / 4 + 64));
    unused_.push_back(num_ids_++);
  }
  const NodeId id = unused_.back();
  unused_.pop_back();
  const uint32_t generation = nodes_[id].generation;
  nodes_[id] = {};
  nodes_[id].generation = generation + 1;  // odd: in use
  std::fill_n(pages_.at(id), num_groups_, kNoPage);
  std::fill_n(links_.at(id), num_groups_, NodeLinks());
  ++num_nodes_;
  return id;
}

// A bucket for one node more.
void PrefixTree::reserve_bucket() {
  if (static_cast<int64_t>(buckets_.size()) > num_nodes_) return;
  buckets_ = std::vector<NodeId>(2 * buckets_.size(), kNoNode);
  for_each([&](NodeId id) {  // in the order of memory
    if (nodes_[id].num_tokens == page_size_) link_in_bucket(id);
  });
}

void PrefixTree::link_in_bucket(NodeId id) noexcept {
  NodeId& first = bucket(nodes_[id].hash);
  nodes_[id].next_in_bucket = first;
  first = id;
}

NodeId PrefixTree::add_root(uint64_t hash) {
  const NodeId id = new_id();
  nodes_[id].hash = hash & hash_mask_;
  return id;
}

NodeId PrefixTree::add(NodeId parent, std::span<const int32_t> tokens, uint64_t hash) {
  reserve_bucket();
  const NodeId id = new_id();
  PrefixNode& n = nodes_[id];
  n.parent = parent;
  n.scope = nodes_[parent].scope;
  n.num_tokens = static_cast<uint16_t>(tokens.size());
  std::ranges::copy(tokens, tokens_.at(id));
  n.hash = hash;
  if (n.num_tokens == page_size_) link_in_bucket(id);
  link_sibling(id);
  return id;
}

void PrefixTree::remove(NodeId id) noexcept {
  PrefixNode& n = nodes_[id];
  if (n.num_tokens == page_size_) {
    NodeId* link = &bucket(n.hash);
    while (*link != id) link = &nodes_[*link].next_in_bucket;
    *link = n.next_in_bucket;
  }
  if (n.num_tokens > 0) unlink_sibling(id);
  ++n.generation;
  unused_.push_back(id);
  --num_nodes_;
}

NodeId PrefixTree::find(NodeId parent, std::span<const int32_t> tokens,
                        uint64_t hash) const noexcept {
  for (NodeId id = bucket(hash); id != kNoNode; id = nodes_[id].next_in_bucket)
    if (nodes_[id].hash == hash && nodes_[id].parent == parent &&
        std::equal(tokens.begin(), tokens.end(), tokens_.at(id)))
      return id;
  return kNoNode;
}

// ---- siblings: a treap (Aragon, Seidel 1989), its heap order by hash

int PrefixTree::order(std::span<const int32_t> a, std::span<const int32_t> b,
                      int* num_common) noexcept {
  const size_t shorter = std::min(a.size(), b.size());
  size_t i = 0;
  while (i < shorter && a[i] == b[i]) ++i;
  *num_common = static_cast<int>(i);
  if (i < shorter) return a[i] < b[i] ? -1 : 1;
  return a.size() < b.size() ? -1 : a.size() > b.size();
}

// Who has most in common with `tokens` is one of its two neighbours in the order, and both are on the way to its place.
PrefixTree::Similar PrefixTree::find_similar(NodeId parent,
                                             std::span<const int32_t> tokens) const noexcept {
  Similar best;
  for (NodeId id = nodes_[parent].children; id != kNoNode;) {
    int common = 0;
    const int place = order(tokens, this->tokens(id), &common);
    if (common > best.num_common) best = {id, common};
    if (place == 0 || common == static_cast<int>(tokens.size())) break;
    id = place < 0 ? nodes_[id].left : nodes_[id].right;
  }
  return best;
}

void PrefixTree::link_sibling(NodeId id) noexcept {
  PrefixNode& n = nodes_[id];
  const auto key = tokens(id);
  int common = 0;
  NodeId* link = &nodes_[n.parent].children;
  while (*link != kNoNode && nodes_[*link].hash >= n.hash)
    link = order(key, tokens(*link), &common) < 0 ? &nodes_[*link].left : &nodes_[*link].right;
  NodeId below = *link;
  *link = id;
  NodeId *before = &n.left, *after = &n.right;
  while (below != kNoNode) {
    if (order(tokens(below), key, &common) < 0) {
      *before = below;
      before = &nodes_[below].right;
      below = *before;
    } else {
      *after = below;
      after = &nodes_[below].left;
      below = *after;
    }
  }
  *before = *after = kNoNode;
}

void PrefixTree::unlink_sibling(NodeId id) noexcept {
  PrefixNode& n = nodes_[id];
  const auto key = tokens(id);
  int common = 0;
  NodeId* link = &nodes_[n.parent].children;
  while (*link != id)
    link = order(key, tokens(*link), &common) < 0 ? &nodes_[*link].left : &nodes_[*link].right;
  NodeId before = n.left, after = n.right;
  while (before != kNoNode && after != kNoNode) {
    if (nodes_[before].hash >= nodes_[after].hash) {
      *link = before;
      link = &nodes_[before].right;
      before = *link;
    } else {
      *link = after;
      link = &nodes_[after].left;
      after = *link;
    }
  }
  *link = before != kNoNode ? before : after;
}

// ---- report

int64_t PrefixTree::bytes() const noexcept {
  return nodes_.bytes() + names_.bytes() + tokens_.bytes() + pages_.bytes() + links_.bytes() +
         static_cast<int64_t>((buckets_.capacity() + unused_.capacity()) * sizeof(NodeId));
}

void PrefixTree::verify() const {
  const auto fail = [](NodeId id, const char* fault) {
    throw std::logic_error("prefix tree: node " + std::to_string(id) + " " + fault);
  };
  int64_t nodes = 0, full = 0, in_buckets = 0, children = 0;
  for_each([&](NodeId id) {
    const PrefixNode& n = nodes_[id];
    ++nodes;
    if (!is_root(id)) {
      if (nodes_[n.parent].generation % 2 == 0) fail(id, "has a parent that is gone");
      if (nodes_[n.parent].num_tokens != page_size_ && !is_root(n.parent))
        fail(id, "follows a page that is not full");
      if (n.hash != hash(n.parent, tokens(id))) fail(id, "has another hash");
    }
    if (n.num_tokens == page_size_) {
      ++full;
      if (find(n.parent, tokens(id), n.hash) != id) fail(id, "is not found");
    }
    // In order: each child once, ascending.
    std::vector<NodeId> above;
    NodeId before = kNoNode;
    for (NodeId at = n.children; at != kNoNode || !above.empty();) {
      for (; at != kNoNode; at = nodes_[at].left) above.push_back(at);
      at = above.back();
      above.pop_back();
      int common = 0;
      if (nodes_[at].parent != id) fail(at, "stands among another's children");
      if (before != kNoNode && order(tokens(before), tokens(at), &common) >= 0)
        fail(at, "is out of order");
      for (NodeId below : {nodes_[at].left, nodes_[at].right})
        if (below != kNoNode && nodes_[below].hash > nodes_[at].hash) fail(at, "is too high");
      before = at;
      ++children;
      at = nodes_[at].right;
    }
  });
  for (NodeId head : buckets_)
    for (NodeId id = head; id != kNoNode; id = nodes_[id].next_in_bucket) ++in_buckets;
  int64_t roots = 0;
  for_each([&](NodeId id) { roots += is_root(id); });
  if (nodes != num_nodes_ || nodes - roots != children || in_buckets != full)
    throw std::logic_error("prefix tree: " + std::to_string(num_nodes_) + " nodes, seen " +
                           std::to_string(nodes) + ", as children " + std::to_string(children) +
                           " beside " + std::to_string(roots) + " roots, full " +
                           std::to_string(full) + ", in buckets " + std::to_string(in_buckets));
}

}  // namespace pagedkv
