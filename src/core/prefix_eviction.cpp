// What of a prefix index goes, and when: lists of cached pages, times, pins.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/prefix_index_impl.h"

namespace pagedkv {

void DurationCounts::add(int64_t ns) noexcept {
  const double s = static_cast<double>(ns) * 1e-9;
  ++counts[static_cast<size_t>(std::ranges::lower_bound(kSeconds, s) - kSeconds.begin())];
  seconds += s;
}

// ---- lists

bool PrefixIndex::Impl::is_listed(NodeId node, int group) const noexcept {
  const PageId page = tree.page(node, group);
  return page != kNoPage && tree.node(node).pins == 0 && pool.references(group, page) == 0;
}

void PrefixIndex::Impl::list(NodeId node, int group) noexcept {
  groups[group].listed.push_back(node, tree.node(node).priority, links_of(group));
  if (group != main_group) return;
  scope_of(node).listed.push_back(node, links_in_scope());
  heap_push(node);
}

void PrefixIndex::Impl::unlist(NodeId node, int group) noexcept {
  groups[group].listed.erase(node, tree.node(node).priority, links_of(group));
  if (group != main_group) return;
  scope_of(node).listed.erase(node, links_in_scope());
  heap_erase(node);
}

void PrefixIndex::Impl::list_all(NodeId node) noexcept {
  for (int g = 0; g < num_groups(); ++g)
    if (is_listed(node, g)) list(node, g);
}

void PrefixIndex::Impl::unlist_all(NodeId node) noexcept {
  for (int g = 0; g < num_groups(); ++g)
    if (is_listed(node, g)) unlist(node, g);
}

void PrefixIndex::Impl::on_cached(int group, PageId page) noexcept {
  const NodeId node = groups[group].owner[page];
  if (group == main_group) tree.node(node).cached_at = options.now();
  if (tree.node(node).pins == 0) list(node, group);
}

void PrefixIndex::Impl::on_held(int group, PageId page) noexcept {
  const NodeId node = groups[group].owner[page];
  if (group == main_group) counters.reuse_gap.add(options.now() - tree.node(node).cached_at);
  if (tree.node(node).pins == 0) unlist(node, group);
}

int64_t PrefixIndex::Impl::reclaimable(int group) const noexcept {
  return groups[group].listed.size();
}

int64_t PrefixIndex::Impl::reclaim(int group, int64_t count) noexcept {
  const int64_t before = num_freed, enough = reclaimable(group) - count;
  while (reclaimable(group) > std::max<int64_t>(0, enough)) evict_one(group);
  return num_freed - before;
}

void PrefixIndex::Impl::evict_one(int group) noexcept {
  const int64_t before = num_freed;
  let_go(groups[group].listed.first(), group, MissReason::kEvicted);
  counters.pages_evicted += num_freed - before;
}

// A page that full attention needs takes all that builds on it along: normally nothing, for that was listed before it. A
// page of a window goes alone.
void PrefixIndex::Impl::let_go(NodeId node, int group, MissReason reason) noexcept {
  if (groups[group].sliding_window == 0) return remove(node, reason);
  drop_page(node, group);
  prune(node, reason);
}

// ---- removal

void PrefixIndex::Impl::drop_page(NodeId node, int group) noexcept {
  const PageId page = tree.page(node, group);
  if (is_listed(node, group)) unlist(node, group);
  if (group == main_group) counters.lifetime.add(options.now() - tree.node(node).stored_at);
  tree.page(node, group) = kNoPage;
  groups[group].owner[page] = kNoNode;
  --groups[group].num_pages;
  scope_of(node).bytes -= groups[group].page_bytes;
  bytes -= groups[group].page_bytes;
  num_freed += pool.references(group, page) == 0;
  pool.unkeep(group, page);
}

// A node without children, whose parent is looked after by the caller.
void PrefixIndex::Impl::remove_one(NodeId node, MissReason reason) noexcept {
  for (int g = 0; g < num_groups(); ++g)
    if (tree.page(node, g) != kNoPage) drop_page(node, g);
  const PrefixNode& n = tree.node(node);
  if (n.num_tokens == page_size) tell_removed(node, reason);
  if (n.num_tokens == page_size && reason != MissReason::kNone) gone(n.hash) = {n.hash, reason};
  tree.remove(node);
}

// From the leaves up, without recursion: a sequence may have a million pages.
void PrefixIndex::Impl::remove_below(NodeId node, MissReason reason) noexcept {
  for (NodeId at = node; true;) {
    while (tree.node(at).children != kNoNode) at = tree.node(at).children;
    if (at == node) return;
    const NodeId parent = tree.node(at).parent;
    remove_one(at, reason);
    at = parent;
  }
}

void PrefixIndex::Impl::remove(NodeId node, MissReason reason) noexcept {
  remove_below(node, reason);
  const NodeId parent = tree.node(node).parent;
  remove_one(node, reason);
  prune(parent, reason);
}

// Removes what leads to no page any more, from `node` up.
void PrefixIndex::Impl::prune(NodeId node, MissReason reason) noexcept {
  while (node != busy) {
    const PrefixNode& n = tree.node(node);
    if (n.children != kNoNode || n.pins > 0) return;
    for (int g = 0; g < num_groups(); ++g)
      if (tree.page(node, g) != kNoPage) return;
    const NodeId parent = n.parent;
    if (tree.is_root(node)) {
      Scope& scope = scope_of(node);
      unused_scopes.push_back(n.scope);
      scope_ids.erase(scope.key);
      tree.remove(node);
      scope = {};
      return;
    }
    remove_one(node, reason);
    node = parent;
  }
}

void PrefixIndex::Impl::clear(Scope& scope) noexcept {
  for (auto it = pins.begin(); it != pins.end();) {
    const bool is_here = &scope_of(it->second.node) == &scope;
    if (is_here) unpin(it->second);
    it = is_here ? pins.erase(it) : std::next(it);
  }
  const NodeId root = scope.root;
  if (root == kNoNode) return;  // the pins were all that it had
  remove_below(root, MissReason::kCleared);
  prune(root, MissReason::kCleared);
}

// Nobody is told page by page.
void PrefixIndex::Impl::clear_all() noexcept {
  is_clearing = true;
  for (const auto& [id, pin] : pins) unpin(pin);
  pins.clear();  // else each scope would look at all of them
  for (Scope& scope : scopes)
    if (scope.root != kNoNode) clear(scope);
  is_clearing = false;
}

void PrefixIndex::Impl::forget(NodeId node) noexcept {
  const uint32_t generation = tree.node(node).generation;
  for (auto it = pins.begin(); it != pins.end();) {
    const bool ends = is_below(it->second.node, node);
    if (ends) unpin(it->second);
    it = ends ? pins.erase(it) : std::next(it);
  }
  // A pin may have been all that it was there for.
  if (tree.node(node).generation == generation) remove(node, MissReason::kCleared);
}

bool PrefixIndex::Impl::is_below(NodeId node, NodeId ancestor) const noexcept {
  while (node != kNoNode && node != ancestor) node = tree.node(node).parent;
  return node == ancestor;
}

// ---- times

int64_t PrefixIndex::Impl::expire() noexcept {
  if (heap.empty() && first_pin_end == kNever) return 0;
  const int64_t time = options.now(), before = num_freed;
  if (first_pin_end <= time) end_pins(time);
  while (!heap.empty() && tree.node(heap.front()).expires_at <= time)
    let_go(heap.front(), main_group, MissReason::kExpired);
  counters.pages_expired += num_freed - before;
  return num_freed - before;
}

void PrefixIndex::Impl::end_pins(int64_t time) noexcept {
  first_pin_end = kNever;
  for (auto it = pins.begin(); it != pins.end();) {
    const bool is_over = it->second.expires_at <= time;
    if (is_over)
      unpin(it->second);
    else
      first_pin_end = std::min(first_pin_end, it->second.expires_at);
    it = is_over ? pins.erase(it) : std::next(it);
  }
}

int64_t PrefixIndex::Impl::from_now(int64_t ttl_ns) const noexcept {
  int64_t end;
  return __builtin_add_overflow(options.now(), ttl_ns, &end) ? kNever : end;
}

// The heap has room for every node: add_node() saw to it.
void PrefixIndex::Impl::heap_push(NodeId node) noexcept {
  PrefixNode& n = tree.node(node);
  if (n.ttl_ns == kNever) return;
  n.expires_at = from_now(n.ttl_ns);
  n.heap_index = static_cast<int32_t>(heap.size());
  heap.push_back(node);
  heap_settle(heap.size() - 1);
}

void PrefixIndex::Impl::heap_erase(NodeId node) noexcept {
  const int32_t index = std::exchange(tree.node(node).heap_index, -1);
  if (index < 0) return;
  const NodeId last = heap.back();
  heap.pop_back();
  if (last == node) return;
  heap[static_cast<size_t>(index)] = last;
  tree.node(last).heap_index = index;
  heap_settle(static_cast<size_t>(index));
}

// Moves the node at `index` to where it belongs, up or down.
void PrefixIndex::Impl::heap_settle(size_t index) noexcept {
  const auto time = [&](size_t i) { return tree.node(heap[i]).expires_at; };
  const auto swap = [&](size_t a, size_t b) {
    std::swap(heap[a], heap[b]);
    tree.node(heap[a]).heap_index = static_cast<int32_t>(a);
    tree.node(heap[b]).heap_index = static_cast<int32_t>(b);
  };
  for (; index > 0 && time(index) < time((index - 1) / 2); index = (index - 1) / 2)
    swap(index, (index - 1) / 2);
  for (;;) {
    size_t least = index;
    for (size_t child : {2 * index + 1, 2 * index + 2})
      if (child < heap.size() && time(child) < time(least)) least = child;
    if (least == index) return;
    swap(index, least);
    index = least;
  }
}

// ---- pins

// Nodes: a share of those that the address space and the bytes of the pool have room for, with their pages in each group.
int64_t PrefixIndex::Impl::most_pinned() const noexcept {
  int64_t node_bytes = 0;
  for (const Group& group : groups) node_bytes += group.page_bytes;
  const int64_t most = std::min(pool.max_pages(main_group), pool.stats().bytes_limit / node_bytes);
  return static_cast<int64_t>(options.max_pinned_share * static_cast<double>(most));
}

PinResult PrefixIndex::Impl::pin(const PrefixScope& scope, std::span<const int32_t> tokens,
                                 int64_t ttl_ns) {
  if (ttl_ns < 0)
    throw std::invalid_argument("ttl_ns " + std::to_string(ttl_ns) + ": must be at least 0");
  expire();
  const Hit hit = known(find_root(scope), tokens);
  std::vector<NodeId> nodes = path_;
  if (hit.tail != kNoNode) nodes.push_back(hit.tail);
  PinResult result;
  const std::string wanted = std::to_string(tokens.size()) + " tokens";
  if (hit.num_tokens < options.min_hit_tokens) {  // no request would find it
    result.refusal = nodes.empty() ? "nothing of these " + wanted + " is stored"
                                   : std::to_string(hit.num_tokens) + " of " + wanted +
                                         " are stored, too few for a hit";
    return result;
  }
  const int64_t most = most_pinned();
  int64_t num_new = 0;
  size_t num_nodes = 0;
  for (; num_nodes < nodes.size(); ++num_nodes) {
    const bool is_new = tree.node(nodes[num_nodes]).pins == 0;
    if (is_new && num_pinned + num_new >= most) break;
    num_new += is_new;
  }
  result.num_tokens =
      num_nodes == nodes.size() ? hit.num_tokens : static_cast<int64_t>(num_nodes) * page_size;
  if (num_nodes < nodes.size())
    result.refusal = std::to_string(result.num_tokens) + " of " + wanted +
                     " are pinned: no more than " + std::to_string(most) + " pages may be, " +
                     std::to_string(num_pinned + num_new) + " are";
  else if (hit.num_tokens < static_cast<int64_t>(tokens.size()))
    result.refusal = std::to_string(hit.num_tokens) + " of " + wanted + " are stored";
  if (num_nodes == 0) return result;
  const NodeId last = nodes[num_nodes - 1];
  const int64_t end = ttl_ns > 0 ? from_now(ttl_ns) : kNever;
  pins.emplace(next_pin, Pin{last, result.num_tokens, end});
  result.id = next_pin++;
  first_pin_end = std::min(first_pin_end, end);
  for (NodeId at = last; at != kNoNode; at = tree.node(at).parent) pin_node(at);
  return result;
}

void PrefixIndex::Impl::pin_node(NodeId node) noexcept {
  if (tree.is_root(node)) {
    ++tree.node(node).pins;
    return;
  }
  if (tree.node(node).pins == 0) {
    unlist_all(node);
    ++num_pinned;
  }
  ++tree.node(node).pins;
}

void PrefixIndex::Impl::unpin_node(NodeId node) noexcept {
  if (--tree.node(node).pins > 0 || tree.is_root(node)) return;
  --num_pinned;
  list_all(node);
}

// The last page first, so that it goes before those it builds on.
void PrefixIndex::Impl::unpin(const Pin& pin) noexcept {
  for (NodeId at = pin.node; at != kNoNode; at = tree.node(at).parent) unpin_node(at);
  prune(pin.node, MissReason::kNone);
}

bool PrefixIndex::unpin(PinId id) noexcept {
  const auto it = impl_->pins.find(id);
  if (it == impl_->pins.end()) return false;
  impl_->unpin(it->second);
  impl_->pins.erase(it);
  return true;
}

std::vector<PinnedPrefix> PrefixIndex::pins() {
  Impl& p = *impl_;
  p.expire();
  std::vector<PinnedPrefix> out;
  for (const auto& [id, pin] : p.pins) {
    PinnedPrefix& prefix = out.emplace_back(PinnedPrefix{id, p.scope_of(pin.node).key, {}, 0, {}});
    std::vector<NodeId> nodes;
    for (NodeId at = pin.node; !p.tree.is_root(at); at = p.tree.node(at).parent)
      nodes.push_back(at);
    for (size_t i = nodes.size(); i-- > 0;) {
      const auto tokens = p.tree.tokens(nodes[i]);
      prefix.tokens.insert(prefix.tokens.end(), tokens.begin(), tokens.end());
      for (int g = 0; g < p.num_groups(); ++g)
        if (p.tree.page(nodes[i], g) != kNoPage) prefix.bytes += p.groups[g].page_bytes;
    }
    prefix.tokens.resize(static_cast<size_t>(pin.num_tokens));
    if (pin.expires_at != Impl::kNever) prefix.ns_left = pin.expires_at - p.options.now();
  }
  return out;
}

// ---- verify

void PrefixIndex::verify() const {
  const Impl& p = *impl_;
  const auto fail = [](const std::string& fault) {
    throw std::logic_error("prefix index: " + fault);
  };
  p.pool.verify();
  p.tree.verify();
  std::vector<int64_t> pages(p.groups.size()), listed(p.groups.size());
  std::vector<int64_t> scope_bytes(p.scopes.size());
  int64_t pinned = 0, in_heap = 0, all_bytes = 0;
  std::vector<int32_t> pins(1, 0);
  p.tree.for_each([&](NodeId id) {
    const PrefixNode& n = p.tree.node(id);
    const std::string name = "node " + std::to_string(id);
    if (static_cast<size_t>(id) >= pins.size()) pins.resize(static_cast<size_t>(id) + 1, 0);
    pinned += n.pins > 0 && !p.tree.is_root(id);
    bool has_page = false;
    for (int g = 0; g < p.num_groups(); ++g) {
      const PageId page = p.tree.page(id, g);
      if (page == kNoPage) continue;
      has_page = true;
      ++pages[g];
      if (!p.pool.is_kept(g, page) || p.groups[g].owner[page] != id)
        fail(name + " does not own page " + std::to_string(page));
      listed[g] += p.is_listed(id, g);
      scope_bytes[static_cast<size_t>(n.scope)] += p.groups[g].page_bytes;
      all_bytes += p.groups[g].page_bytes;
    }
    if (p.tree.is_root(id)) {
      if (p.scopes[static_cast<size_t>(n.scope)].root != id) fail(name + " is no scope's root");
    } else {
      const PrefixNode& parent = p.tree.node(n.parent);
      if (parent.priority < n.priority || parent.ttl_ns < n.ttl_ns)
        fail(name + " is to stay longer than its parent");
      if (parent.scope != n.scope) fail(name + " has another scope than its parent");
      const bool is_timed = p.is_listed(id, p.main_group) && n.ttl_ns != Impl::kNever;
      if (is_timed != (n.heap_index >= 0)) fail(name + " is missing in the heap, or there in vain");
    }
    in_heap += n.heap_index >= 0;
    if (!has_page && n.children == kNoNode && n.pins == 0) fail(name + " leads to no page");
    if (n.heap_index >= 0 && p.heap[static_cast<size_t>(n.heap_index)] != id)
      fail(name + " is not where the heap has it");
  });
  for (const auto& [id, pin] : p.pins)
    for (NodeId at = pin.node; at != kNoNode; at = p.tree.node(at).parent)
      ++pins[static_cast<size_t>(at)];
  p.tree.for_each([&](NodeId id) {
    if (pins[static_cast<size_t>(id)] != p.tree.node(id).pins)
      fail("node " + std::to_string(id) + " has " + std::to_string(p.tree.node(id).pins) +
           " pins, there are " + std::to_string(pins[static_cast<size_t>(id)]));
  });
  for (int g = 0; g < p.num_groups(); ++g) {
    const Impl::Group& group = p.groups[g];
    int64_t in_lists = 0;
    for (int priority = 0; priority <= 100; ++priority)
      for (NodeId id = group.listed.of(priority).first; id != kNoNode; ++in_lists) {
        if (!p.is_listed(id, g) || p.tree.node(id).priority != priority)
          fail("node " + std::to_string(id) + " is in a wrong list");
        id = p.tree.links(id, g).next;
      }
    if (in_lists != listed[g] || in_lists != group.listed.size() || pages[g] != group.num_pages)
      fail("group " + std::to_string(g) + " lists " + std::to_string(in_lists) + " of " +
           std::to_string(listed[g]) + " pages, counts " + std::to_string(group.listed.size()) +
           "; it has " + std::to_string(pages[g]) + " pages, counts " +
           std::to_string(group.num_pages));
  }
  if (pinned != p.num_pinned || in_heap != static_cast<int64_t>(p.heap.size()) ||
      all_bytes != p.bytes)
    fail("counts of pins, times or bytes are wrong");
  for (size_t i = 1; i < p.heap.size(); ++i)
    if (p.tree.node(p.heap[i]).expires_at < p.tree.node(p.heap[(i - 1) / 2]).expires_at)
      fail("the heap is out of order");
  for (size_t i = 0; i < p.scopes.size(); ++i)
    if (p.scopes[i].bytes != scope_bytes[i])
      fail("scope " + std::to_string(i) + " counts " + std::to_string(p.scopes[i].bytes) +
           " bytes, it has " + std::to_string(scope_bytes[i]));
}

}  // namespace pagedkv
