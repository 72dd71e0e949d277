#include "pagedkv/core/prefix_index.h"

#include <algorithm>
#include <ctime>
#include <random>
#include <stdexcept>
#include <utility>

#include "core/prefix_index_impl.h"
#include "core/window.h"

namespace pagedkv {
namespace {

PrefixIndexOptions checked(PrefixIndexOptions o) {
  const auto refuse = [](const std::string& value, const char* limit) {
    throw std::invalid_argument(value + ": must be " + limit);
  };
  if (o.max_bytes < 0) refuse("max_bytes " + std::to_string(o.max_bytes), "at least 0");
  if (o.max_bytes_per_salt < 0)
    refuse("max_bytes_per_salt " + std::to_string(o.max_bytes_per_salt), "at least 0");
  if (!(o.max_pinned_share >= 0 && o.max_pinned_share <= 1))
    refuse("max_pinned_share " + std::to_string(o.max_pinned_share), "in 0..1");
  if (o.ttl_ns < 0) refuse("ttl_ns " + std::to_string(o.ttl_ns), "at least 0");
  if (o.min_hit_tokens < 1)
    refuse("min_hit_tokens " + std::to_string(o.min_hit_tokens), "at least 1");
  if (o.hash_bits < 1 || o.hash_bits > 64)
    refuse("hash_bits " + std::to_string(o.hash_bits), "in 1..64");
  if (!o.now)
    o.now = [] {
      timespec t;
      clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
      return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
    };
  return o;
}

// So that nobody outside can make tokens whose hashes collide.
uint64_t random_seed() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

void check_retention(const Retention& retention) {
  if (retention.priority < 0 || retention.priority > 100)
    throw std::invalid_argument("priority " + std::to_string(retention.priority) +
                                ": must be in 0..100");
  if (retention.ttl_ns < 0)
    throw std::invalid_argument("ttl_ns " + std::to_string(retention.ttl_ns) +
                                ": must be at least 0");
}

size_t PrefixIndex::Impl::ScopeHash::operator()(const PrefixScope& scope) const noexcept {
  size_t h = 0;
  for (const std::string* part :
       {&scope.salt, &scope.model, &scope.kv_format, &scope.arithmetic_id})
    h = h * 0x9e3779b97f4a7c15 + std::hash<std::string>()(*part);
  return h;
}

PrefixIndex::Impl::Impl(PagePool& p, PrefixIndexOptions o)
    : pool(p),
      options(checked(std::move(o))),
      page_size(p.page_size()),
      groups(static_cast<size_t>(p.num_groups())),
      tree(p.page_size(), p.num_groups(), random_seed(), options.hash_bits,
           options.events != nullptr) {
  for (int g = static_cast<int>(groups.size()); g-- > 0;) {
    groups[g].sliding_window = pool.sliding_window(g);
    groups[g].page_bytes = pool.page_bytes(g);
    if (groups[g].sliding_window == 0) main_group = g;
  }
  pool.set_keeper(this);
}

PrefixIndex::Impl::~Impl() {
  clear_all();
  tell([] { return PageEvent(AllPagesCleared()); });
  pool.set_keeper(nullptr);
}

// ---- finding

NodeId PrefixIndex::Impl::find_root(const PrefixScope& scope) const {
  const auto it = scope_ids.find(scope);
  return it == scope_ids.end() ? kNoNode : scopes[static_cast<size_t>(it->second)].root;
}

// What is stored of the beginning of `tokens`, usable or not; path_ has the nodes of its full pages.
PrefixIndex::Impl::Hit PrefixIndex::Impl::known(NodeId root,
                                                std::span<const int32_t> tokens) const {
  path_.clear();
  if (root == kNoNode) return {};
  const auto size = static_cast<size_t>(page_size);
  NodeId last = root;
  while ((path_.size() + 1) * size <= tokens.size()) {
    const auto key = tokens.subspan(path_.size() * size, size);
    const NodeId next = tree.find(last, key, tree.hash(last, key));
    if (next == kNoNode) break;
    path_.push_back(last = next);
  }
  Hit hit;
  hit.num_pages = static_cast<int64_t>(path_.size());
  hit.num_tokens = hit.num_pages * page_size;
  const PrefixTree::Similar tail =
      tree.find_similar(last, tokens.subspan(static_cast<size_t>(hit.num_tokens)));
  if (tail.num_common > 0) {
    hit.tail = tail.node;
    hit.tail_tokens = tail.num_common;
    hit.num_tokens += tail.num_common;
  }
  return hit;
}

// Whether the pages that each group needs of path_[0, num_pages) for a hit of num_tokens are there.
bool PrefixIndex::Impl::windows_are_there(int64_t num_pages, int64_t num_tokens) const noexcept {
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t first = first_page_seen(pool, static_cast<int>(g), num_tokens);
    const int64_t run =
        num_pages == 0 ? 0 : runs_[static_cast<size_t>(num_pages - 1) * groups.size() + g];
    if (run < num_pages - first) return false;
  }
  return true;
}

bool PrefixIndex::Impl::has_all_pages(NodeId node) const noexcept {
  for (int g = 0; g < num_groups(); ++g)
    if (tree.page(node, g) == kNoPage) return false;
  return true;
}

// The longest beginning whose pages are all there, or no hit where it is too short for one.
PrefixIndex::Impl::Hit PrefixIndex::Impl::find_hit(NodeId root,
                                                   std::span<const int32_t> tokens) const {
  Hit hit = known(root, tokens);
  if (groups.size() > 1 || groups[0].sliding_window > 0) {
    // runs_[page][group]: how many pages up to this one are there without a gap
    runs_.assign(path_.size() * groups.size(), 0);
    for (size_t i = 0; i < runs_.size(); ++i) {
      const bool is_there =
          tree.page(path_[i / groups.size()], static_cast<int>(i % groups.size())) != kNoPage;
      runs_[i] = is_there ? 1 + (i < groups.size() ? 0 : runs_[i - groups.size()]) : 0;
    }
    const bool tail_fits = hit.tail != kNoNode && has_all_pages(hit.tail) &&
                           windows_are_there(hit.num_pages, hit.num_tokens);
    if (!tail_fits) {
      hit.tail = kNoNode;
      hit.tail_tokens = 0;
      while (hit.num_pages > 0 && !windows_are_there(hit.num_pages, hit.num_pages * page_size))
        --hit.num_pages;
      hit.num_tokens = hit.num_pages * page_size;
    }
  }
  return hit.num_tokens < options.min_hit_tokens ? Hit() : hit;
}

int64_t PrefixIndex::match(const PrefixScope& scope, std::span<const int32_t> tokens) const {
  return impl_->find_hit(impl_->find_root(scope), tokens).num_tokens;
}

BlockTable PrefixIndex::acquire(const PrefixScope& scope, std::span<const int32_t> tokens,
                                int64_t context_window, Position* position) {
  Impl& p = *impl_;
  p.expire();
  BlockTable table(p.pool, context_window);
  if (position != nullptr) *position = {};
  if (context_window > 0 && static_cast<int64_t>(tokens.size()) > context_window)
    tokens = tokens.first(static_cast<size_t>(context_window));
  const Impl::Hit hit = p.find_hit(p.find_root(scope), tokens);
  std::vector<std::vector<PageId>> pages(p.groups.size());
  for (size_t g = 0; g < pages.size(); ++g) {
    const int64_t first = first_page_seen(p.pool, static_cast<int>(g), hit.num_tokens);
    for (int64_t i = 0; i < hit.num_pages; ++i)
      pages[g].push_back(i < first ? kNoPage : p.tree.page(p.path_[i], static_cast<int>(g)));
    if (hit.tail != kNoNode) pages[g].push_back(p.tree.page(hit.tail, static_cast<int>(g)));
  }
  table.hold(std::move(pages), hit.num_tokens);
  if (position != nullptr && hit.num_pages > 0) {
    position->node = p.path_[hit.num_pages - 1];
    position->generation = p.tree.node(position->node).generation;
    position->num_pages = hit.num_pages;
  }
  ++p.counters.queries;
  p.counters.query_tokens += static_cast<int64_t>(tokens.size());
  p.counters.hits += hit.num_tokens > 0;
  p.counters.hit_tokens += hit.num_tokens;
  p.counters.partial_hits += hit.tail_tokens > 0;
  return table;
}

// ---- storing

NodeId PrefixIndex::Impl::make_root(const PrefixScope& scope) {
  if (const NodeId root = find_root(scope); root != kNoNode) return root;
  if (unused_scopes.empty()) {
    unused_scopes.reserve(scopes.size() + 1);
    scopes.emplace_back();
    unused_scopes.push_back(static_cast<int32_t>(scopes.size() - 1));
  }
  const int32_t id = unused_scopes.back();
  Scope& entry = scopes[static_cast<size_t>(id)];
  entry.key = scope;
  const auto place = scope_ids.emplace(scope, id).first;
  try {
    entry.root = tree.add_root(ScopeHash()(scope));
  } catch (...) {
    scope_ids.erase(place);
    throw;
  }
  unused_scopes.pop_back();
  tree.node(entry.root).scope = id;
  return entry.root;
}

// The node where insertion goes on, and how many pages stand before: `position`, if it is still true.
NodeId PrefixIndex::Impl::resume(const BlockTable& table, NodeId root, const Position* position,
                                 int64_t* num_pages) const noexcept {
  *num_pages = 0;
  if (position == nullptr || position->num_pages == 0) return root;
  const PrefixNode& n = tree.node(position->node);
  const PageId page = tree.page(position->node, main_group);  // tells the tokens up to its end
  const bool is_true = n.generation == position->generation && n.scope == tree.node(root).scope &&
                       position->num_pages * page_size <= table.length() && page != kNoPage &&
                       page == table.pages(main_group)[position->num_pages - 1];
  if (!is_true) return root;
  *num_pages = position->num_pages;
  return position->node;
}

void PrefixIndex::insert(BlockTable& table, const PrefixScope& scope,
                         std::span<const int32_t> tokens, bool tail, Position* position,
                         const Retention& retention) {
  Impl& p = *impl_;
  if (table.pool_ != &p.pool) throw std::invalid_argument("the table is of another pool");
  if (static_cast<int64_t>(tokens.size()) < table.length())
    throw std::invalid_argument(std::to_string(tokens.size()) + " tokens of a sequence of " +
                                std::to_string(table.length()));
  check_retention(retention);
  if (table.length() == 0) return;
  p.expire();
  const size_t size = static_cast<size_t>(p.page_size);
  const NodeId root = p.make_root(scope);
  int64_t page = 0;
  NodeId at = p.resume(table, root, position, &page);
  if (page == 0 || !position->has_retention) p.raise(at, retention);
  const int64_t num_full = table.length() / p.page_size;
  try {
    for (NodeId next; page < num_full; ++page, at = next) {
      const auto key = tokens.subspan(static_cast<size_t>(page) * size, size);
      const uint64_t hash = p.tree.hash(at, key);
      next = p.tree.find(at, key, hash);
      if (next != kNoNode) {
        p.adopt(next, table, page);
        p.raise(next, retention);
      } else if ((next = p.add_node(at, key, hash, table, page, retention)) == kNoNode) {
        break;
      }
    }
    if (tail && page == num_full)
      p.add_tail(at,
                 tokens.first(static_cast<size_t>(table.length()))
                     .subspan(static_cast<size_t>(page) * size),
                 table, retention);
  } catch (...) {
    p.tell_stored();
    p.prune(at, MissReason::kNone);
    throw;
  }
  p.tell_stored();
  if (position != nullptr) {
    position->node = at;
    position->generation = p.tree.node(at).generation;
    position->num_pages = page;
    position->has_retention = true;
  }
  p.prune(at, MissReason::kNone);
}

void PrefixIndex::forget(const PrefixScope& scope, std::span<const int32_t> tokens, int64_t first) {
  Impl& p = *impl_;
  if (first < 0)
    throw std::invalid_argument("token " + std::to_string(first) + ": must be at least 0");
  p.known(p.find_root(scope), tokens);
  const auto page = static_cast<size_t>(first / p.page_size);
  if (page < p.path_.size()) p.forget(p.path_[page]);
}

// Page `page` of the table as a child of `parent`; kNoNode where there is no room for it.
NodeId PrefixIndex::Impl::add_node(NodeId parent, std::span<const int32_t> tokens, uint64_t hash,
                                   BlockTable& table, int64_t page, const Retention& retention) {
  // A page that is known as another one is not ours to name, but for a shorter end of the same sequence.
  const NodeId shorter = shorter_end(parent, tokens);
  int64_t new_bytes = 0;
  for (int g = 0; g < num_groups(); ++g) {
    const PageId own = table.pages(g)[page];
    if (own == kNoPage) continue;
    if (pool.is_kept(g, own) && (shorter == kNoNode || groups[g].owner[own] != shorter))
      return kNoNode;
    new_bytes += groups[g].page_bytes;
  }
  reserve_owner(table, page);
  if (heap.capacity() <= static_cast<size_t>(tree.num_nodes()))
    heap.reserve(static_cast<size_t>(tree.num_nodes() + tree.num_nodes() / 4 + 64));
  if (!make_room(parent, new_bytes)) {
    gone(hash) = {hash, MissReason::kQuotaExceeded};
    ++counters.pages_refused;
    return kNoNode;
  }
  const bool is_full = static_cast<int>(tokens.size()) == page_size;
  PageName name{};
  if (options.events != nullptr && is_full) {
    name = tree.is_root(parent) ? first_page_name(tokens, scope_of(parent).key)
                                : page_name(tree.name(parent), tokens);
    if (stored_.size() == stored_.capacity()) stored_.reserve(2 * stored_.size() + 16);
  }
  const NodeId replaced = shorter_end(parent, tokens);
  const NodeId node = tree.add(parent, tokens, hash);
  if (options.events != nullptr && is_full) {
    tree.name(node) = name;
    stored_.push_back(node);
  }
  tree.node(node).priority = static_cast<uint8_t>(retention.priority);
  tree.node(node).ttl_ns = ttl_of(retention);
  if (replaced != kNoNode) remove_one(replaced, MissReason::kNone);
  for (int g = 0; g < num_groups(); ++g)
    if (table.pages(g)[page] != kNoPage) attach(node, g, table.pages(g)[page]);
  return node;
}

// The end of a sequence that `tokens` go beyond, which is of no use beside them.
NodeId PrefixIndex::Impl::shorter_end(NodeId parent,
                                      std::span<const int32_t> tokens) const noexcept {
  const auto similar = tree.find_similar(parent, tokens);
  return similar.node != kNoNode && tree.node(similar.node).num_tokens == similar.num_common &&
                 tree.node(similar.node).pins == 0
             ? similar.node
             : kNoNode;
}

void PrefixIndex::Impl::reserve_owner(const BlockTable& table, int64_t page) {
  for (int g = 0; g < num_groups(); ++g) {
    const auto needed = static_cast<size_t>(table.pages(g)[page] + 1);
    if (groups[g].owner.size() < needed)
      groups[g].owner.resize(std::max(needed, static_cast<size_t>(pool.committed(g))), kNoNode);
  }
}

void PrefixIndex::Impl::attach(NodeId node, int group, PageId page) {
  pool.keep(group, page);
  if (group == main_group) tree.node(node).stored_at = options.now();
  tree.page(node, group) = page;
  groups[group].owner[page] = node;
  ++groups[group].num_pages;
  ++counters.pages_stored;
  scope_of(node).bytes += groups[group].page_bytes;
  bytes += groups[group].page_bytes;
}

// The table's page `page` is known as `node`: one copy of it is enough, and what the node lacks the table gives.
void PrefixIndex::Impl::adopt(NodeId node, BlockTable& table, int64_t page) {
  reserve_owner(table, page);
  for (int g = 0; g < num_groups(); ++g) {
    const PageId own = table.pages(g)[page], known = tree.page(node, g);
    if (own == kNoPage || known == kNoPage || own == known) continue;
    table.replace(g, page, known);
    ++counters.pages_merged;
  }
  // The table holds the node's pages now, so that room for others is not made of these.
  for (int g = 0; g < num_groups(); ++g) {
    const PageId own = table.pages(g)[page];
    if (own == kNoPage || tree.page(node, g) != kNoPage || pool.is_kept(g, own)) continue;
    if (make_room(node, groups[g].page_bytes))
      attach(node, g, own);
    else
      ++counters.pages_refused;
  }
}

int64_t PrefixIndex::Impl::ttl_of(const Retention& retention) const noexcept {
  if (retention.ttl_ns > 0) return retention.ttl_ns;
  return options.ttl_ns > 0 ? options.ttl_ns : kNever;
}

// So that no page goes before those that build on it.
void PrefixIndex::Impl::raise(NodeId node, const Retention& retention) noexcept {
  const int64_t ttl_ns = ttl_of(retention);
  for (NodeId at = node; at != kNoNode; at = tree.node(at).parent) {
    PrefixNode& n = tree.node(at);
    if (n.priority >= retention.priority && n.ttl_ns >= ttl_ns)
      return;  // nor have those above less
    unlist_all(at);
    n.priority = std::max(n.priority, static_cast<uint8_t>(retention.priority));
    n.ttl_ns = std::max(n.ttl_ns, ttl_ns);
    list_all(at);
  }
}

void PrefixIndex::Impl::add_tail(NodeId parent, std::span<const int32_t> tokens, BlockTable& table,
                                 const Retention& retention) {
  if (tokens.empty()) return;
  const auto similar = tree.find_similar(parent, tokens);
  if (similar.num_common == static_cast<int>(tokens.size())) return;  // a longer one has it all
  add_node(parent, tokens, tree.hash(parent, tokens), table, table.length() / page_size, retention);
}

// Whether `new_bytes` more may be kept at or below a node, once older pages went for them; the node stays.
bool PrefixIndex::Impl::make_room(NodeId node, int64_t new_bytes) noexcept {
  busy = node;
  const bool has_room = keep_to_limits(scope_of(node), new_bytes);
  busy = kNoNode;
  return has_room;
}

bool PrefixIndex::Impl::keep_to_limits(Scope& scope, int64_t new_bytes) noexcept {
  if (options.max_bytes_per_salt > 0 && !scope.key.salt.empty())
    while (scope.bytes + new_bytes > options.max_bytes_per_salt) {
      const NodeId oldest = scope.listed.first;
      if (!may_go(oldest, main_group)) return false;
      const int64_t before = num_freed;
      let_go(oldest, main_group, MissReason::kQuotaExceeded);
      counters.pages_over_quota += num_freed - before;
    }
  if (options.max_bytes > 0)
    while (bytes + new_bytes > options.max_bytes) {
      int group = main_group;
      for (int g = 0; g < num_groups() && groups[group].listed.size() == 0; ++g) group = g;
      if (!may_go(groups[group].listed.first(), group)) return false;
      evict_one(group);
    }
  return true;
}

// What builds on a page could be what room is made for.
bool PrefixIndex::Impl::may_go(NodeId node, int group) const noexcept {
  return node != kNoNode &&
         (groups[group].sliding_window > 0 || tree.node(node).children == kNoNode);
}

// ---- the public face

PrefixIndex::PrefixIndex(PagePool& pool, PrefixIndexOptions options)
    : impl_(std::make_unique<Impl>(pool, std::move(options))) {}
PrefixIndex::~PrefixIndex() = default;

PinResult PrefixIndex::pin(const PrefixScope& scope, std::span<const int32_t> tokens,
                           int64_t ttl_ns) {
  return impl_->pin(scope, tokens, ttl_ns);
}

int64_t PrefixIndex::expire() noexcept { return impl_->expire(); }

int64_t PrefixIndex::evict(int group, int64_t num_pages) noexcept {
  return impl_->reclaim(group, std::min(num_pages, impl_->reclaimable(group)));
}

void PrefixIndex::clear() noexcept {
  impl_->clear_all();
  impl_->tell([] { return PageEvent(AllPagesCleared()); });
}

void PrefixIndex::clear_salt(std::string_view salt) noexcept {
  for (Impl::Scope& scope : impl_->scopes)
    if (scope.root != kNoNode && scope.key.salt == salt) impl_->clear(scope);
}

void PrefixIndex::clear_salts(std::string_view beginning) noexcept {
  for (Impl::Scope& scope : impl_->scopes)
    if (scope.root != kNoNode && scope.key.salt.starts_with(beginning)) impl_->clear(scope);
}

PrefixIndexStats PrefixIndex::stats() const noexcept {
  const Impl& p = *impl_;
  PrefixIndexStats s = p.counters;
  for (const Impl::Group& group : p.groups) {
    s.pages += group.num_pages;
    s.index_bytes += static_cast<int64_t>(group.owner.capacity() * sizeof(NodeId));
  }
  s.pins = static_cast<int64_t>(p.pins.size());
  s.pages_pinned = p.num_pinned;
  s.scopes = static_cast<int64_t>(p.scope_ids.size());
  s.bytes = p.bytes;
  s.index_bytes += p.tree.bytes() + static_cast<int64_t>(p.heap.capacity() * sizeof(NodeId));
  return s;
}

}  // namespace pagedkv
