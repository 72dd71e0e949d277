#include "server/kv_json.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "core/sha256.h"
#include "server/token_text.h"

namespace pagedkv {
namespace {

char letter_of(int32_t page) noexcept {
  switch (page) {
    case PagePool::kFreePage:
      return 'f';
    case PagePool::kCachedPage:
      return 'c';
    case PagePool::kPageWithoutMemory:
      return 'n';
    default:
      return 'h';
  }
}

const char* medium_name(PageMedium medium) noexcept {
  static constexpr std::array kNames = {"GPU", "CPU", "STORAGE"};
  return kNames[static_cast<size_t>(medium)];
}

const char* removal_name(RemovalReason reason) noexcept {
  static constexpr std::array kNames = {"room_needed", "ttl", "quota", "requested"};
  return kNames[static_cast<size_t>(reason)];
}

Json names_json(std::span<const PageName> names) {
  Json out = Json::array();
  for (const PageName& name : names) out.push_back(hex(name));
  return out;
}

Json beginning_json(std::span<const int32_t> tokens, const Tokenizer& tokenizer) {
  tokens = tokens.first(std::min(tokens.size(), size_t{KnownPrefix::kMostTokens}));
  return {{"token_ids", tokens}, {"text", text_of(tokenizer, tokens)}};
}

Json body_of(const PagesStored& stored) {
  Json parent;
  if (stored.parent_block_hash) parent = hex(*stored.parent_block_hash);
  return {{"type", "BlockStored"},
          {"block_hashes", names_json(stored.block_hashes)},
          {"parent_block_hash", parent},
          {"token_ids", stored.token_ids},
          {"block_size", stored.block_size},
          {"lora_id", Json()},
          {"lora_name", Json()},
          {"medium", medium_name(stored.medium)},
          {"salt", shown_salt(stored.extra_keys.salt)}};
}

Json body_of(const PagesRemoved& removed) {
  return {{"type", "BlockRemoved"},
          {"block_hashes", names_json(removed.block_hashes)},
          {"medium", medium_name(removed.medium)},
          {"reason", removal_name(removed.reason)}};
}

Json body_of(const AllPagesCleared&) { return {{"type", "AllBlocksCleared"}}; }

Json body_of(const PageCopied& copied) {
  return {{"type", "PageCopied"},
          {"group", copied.group},
          {"from", copied.from},
          {"to", copied.to},
          {"num_tokens", copied.num_tokens}};
}

}  // namespace

std::string page_runs(std::span<const int32_t> map) {
  std::string out;
  for (size_t i = 0; i < map.size();) {
    size_t end = i + 1;
    while (end < map.size() && map[end] == map[i]) ++end;
    if (i > 0) out += ',';
    if (end - i > 1) out += std::to_string(end - i);
    out += letter_of(map[i]);
    if (map[i] > 1) out += std::to_string(map[i]);
    i = end;
  }
  return out;
}

Json shown_salt(const std::string& salt) {
  if (salt.empty()) return {};
  return hex(sha256("pagedkv shown salt of " + salt)).substr(0, 8);
}

Json pool_json(const EngineState& state, const KvSettings& kv) {
  Json groups = Json::array();
  for (size_t g = 0; g < state.groups.size(); ++g) {
    const GroupState& group = state.groups[g];
    groups.push_back({{"id", g},
                      {"sliding_window", group.sliding_window},
                      {"page_bytes", group.page_bytes},
                      {"bytes", group.committed * group.page_bytes},
                      {"pages",
                       {{"committed", group.committed},
                        {"free", group.free()},
                        {"held", group.held},
                        {"cached", group.cached},
                        {"shared", group.shared},
                        {"peak", group.peak},
                        {"capacity", group.capacity},
                        {"limit", group.most}}}});
  }
  const PagePoolStats& pool = state.pool;
  const PrefixIndexStats& prefix = state.prefix;
  return {{"object", "kv.pool"},
          {"format", format_label(kv)},
          {"page_size", state.page_size},
          {"bytes_per_token", state.bytes_per_token},
          {"growth", kv.dynamic},
          {"usage", state.usage()},
          {"groups", groups},
          {"bytes",
           {{"committed", pool.bytes_committed},
            {"held", pool.bytes_in_use},
            {"cached", pool.bytes_cached},
            {"reserved", pool.bytes_reserved},
            {"limit", pool.bytes_limit},
            {"peak", pool.bytes_peak}}},
          {"grow_events", pool.grow_events},
          {"shrink_events", pool.shrink_events},
          {"refusals", pool.refusals},
          {"copied_pages", pool.page_copies},
          {"prefixes",
           {{"scopes", prefix.scopes},
            {"pages", prefix.pages},
            {"pinned_pages", prefix.pages_pinned},
            {"pins", prefix.pins},
            {"bytes", prefix.bytes},
            {"index_bytes", prefix.index_bytes},
            {"query_tokens", state.engine.looked_up_tokens},
            {"hit_tokens", state.engine.cached_tokens},
            {"evicted_pages", prefix.pages_evicted},
            {"expired_pages", prefix.pages_expired}}},
          {"requests", {{"running", state.num_running}, {"waiting", state.num_waiting}}},
          {"preemptions", state.engine.preemptions}};
}

Json request_json(const RequestState& request, int64_t context,
                  RequestProgress::Clock::time_point now) {
  const RequestProgress& p = request.progress;
  const bool runs =
      request.phase == RequestPhase::kPrefill || request.phase == RequestPhase::kDecode;
  Json reason;
  if (p.miss != MissReason::kNone) reason = miss_reason_name(p.miss);
  return {{"id", request.id},
          {"state", request_phase_name(request.phase)},
          {"is_processing", runs},
          {"n_ctx", context},
          {"priority", request.priority},
          {"prompt_tokens", p.num_prompt},
          {"cached_tokens", p.num_cached},
          {"miss_reason", reason},
          {"computed_tokens", request.num_computed},
          {"generated_tokens", p.num_generated},
          {"pages", request.num_pages},
          {"seconds", std::chrono::duration<double>(now - p.queued).count()}};
}

Json prefix_json(const KnownPrefix& prefix, const Tokenizer& tokenizer) {
  return {{"object", "kv.prefix"},       {"salt", shown_salt(prefix.scope.salt)},
          {"model", prefix.scope.model}, {"kv_format", prefix.scope.kv_format},
          {"tokens", prefix.num_tokens}, {"sequences", prefix.num_sequences},
          {"pages", prefix.num_pages},   {"bytes", prefix.bytes},
          {"pinned", prefix.is_pinned},  {"begins_with", beginning_json(prefix.tokens, tokenizer)}};
}

Json pin_json(const PinnedPrefix& pin, const Tokenizer& tokenizer) {
  Json left;
  if (pin.ns_left) left = static_cast<double>(*pin.ns_left) * 1e-9;
  return {{"object", "kv.pin"},
          {"id", pin.id},
          {"salt", shown_salt(pin.scope.salt)},
          {"tokens", pin.tokens.size()},
          {"bytes", pin.bytes},
          {"seconds_left", left},
          {"begins_with", beginning_json(pin.tokens, tokenizer)}};
}

Json explanation_json(const PrefixExplanation& e) {
  Json differs;
  if (e.first_differing_token) differs = *e.first_differing_token;
  return {{"object", "kv.explanation"},       {"hit_tokens", e.hit_tokens},
          {"known_tokens", e.known_tokens},   {"reason", miss_reason_name(e.reason)},
          {"first_differing_token", differs}, {"text", e.text}};
}

Json event_json(const PageEvent& event, uint64_t sequence) {
  Json out = std::visit([](const auto& e) { return body_of(e); }, event);
  out["sequence"] = sequence;
  return out;
}

}  // namespace pagedkv
