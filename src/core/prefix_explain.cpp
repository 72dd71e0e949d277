// What a prefix index knows, and why it finds no more of a prompt.
#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "core/prefix_index_impl.h"

namespace pagedkv {

std::string_view miss_reason_name(MissReason reason) noexcept {
  static constexpr std::array<std::string_view, 14> kNames = {"none",
                                                              "new_session",
                                                              "below_one_page",
                                                              "prefix_divergence_at_token",
                                                              "no_snapshot_coverage",
                                                              "evicted",
                                                              "expired",
                                                              "cleared",
                                                              "quota_exceeded",
                                                              "window_evicted",
                                                              "salt_differs",
                                                              "model_mismatch",
                                                              "kv_format_differs",
                                                              "arithmetic_differs"};
  return kNames[static_cast<size_t>(reason)];
}

namespace {

MissReason difference(const PrefixScope& wanted, const PrefixScope& found) noexcept {
  if (wanted.salt != found.salt) return MissReason::kSaltDiffers;
  if (wanted.model != found.model) return MissReason::kModelDiffers;
  if (wanted.kv_format != found.kv_format) return MissReason::kKvFormatDiffers;
  return MissReason::kArithmeticDiffers;
}

std::string text_of(const PrefixExplanation& e, int page_size) {
  const std::string begin =
      std::to_string(e.hit_tokens) + " of " + std::to_string(e.num_tokens) + " tokens are found";
  const std::string known = std::to_string(e.known_tokens) + " tokens";
  switch (e.reason) {
    case MissReason::kNone:
      return begin;
    case MissReason::kNewSession:
      return begin + ": no sequence that begins like it is stored";
    case MissReason::kBelowOnePage:
      return begin + ": with " + known + " in common, on pages of " + std::to_string(page_size) +
             ", it is too short for a hit";
    case MissReason::kPrefixDivergence:
      return begin + ": at token " + std::to_string(e.first_differing_token.value_or(0)) +
             " what is stored has another one";
    case MissReason::kNoCoverage:
      return begin + ": what is stored ends after " + known;
    case MissReason::kEvicted:
      return begin + ": the page after " + known + " made room for others";
    case MissReason::kExpired:
      return begin + ": the time of the page after " + known + " was over";
    case MissReason::kCleared:
      return begin + ": the page after " + known + " was there when the cache was cleared";
    case MissReason::kQuotaExceeded:
      return begin + ": the page after " + known + " was not kept, its quota of bytes is used up";
    case MissReason::kWindowEvicted:
      return begin + ": " + known +
             " are stored, but pages that a sliding window must see are gone";
    case MissReason::kSaltDiffers:
      return begin + ": more is stored under another salt";
    case MissReason::kModelDiffers:
      return begin + ": more is stored for another model";
    case MissReason::kKvFormatDiffers:
      return begin + ": more is stored in another page format";
    case MissReason::kArithmeticDiffers:
      return begin + ": more is stored by another arithmetic, whose bits are not ours";
  }
  return begin;
}

}  // namespace

PrefixExplanation PrefixIndex::explain(const PrefixScope& scope, std::span<const int32_t> tokens,
                                       Asker asker) const {
  const Impl& p = *impl_;
  const auto page_size = static_cast<size_t>(p.page_size);
  PrefixExplanation e;
  e.num_tokens = static_cast<int64_t>(tokens.size());
  const NodeId root = p.find_root(scope);
  e.hit_tokens = p.find_hit(root, tokens).num_tokens;
  const Impl::Hit known = p.known(root, tokens);
  e.known_tokens = known.num_tokens;
  const NodeId last = p.path_.empty() ? root : p.path_.back();
  const auto rest = tokens.subspan(static_cast<size_t>(known.num_pages) * page_size);
  const auto reason = [&] {
    if (e.hit_tokens == e.num_tokens) return MissReason::kNone;
    if (e.hit_tokens < e.known_tokens && e.known_tokens >= p.options.min_hit_tokens)
      return MissReason::kWindowEvicted;
    if (last != kNoNode && rest.size() >= page_size) {
      const uint64_t hash = p.tree.hash(last, rest.first(page_size));
      if (p.gone(hash).hash == hash && p.gone(hash).reason != MissReason::kNone)
        return p.gone(hash).reason;
    }
    for (const Impl::Scope& other : p.scopes)
      if (other.root != kNoNode && other.root != root &&
          (asker == Asker::kOperator || other.key.salt == scope.salt) &&
          p.known(other.root, tokens).num_tokens > e.known_tokens)
        return difference(scope, other.key);
    if (e.known_tokens == 0 && e.num_tokens >= p.page_size) return MissReason::kNewSession;
    if (e.known_tokens < p.options.min_hit_tokens) return MissReason::kBelowOnePage;
    const bool differs = known.tail != kNoNode
                             ? p.tree.node(known.tail).num_tokens > known.tail_tokens
                             : p.tree.node(last).children != kNoNode;
    return differs ? MissReason::kPrefixDivergence : MissReason::kNoCoverage;
  };
  e.reason = reason();
  if (e.reason == MissReason::kPrefixDivergence) e.first_differing_token = e.known_tokens;
  e.text = text_of(e, p.page_size);
  return e;
}

// Adds what stands at `first` and below it to `prefix`, as long as *nodes_left lasts.
void PrefixIndex::Impl::add_up(NodeId first, KnownPrefix& prefix, int64_t* nodes_left) const {
  bool is_common = true;  // whether all that is stored here goes through the node
  std::vector<NodeId> to_see;
  for (NodeId at = first; at != kNoNode && *nodes_left > 0; --*nodes_left) {
    const PrefixNode& n = tree.node(at);
    if (is_common) {
      prefix.num_tokens += n.num_tokens;
      const auto tokens = tree.tokens(at);
      const auto room = static_cast<size_t>(KnownPrefix::kMostTokens) - prefix.tokens.size();
      prefix.tokens.insert(prefix.tokens.end(), tokens.begin(),
                           tokens.begin() + std::min(room, tokens.size()));
    }
    prefix.num_sequences += n.children == kNoNode;
    prefix.is_pinned |= n.pins > 0;
    for (int g = 0; g < num_groups(); ++g)
      if (tree.page(at, g) != kNoPage) {
        ++prefix.num_pages;
        prefix.bytes += groups[g].page_bytes;
      }
    if (at != first)  // its siblings begin differently
      for (const NodeId sibling : {n.left, n.right})
        if (sibling != kNoNode) to_see.push_back(sibling);
    if (n.children != kNoNode) to_see.push_back(n.children);
    const NodeId only = is_common ? n.children : kNoNode;
    is_common =
        only != kNoNode && tree.node(only).left == kNoNode && tree.node(only).right == kNoNode;
    at = kNoNode;
    if (!to_see.empty()) {
      at = to_see.back();
      to_see.pop_back();
    }
  }
}

KnownPrefixes PrefixIndex::prefixes(int64_t most, std::string_view salt, int64_t most_nodes) const {
  const Impl& p = *impl_;
  KnownPrefixes out;
  std::vector<NodeId> to_see;
  for (const Impl::Scope& scope : p.scopes) {
    if (scope.root == kNoNode || !scope.key.salt.starts_with(salt)) continue;
    to_see = {p.tree.node(scope.root).children};
    while (!to_see.empty() && most_nodes > 0) {
      const NodeId first = to_see.back();
      to_see.pop_back();
      if (first == kNoNode) continue;
      to_see.push_back(p.tree.node(first).left);
      to_see.push_back(p.tree.node(first).right);
      p.add_up(first, out.prefixes.emplace_back(KnownPrefix{.scope = scope.key}), &most_nodes);
    }
  }
  out.is_all = most_nodes > 0 && std::ssize(out.prefixes) <= most;
  std::ranges::stable_sort(out.prefixes, std::greater(), &KnownPrefix::bytes);
  if (std::ssize(out.prefixes) > most)
    out.prefixes.resize(static_cast<size_t>(std::max<int64_t>(most, 0)));
  return out;
}

}  // namespace pagedkv
