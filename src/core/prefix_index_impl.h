// The parts of a prefix index: prefix_index.cpp finds and stores, prefix_eviction.cpp decides what goes,
// prefix_explain.cpp tells why something is not there.
//
// A page of a node is cached when nobody holds it; it is listed, that is, in its group's lists and reclaimable, when
// its node is not pinned either. The group that counts for scopes and times is the main one: full attention, if any.
#pragma once

#include <map>
#include <unordered_map>
#include <vector>

#include "core/node_list.h"
#include "core/prefix_tree.h"
#include "pagedkv/base/function_ref.h"
#include "pagedkv/core/prefix_index.h"

namespace pagedkv {

struct PrefixIndex::Impl final : PageKeeper {
  struct Group {
    int sliding_window = 0;
    int64_t page_bytes = 0;
    PriorityLists listed;
    std::vector<NodeId> owner;  // of each page; kNoNode: it is not known
    int64_t num_pages = 0;      // known
  };
  struct Scope {
    PrefixScope key;
    NodeId root = kNoNode;  // kNoNode: the entry is unused
    NodeList listed;        // nodes with a listed page in the main group
    int64_t bytes = 0;
  };
  struct ScopeHash {
    size_t operator()(const PrefixScope& scope) const noexcept;
  };
  struct Pin {
    NodeId node;  // the last one
    int64_t num_tokens;
    int64_t expires_at;  // kNever
  };
  // How much of a prompt is there.
  struct Hit {
    int64_t num_pages = 0;  // full ones: path_[0, num_pages)
    NodeId tail = kNoNode;  // then this page's first tail_tokens
    int tail_tokens = 0;
    int64_t num_tokens = 0;
  };
  // What happened to a page that is not known any more; the last one of each hash counts.
  struct Gone {
    uint64_t hash = 0;
    MissReason reason = MissReason::kNone;
  };
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr size_t kGone = 4096;

  Impl(PagePool& pool, PrefixIndexOptions options);
  ~Impl() override;

  // ---- finding
  NodeId find_root(const PrefixScope& scope) const;
  Hit find_hit(NodeId root, std::span<const int32_t> tokens) const;
  Hit known(NodeId root, std::span<const int32_t> tokens) const;
  bool windows_are_there(int64_t num_pages, int64_t num_tokens) const noexcept;
  bool has_all_pages(NodeId node) const noexcept;
  void add_up(NodeId first, KnownPrefix& prefix, int64_t* nodes_left) const;

  // ---- storing
  NodeId make_root(const PrefixScope& scope);
  NodeId resume(const BlockTable& table, NodeId root, const Position* position,
                int64_t* num_pages) const noexcept;
  NodeId add_node(NodeId parent, std::span<const int32_t> tokens, uint64_t hash, BlockTable& table,
                  int64_t page, const Retention& retention);
  NodeId shorter_end(NodeId parent, std::span<const int32_t> tokens) const noexcept;
  void adopt(NodeId node, BlockTable& table, int64_t page);
  void reserve_owner(const BlockTable& table, int64_t page);
  void attach(NodeId node, int group, PageId page);
  void raise(NodeId node, const Retention& retention) noexcept;
  void add_tail(NodeId parent, std::span<const int32_t> tokens, BlockTable& table,
                const Retention& retention);
  bool make_room(NodeId node, int64_t bytes) noexcept;
  bool keep_to_limits(Scope& scope, int64_t bytes) noexcept;
  bool may_go(NodeId node, int group) const noexcept;

  // ---- eviction
  void on_cached(int group, PageId page) noexcept override;
  void on_held(int group, PageId page) noexcept override;
  void on_copied(int group, PageId from, PageId to, int num_tokens) noexcept override;
  int64_t reclaimable(int group) const noexcept override;
  int64_t reclaim(int group, int64_t count) noexcept override;
  bool is_listed(NodeId node, int group) const noexcept;
  void list(NodeId node, int group) noexcept;
  void unlist(NodeId node, int group) noexcept;
  void list_all(NodeId node) noexcept;
  void unlist_all(NodeId node) noexcept;
  void evict_one(int group) noexcept;
  void let_go(NodeId node, int group, MissReason reason) noexcept;
  void drop_page(NodeId node, int group) noexcept;
  void remove_one(NodeId node, MissReason reason) noexcept;
  void remove_below(NodeId node, MissReason reason) noexcept;
  void remove(NodeId node, MissReason reason) noexcept;
  void prune(NodeId node, MissReason reason) noexcept;
  void clear(Scope& scope) noexcept;
  void clear_all() noexcept;
  void forget(NodeId node) noexcept;
  bool is_below(NodeId node, NodeId ancestor) const noexcept;
  int64_t expire() noexcept;
  int64_t ttl_of(const Retention& retention) const noexcept;
  void end_pins(int64_t time) noexcept;
  int64_t from_now(int64_t ttl_ns) const noexcept;
  void heap_push(NodeId node) noexcept;
  void heap_erase(NodeId node) noexcept;
  void heap_settle(size_t index) noexcept;

  // ---- events
  void tell(FunctionRef<PageEvent()> make) noexcept;
  void tell_stored() noexcept;
  void tell_removed(NodeId node, MissReason reason) noexcept;

  // ---- pins
  PinResult pin(const PrefixScope& scope, std::span<const int32_t> tokens, int64_t ttl_ns);
  int64_t most_pinned() const noexcept;
  void pin_node(NodeId node) noexcept;
  void unpin_node(NodeId node) noexcept;
  void unpin(const Pin& pin) noexcept;

  int num_groups() const noexcept { return static_cast<int>(groups.size()); }
  // Where the lists have their links: a group's, a scope's.
  auto links_of(int group) noexcept {
    return [this, group](NodeId id) -> NodeLinks& { return tree.links(id, group); };
  }
  auto links_in_scope() noexcept {
    return [this](NodeId id) -> NodeLinks& { return tree.node(id).in_scope; };
  }
  Scope& scope_of(NodeId node) noexcept {
    return scopes[static_cast<size_t>(tree.node(node).scope)];
  }
  Gone& gone(uint64_t hash) noexcept { return gone_[hash % kGone]; }
  const Gone& gone(uint64_t hash) const noexcept { return gone_[hash % kGone]; }

  PagePool& pool;
  const PrefixIndexOptions options;
  const int page_size;
  std::vector<Group> groups;
  int main_group = 0;
  PrefixTree tree;
  NodeId busy = kNoNode;  // make_room() leaves it there although nothing may need it
  std::vector<Scope> scopes;
  std::vector<int32_t> unused_scopes;  // has room for all
  std::unordered_map<PrefixScope, int32_t, ScopeHash> scope_ids;
  std::vector<NodeId> heap;  // nodes with a time, listed in the main group; the next to go first
  std::map<PinId, Pin> pins;
  PinId next_pin = 1;
  int64_t first_pin_end = kNever;  // no pin ends before: expire() need not look at them
  int64_t num_pinned = 0;          // nodes
  int64_t num_freed = 0;           // pages that were forgotten and nobody held, ever
  int64_t bytes = 0;               // of all known pages
  std::vector<Gone> gone_{kGone};
  PrefixIndexStats counters;           // those that are counted, not derived
  std::vector<NodeId> stored_;         // by the call under way, not told yet
  bool is_clearing = false;            // all of it: nobody is told page by page
  mutable std::vector<NodeId> path_;   // of the prompt looked for last
  mutable std::vector<int64_t> runs_;  // scratch
};

}  // namespace pagedkv
