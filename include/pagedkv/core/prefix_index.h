// Finds pages that already hold the beginning of a prompt, of finished sequences and of running ones.
//
// A page is known by everything before it: its scope (PrefixScope), the tokens of all pages before it and its own, which
// are always compared. The index keeps the pages it knows (PagePool::keep): held as long as sequences hold them, cached
// afterwards, until room is needed. A hit holds its pages at once; its last page may be one that matches in part only,
// and is copied by who writes behind it (BlockTable::try_append). In a layer group with a window a hit needs the pages
// that its next token can see, no earlier ones.
//
// Cached pages go in this order: lowest priority first, of equal ones those that were last held longest ago, a
// sequence's end before its beginning. Taking the next one costs O(1), whatever is cached.
//
// Not thread-safe: the step loop calls it. The pool must outlive it, it must outlive no BlockTable in particular.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/core/block_table.h"
#include "pagedkv/core/page_events.h"
#include "pagedkv/core/page_pool.h"
#include "pagedkv/core/prefix_scope.h"

namespace [[gnu::visibility("default")]] pagedkv {

struct PrefixIndexOptions {
  int64_t max_bytes = 0;           // that it keeps, held ones included; 0: no limit but the pool's
  int64_t max_bytes_per_salt = 0;  // of each scope with a salt; 0: no limit
  double max_pinned_share = 0.5;   // of the pages that the pool may have
  int64_t ttl_ns = 0;              // cached pages go when nobody held them for so long; 0: never
  int min_hit_tokens = 16;         // fewer are not worth a hit
  // Where it tells what it stores, removes and copies, under the pages' names; must outlive it. Null: nobody is told.
  PageEventQueue* events = nullptr;
  // A steady clock, in nanoseconds; unset: the system's coarse one, which moves every few milliseconds and is read for
  // each page that is stored, cached, held again or dropped. For tests.
  std::function<int64_t()> now = nullptr;
  int hash_bits =
      64;  // of the hashes that are compared before tokens; fewer make them collide (tests)
};

// How long the pages of one sequence should stay.
struct Retention {
  int priority = 35;   // 0..100, the lowest go first
  int64_t ttl_ns = 0;  // instead of PrefixIndexOptions::ttl_ns; 0: that one
};
// Throws std::invalid_argument for a priority outside 0..100 and a negative ttl_ns, as PrefixIndex::insert() does.
void check_retention(const Retention& retention);

// Why a prompt was not found, or not all of it.
enum class MissReason {
  kNone,              // all of it was
  kNewSession,        // nothing like it is known
  kBelowOnePage,      // what it has in common is too short to be a hit
  kPrefixDivergence,  // another token was seen at first_differing_token
  kNoCoverage,        // what is stored ends there
  kEvicted,           // what followed was there, and made room
  kExpired,           // its time was over
  kCleared,           // somebody cleared the index, or it was not to be trusted
  kQuotaExceeded,     // what followed was not kept, for its salt or the index has no bytes left
  kWindowEvicted,     // pages that a window would have to see are gone
  kSaltDiffers,       // it is known under another salt, model, format or arithmetic
  kModelDiffers,
  kKvFormatDiffers,
  kArithmeticDiffers,
};
// "new_session", "prefix_divergence_at_token", ...
std::string_view miss_reason_name(MissReason reason) noexcept;

struct PrefixExplanation {
  MissReason reason = MissReason::kNone;
  int64_t num_tokens = 0;                        // asked for
  int64_t hit_tokens = 0;                        // that acquire() would give
  int64_t known_tokens = 0;                      // in common with what is stored under this scope
  std::optional<int64_t> first_differing_token;  // its place, where another one is stored
  std::string text;                              // the same for people
};

// Who asks: a tenant is told nothing of what other salts have.
enum class Asker { kOperator, kTenant };

// What is stored of the sequences that have their first page in common.
struct KnownPrefix {
  PrefixScope scope;
  std::vector<int32_t> tokens = {};  // the first ones, kMostTokens at most
  int64_t num_tokens = 0;            // that all of them begin with
  int64_t num_sequences = 0;         // ends
  int64_t num_pages = 0;             // over all layer groups
  int64_t bytes = 0;                 // of these
  bool is_pinned = false;            // some of them

