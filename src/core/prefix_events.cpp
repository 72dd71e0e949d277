// What a prefix index tells whoever follows it: pages stored, removed, copied.
#include "core/prefix_index_impl.h"

namespace pagedkv {

// What happened has happened; that there is no memory to tell it is counted.
void PrefixIndex::Impl::tell(FunctionRef<PageEvent()> make) noexcept {
  if (options.events == nullptr) return;
  try {
    options.events->push(std::make_shared<const PageEvent>(make()));
  } catch (...) {
    ++counters.events_lost;
  }
}

// One event for each run of pages that follow each other.
void PrefixIndex::Impl::tell_stored() noexcept {
  for (size_t first = 0, end; first < stored_.size(); first = end) {
    for (end = first + 1; end < stored_.size(); ++end)
      if (tree.node(stored_[end]).parent != stored_[end - 1]) break;
    tell([&] {
      PagesStored event;
      const NodeId parent = tree.node(stored_[first]).parent;
      if (tree.is_root(parent))
        event.extra_keys = scope_of(parent).key;
      else
        event.parent_block_hash = tree.name(parent);
      event.block_size = page_size;
      for (size_t i = first; i < end; ++i) {
        event.block_hashes.push_back(tree.name(stored_[i]));
        const auto tokens = tree.tokens(stored_[i]);
        event.token_ids.insert(event.token_ids.end(), tokens.begin(), tokens.end());
      }
      return PageEvent(std::move(event));
    });
  }
  stored_.clear();
}

void PrefixIndex::Impl::tell_removed(NodeId node, MissReason reason) noexcept {
  if (is_clearing) return;
  tell([&] {
    PagesRemoved event;
    event.block_hashes.push_back(tree.name(node));
    event.reason = reason == MissReason::kExpired         ? RemovalReason::kTtl
                   : reason == MissReason::kQuotaExceeded ? RemovalReason::kQuota
                   : reason == MissReason::kCleared       ? RemovalReason::kRequested
                                                          : RemovalReason::kRoomNeeded;
    return PageEvent(std::move(event));
  });
}

void PrefixIndex::Impl::on_copied(int group, PageId from, PageId to, int num_tokens) noexcept {
  tell([&] { return PageEvent(PageCopied{group, from, to, num_tokens}); });
}

}  // namespace pagedkv