  static constexpr int kMostTokens = 32;
};

struct KnownPrefixes {
  std::vector<KnownPrefix> prefixes;  // the largest first
  bool is_all = true;                 // false: some were left out
};

using PinId = int64_t;

struct PinResult {
  std::optional<PinId> id;  // none: nothing was pinned
  int64_t num_tokens = 0;   // that stay, from the first one on
  std::string refusal;      // why not all of them; empty: they are all pinned
};

struct PinnedPrefix {
  PinId id;
  PrefixScope scope;
  std::vector<int32_t> tokens;
  int64_t bytes;                   // of its pages, over all layer groups
  std::optional<int64_t> ns_left;  // none: until unpin()
};

// How often something took how long.
struct DurationCounts {
  static constexpr std::array<double, 10> kSeconds = {0.1, 0.5, 1,    5,    15,
                                                      60,  300, 1800, 7200, 86400};
  std::array<int64_t, kSeconds.size() + 1> counts =
      {};              // up to kSeconds[i] and more than the one before; then longer
  double seconds = 0;  // in all
  void add(int64_t ns) noexcept;
};

struct PrefixIndexStats {
  int64_t queries = 0, query_tokens = 0;
  int64_t hits = 0, hit_tokens = 0;  // prompts with a hit; tokens they need not compute
  int64_t partial_hits = 0;          // hits that end inside a page
  int64_t pages_stored = 0;          // pages that became known
  int64_t pages_merged = 0;          // computed twice: the second copy was given back
  int64_t pages_evicted = 0;         // that made room
  int64_t pages_expired = 0;
  int64_t pages_over_quota = 0;  // that made room in their salt's bytes
  int64_t pages_refused = 0;     // not kept: max_bytes, max_bytes_per_salt
  int64_t pages = 0;             // known now, over all groups
  int64_t pins = 0;
  int64_t pages_pinned = 0;  // of the first layer group with full attention
  int64_t scopes = 0;
  int64_t bytes = 0;        // of the known pages
  int64_t index_bytes = 0;  // that the index itself takes
  int64_t events_lost = 0;  // there was no memory to make them
  // Of pages of the first layer group with full attention: from when one was stored until it was known no more; from
  // when one was cached until it was held again.
  DurationCounts lifetime = {}, reuse_gap = {};
};

class PrefixIndex {
 public:
  // Where the pages of one sequence stand in the index, so that insert() need not begin anew. Made by acquire() and by
  // insert(); one that is out of date costs a walk from the first page, nothing else.
  class Position {
    friend class PrefixIndex;
    int32_t node = -1;
    uint32_t generation = 0;
    int64_t num_pages = 0;
    bool has_retention = false;  // of the sequence, in all its pages
  };

  // Throws std::invalid_argument for options outside their limits, and where the pool has an index already.
  explicit PrefixIndex(PagePool& pool, PrefixIndexOptions options = {});
  ~PrefixIndex();  // its cached pages become free, and followers hear that all is cleared
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // A table that holds the longest known beginning of `tokens`; its length() tells how much. Empty where that is less than
  // min_hit_tokens. A caller that must compute the last token leaves it out of `tokens`.
  [[nodiscard]] BlockTable acquire(const PrefixScope& scope, std::span<const int32_t> tokens,
                                   int64_t context_window = 0, Position* position = nullptr);
  // How many tokens acquire() would find. Changes nothing, not even the order of eviction.
  int64_t match(const PrefixScope& scope, std::span<const int32_t> tokens) const;

  // Makes the full pages of a sequence known, and with `tail` its last, partly filled one (what is written behind it later
  // goes to a copy). tokens[0, table.length()) are the sequence's, whose keys and values must be stored. A page that is known
  // with the same content takes the place of the table's, which goes back.
  void insert(BlockTable& table, const PrefixScope& scope, std::span<const int32_t> tokens,
              bool tail, Position* position = nullptr, const Retention& retention = {});

  // Forgets the full pages of a sequence from the one with token `first` on, and what builds on them, pins too: their
  // content cannot be trusted.
  void forget(const PrefixScope& scope, std::span<const int32_t> tokens, int64_t first);

  // Keeps the known beginning of `tokens` from eviction, for ttl_ns (0: until unpin). As much of it as max_pinned_share
  // allows.
  PinResult pin(const PrefixScope& scope, std::span<const int32_t> tokens, int64_t ttl_ns = 0);
  bool unpin(PinId id) noexcept;  // false: there is none such
  std::vector<PinnedPrefix> pins();

  // Why `tokens` are (not) found.
  PrefixExplanation explain(const PrefixScope& scope, std::span<const int32_t> tokens,
                            Asker asker = Asker::kOperator) const;
  // What is stored under salts that begin like this one, which all do where it is empty: `most` prefixes at most. Looks
  // at so many nodes (a page of tokens each) at most, to be short between two steps.
  KnownPrefixes prefixes(int64_t most, std::string_view salt = {},
                         int64_t most_nodes = int64_t{1} << 16) const;

  // Frees what is past its time; the other calls do so too. Returns how many pages went.
  int64_t expire() noexcept;
  // Frees up to `num_pages` cached pages of a group, and what builds on them. Returns how many became free, over all
  // groups.
  int64_t evict(int group, int64_t num_pages) noexcept;
  // Forgets everything, pins too; held pages stay with who holds them.
  void clear() noexcept;
  // Forgets one salt's pages, in all scopes that have it.
  void clear_salt(std::string_view salt) noexcept;
  // Of all salts that begin so: a tenant may have several.
  void clear_salts(std::string_view beginning) noexcept;

  PrefixIndexStats stats() const noexcept;
  // Recounts everything, with the pool. Throws std::logic_error naming the first fault.
  void verify() const;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
