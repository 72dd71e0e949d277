// Random operations on pool, tables and prefix index against an obvious model, which lists the pages that must be known
// and decides by looking at all of them what a hit is and which page goes next. verify() recounts everything after each
// operation. RapidCheck draws lists of operations and cuts a failing one down; RC_PARAMS="seed=…" draws others.
#include <chrono>
#include <cstdio>
#include <map>
#include <sstream>
#include <thread>

#include "core/random_operations.h"
#include "core/sharing_testing.h"

namespace pagedkv::testing {
namespace {

using Tokens = std::vector<int32_t>;

bool begins_with(const Tokens& all, const Tokens& first) {
  return first.size() <= all.size() && std::equal(first.begin(), first.end(), all.begin());
}

int64_t num_common(const Tokens& a, const Tokens& b) {
  const size_t shorter = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(shorter), b.begin())
             .first -
         a.begin();
}

// A page that is known: all tokens up to its end say which.
struct Known {
  PrefixScope scope;
  Tokens tokens;
  PageId page;
  int priority;
  int64_t ttl;
  int64_t cached_as = 0;  // the how manieth page to become cached; 0: it is held
  int64_t cached_at = 0;
};

constexpr int64_t kSecond = 1'000'000'000;

// Who knows of the pages what events tell. Throws where these cannot be true.
class Follower {
 public:
  struct Page {
    PrefixScope scope;
    Tokens tokens;  // from the first one to the page's end
  };

  void apply(const PageEvent& event) {
    if (const auto* stored = std::get_if<PagesStored>(&event)) store(*stored);
    if (const auto* removed = std::get_if<PagesRemoved>(&event))
      for (const PageName& name : removed->block_hashes)
        if (pages_.erase(name) == 0) throw std::logic_error("an unknown page was removed");
    if (std::holds_alternative<AllPagesCleared>(event)) pages_.clear();
  }
  const std::map<PageName, Page>& pages() const { return pages_; }
  bool has(const PrefixScope& scope, const Tokens& tokens) const {
    return std::ranges::any_of(pages_, [&](const auto& entry) {
      return entry.second.scope == scope && entry.second.tokens == tokens;
    });
  }

 private:
  void store(const PagesStored& event) {
    Page page{event.extra_keys, {}};
    if (event.parent_block_hash) page = pages_.at(*event.parent_block_hash);
    for (size_t i = 0; i < event.block_hashes.size(); ++i) {
      const auto first =
          event.token_ids.begin() + static_cast<std::ptrdiff_t>(i) * event.block_size;
      page.tokens.insert(page.tokens.end(), first, first + event.block_size);
      if (!pages_.emplace(event.block_hashes[i], page).second)
        throw std::logic_error("a known page was stored");
    }
  }

  std::map<PageName, Page> pages_;
};

struct Sequence : SharedSequence {
  Retention retention = {};
};

// One pool, its index, its sequences and the model of them. With `exact` the pool has one group with full attention and
// nothing bounds what is kept: then the model says all. Else there are windows, quotas and caps, and it gives bounds.
class Session {
 public:
  explicit Session(uint32_t seed)
      : draw_(seed),
        exact_(draw_(2) == 0),
        page_size_(std::vector{1, 2, 3, 16, 32}[static_cast<size_t>(draw_(5))]),
        pool_(pool_options()),
        index_(pool_, index_options()) {}

  // Empty, or how the index and the model came apart.
  std::string step(const Op& op) {
    Draw draw(op.seed);
    problem_.clear();
    what_ = "operation of kind " + std::to_string(op.kind);
    before_ = index_.stats();
    reclaims_ = false;
    try {
      run(op, draw);
      if (problem_.empty()) check(draw);
    } catch (const std::exception& e) {
      fail(std::string("threw: ") + e.what());
    }
    return problem_;
  }

  void count(PrefixIndexStats& sum) const {
    const PrefixIndexStats s = index_.stats();
    sum.hits += s.hits;
    sum.partial_hits += s.partial_hits;
    sum.pages_merged += s.pages_merged;
    sum.pages_evicted += s.pages_evicted;
    sum.pages_expired += s.pages_expired;
    sum.pages_refused += s.pages_refused;
  }

 private:
  PagePoolOptions pool_options() {
    PagePoolOptions o = options(1 + draw_(64), page_size_, tiny_group());
    if (!exact_ && draw_(2) == 0) o.groups.push_back(tiny_group(1 + draw_(3 * page_size_)));
    if (!exact_ && draw_(4) == 0) o.groups[0].sliding_window = 1 + draw_(3 * page_size_);
    o.dynamic = draw_(2) == 0;
    o.max_pages = o.dynamic ? 64 : 0;
    if (o.dynamic && draw_(2) == 0) o.max_bytes = (8 + draw_(50)) * page_size_ * 8;
    if (draw_(2) == 0) o.idle_seconds = 1 + draw_(5);
    if (draw_(2) == 0) o.shuffle_seed = static_cast<uint64_t>(1 + draw_(1000));
    return o;
  }

  PrefixIndexOptions index_options() {
    PrefixIndexOptions o;
    o.now = [this] { return time_; };
    o.min_hit_tokens = 1;
    o.hash_bits = draw_(3) == 0 ? 1 + draw_(6) : 64;
    if (draw_(4) == 0) o.events = &queue_;
    follows_ = o.events != nullptr;
    if (draw_(2) == 0) o.ttl_ns = (1 + draw_(20)) * kSecond;
    default_ttl_ = o.ttl_ns;
    o.max_pinned_share = 0.1 * draw_(11);
    if (!exact_ && draw_(2) == 0) o.max_bytes = (1 + draw_(40)) * page_size_ * 8;
    max_bytes_ = o.max_bytes;
    if (!exact_ && draw_(2) == 0) o.max_bytes_per_salt = (1 + draw_(20)) * page_size_ * 8;
    return o;
  }

  template <class... Parts>
  void fail(const Parts&... parts) {
    if (!problem_.empty()) return;
    std::ostringstream out;
    out << what_ << (exact_ ? ", exact" : "") << ", pages of " << page_size_ << ": ";
    (out << ... << parts);
    problem_ = out.str();
  }

  PrefixScope draw_scope(Draw& draw) {
    return {draw(3) == 0 ? "tenant" : "", draw(8) == 0 ? "model" : "", "f32", ""};
  }

  // The beginning of what was there, changed or not, and more of a small alphabet.
  Tokens draw_tokens(Draw& draw, int size) {
    Tokens out;
    if (!prompts_.empty() && draw(4) != 0) {
      const Tokens& old = prompts_[static_cast<size_t>(draw(static_cast<int>(prompts_.size())))];
      out.assign(old.begin(), old.begin() + draw(static_cast<int>(old.size()) + 1));
    }
    const int more = 1 + size * page_size_ / 8;
    for (int i = 0; i < more; ++i) out.push_back(draw(3) - 1);
    if (out.size() > static_cast<size_t>(20 * page_size_))
      out.resize(static_cast<size_t>(20 * page_size_));
    if (prompts_.size() < 40)
      prompts_.push_back(out);
    else
      prompts_[static_cast<size_t>(draw(40))] = out;
    return out;
  }

  Sequence* any_sequence(Draw& draw) {
    return sequences_.empty()
               ? nullptr
               : &sequences_[static_cast<size_t>(draw(static_cast<int>(sequences_.size())))];
  }

  void run(const Op& op, Draw& draw) {
    const int kind = op.kind;
    Sequence* s = any_sequence(draw);
    if (kind < 15 || s == nullptr) return start(draw, op.size);
    if (kind < 40) return compute(*s, draw, op.size);
    if (kind < 57) return insert(*s, draw, draw(4) == 0);
    if (kind < 61) return fork(*s, draw);
    if (kind < 68) return trim(*s, draw);
    if (kind < 82) return end(*s);
    if (kind < 86) return pin(draw, op.size);
    if (kind < 88) return unpin(draw);
    if (kind < 92) return pass_time(draw);
    if (kind < 95) return evict(draw);
    if (kind < 96) return clear(draw);
    if (kind < 98) return resize(draw);
    explain(draw, op.size);
  }

  // ---- operations

  void start(Draw& draw, int size) {
    what_ = "start";
    if (sequences_.size() > 8) return;
    Sequence s{{BlockTable(pool_), draw_scope(draw), draw_tokens(draw, size)}};
    if (draw(3) == 0) s.retention.priority = draw(101);
    if (draw(3) == 0) s.retention.ttl_ns = (1 + draw(30)) * kSecond;
    const size_t asked = draw(2) == 0 ? s.tokens.size() : s.tokens.size() - 1;
    const Tokens prompt(s.tokens.begin(), s.tokens.begin() + static_cast<std::ptrdiff_t>(asked));
    const int64_t match = index_.match(s.scope, prompt);
    s.table = index_.acquire(s.scope, prompt, 0, draw(4) == 0 ? nullptr : &s.position);
    if (s.table.length() != match) fail("acquired ", s.table.length(), ", matched ", match);
    const int64_t most = longest_known(s.scope, prompt);
    if (exact_ ? match != most : match > most) fail("found ", match, " tokens of ", most);
    if (draw(8) == 0) s.table.zero_when_freed();
    sequences_.push_back(std::move(s));
  }

  // One to some tokens, more than the prompt has if need be.
  void compute(SharedSequence& s, Draw& draw, int size) {
    what_ = "compute";
    const int64_t n = 1 + size * page_size_ / 16, first = s.table.length();
    while (static_cast<int64_t>(s.tokens.size()) < first + n) s.tokens.push_back(draw(3) - 1);
    reclaims_ = true;
    if (!s.compute(pool_, n) && s.table.length() != first) fail("a refusal changed the length");
    if (draw(3) == 0) s.table.release_passed();
  }

  void insert(Sequence& s, Draw& draw, bool tail) {
    what_ = tail ? "insert with its tail" : "insert";
    const auto length = s.table.length();
    index_.insert(s.table, s.scope, s.tokens, tail, draw(4) == 0 ? nullptr : &s.position,
                  s.retention);
    if (s.table.length() != length) fail("the length changed");
    const int64_t full = length / page_size_, end = full + (tail && length % page_size_ != 0);
    for (int64_t i = 0; i < end; ++i)
      learn(s, i,
            Tokens(s.tokens.begin(), s.tokens.begin() + std::min(length, (i + 1) * page_size_)),
            s.retention);
  }

  void learn(const SharedSequence& s, int64_t i, Tokens tokens, const Retention& retention) {
    const int64_t ttl = retention.ttl_ns > 0 ? retention.ttl_ns
                        : default_ttl_ > 0   ? default_ttl_
                                             : INT64_MAX;
    const PageId page = s.table.pages(0)[i];
    const bool is_full = static_cast<int64_t>(tokens.size()) == (i + 1) * page_size_;
    if (!is_full)  // a longer page covers it
      for (const Known& k : known_)
        if (k.scope == s.scope && begins_with(k.tokens, tokens) &&
            static_cast<int64_t>(k.tokens.size()) <= (i + 1) * page_size_)
          return;
    for (Known& k : known_)
      if (k.scope == s.scope && k.tokens == tokens) {
        if (exact_ && k.page != page)
          fail("page ", i, " is known as ", k.page, ", the table has ", page);
        k.priority = std::max(k.priority, retention.priority);
        k.ttl = std::max(k.ttl, ttl);
        return;
      }
    std::erase_if(known_, [&](const Known& k) {
      return k.scope == s.scope && static_cast<int64_t>(k.tokens.size()) > i * page_size_ &&
             begins_with(tokens, k.tokens) && !is_pinned(k);
    });
    known_.push_back({s.scope, std::move(tokens), page, retention.priority, ttl});
  }

  void fork(Sequence& s, Draw& draw) {
    what_ = "fork";
    if (sequences_.size() > 8) return;
    Sequence other{{s.table.fork(), s.scope, s.tokens, s.position}, s.retention};
    if (draw(2) == 0) {
      const int64_t pages = draw(static_cast<int>(s.table.length() / page_size_) + 1);
      if (!s.table.can_trim_to(pages * page_size_)) return;
      other.table = s.table.share_prefix(pages);
    }
    sequences_.push_back(std::move(other));
  }

  void trim(SharedSequence& s, Draw& draw) {
    what_ = "trim";
    const int64_t length = draw(static_cast<int>(s.table.length()) + 1);
    if (!s.table.can_trim_to(length)) return;
    s.table.trim_to(length);
    if (draw(2) == 0) {
      s.tokens.resize(static_cast<size_t>(length));
      for (int i = draw(2 * page_size_); i > 0; --i) s.tokens.push_back(draw(3) - 1);
    }
  }

  void end(Sequence& s) {
    what_ = "end";
    std::swap(s, sequences_.back());
    sequences_.pop_back();
  }

  void pin(Draw& draw, int size) {
    what_ = "pin";
    if (pins_.size() > 4) return;
    const PrefixScope scope = draw_scope(draw);
    Tokens tokens = draw_tokens(draw, size);
    // Whole pages, for a tail could be any of several.
    tokens.resize(known_pages(scope, tokens) * static_cast<size_t>(page_size_));
    const bool has_timed =
        std::ranges::any_of(pins_, [](const PinnedTokens& p) { return p.expires_at != INT64_MAX; });
    const int64_t ttl = has_timed ? 0 : draw(3) * 7 * kSecond;
    const PinResult pin = index_.pin(scope, tokens, ttl);
    const int64_t most = longest_known(scope, tokens);
    if (pin.num_tokens > most) fail("pinned ", pin.num_tokens, " tokens of ", most);
    if (pin.refusal.empty() && pin.num_tokens != static_cast<int64_t>(tokens.size()))
      fail("no refusal");
    if (!pin.id) return;
    tokens.resize(static_cast<size_t>((pin.num_tokens + page_size_ - 1) / page_size_ * page_size_));
    pins_.push_back(
        {*pin.id, scope, std::move(tokens), pin.num_tokens, ttl == 0 ? INT64_MAX : time_ + ttl});
  }

  void unpin(Draw& draw) {
    what_ = "unpin";
    if (pins_.empty()) return;
    const size_t i = static_cast<size_t>(draw(static_cast<int>(pins_.size())));
    if (!index_.unpin(pins_[i].id)) fail("there was no such pin");
    pins_.erase(pins_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void pass_time(Draw& draw) {
    what_ = "time passes";
    time_ += (1 + draw(8)) * kSecond;
    std::erase_if(pins_, [&](const PinnedTokens& p) { return p.expires_at <= time_; });
    // A pin that ends gives its pages their time from then on.
    pool_.give_back_idle(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time_)));
    if (index_.expire() != index_.stats().pages_expired - before_.pages_expired)
      fail("a wrong count");
    if (!exact_) return;
    for (const Known& k : known_) {
      const bool is_over =
          k.cached_as > 0 && !is_pinned(k) && k.cached_at <= time_ && k.ttl <= time_ - k.cached_at;
      if (is_over && pool_.is_kept(0, k.page)) fail("page ", k.page, " outlived its time");
      if (!is_over && !pool_.is_kept(0, k.page) && !went_along(k))
        fail("page ", k.page, " went before its time");
    }
  }

  void evict(Draw& draw) {
    what_ = "evict";
    reclaims_ = true;
    const int group = draw(pool_.num_groups());
    const int64_t n = draw(6);
    const int64_t cached = pool_.stats().pages_cached, gone = index_.evict(group, n);
    if (pool_.stats().pages_cached > cached - gone) fail("evicted ", gone, " of ", cached);
    const bool took_along =
        std::ranges::any_of(known_, [&](const Known& k) { return went_along(k); });
    if (exact_ && gone > n && !took_along) fail("evicted ", gone, " for ", n);
  }

  void clear(Draw& draw) {
    what_ = "clear";
    const std::string salt = draw(2) == 0 ? "tenant" : "";
    const bool all = draw(2) == 0;
    if (all)
      index_.clear();
    else
      index_.clear_salt(salt);
    const auto is_gone = [&](const PrefixScope& scope) { return all || scope.salt == salt; };
    std::erase_if(known_, [&](const Known& k) { return is_gone(k.scope); });
    std::erase_if(pins_, [&](const PinnedTokens& p) { return is_gone(p.scope); });
    if (all && index_.stats().bytes != 0) fail("something was left");
  }

  void resize(Draw& draw) {
    what_ = "resize";
    const int group = draw(pool_.num_groups());
    if (draw(2) == 0)
      (void)pool_.try_grow(group, 1 + draw(64));
    else
      pool_.shrink_to(group, 1 + draw(64));
  }

  void explain(Draw& draw, int size) {
    what_ = "explain";
    const PrefixScope scope = draw_scope(draw);
    const Tokens tokens = draw_tokens(draw, size);
    const PrefixExplanation e = index_.explain(scope, tokens);
    if (e.hit_tokens != index_.match(scope, tokens)) fail("explains another hit");
    if ((e.reason == MissReason::kNone) != (e.hit_tokens == static_cast<int64_t>(tokens.size())))
      fail("gives ", miss_reason_name(e.reason), " for ", e.hit_tokens, " tokens");
    if (exact_ && e.known_tokens != longest_known(scope, tokens)) fail("knows ", e.known_tokens);
    if (e.first_differing_token && *e.first_differing_token != e.known_tokens)
      fail("a wrong place");
  }

  // ---- the model

  int64_t longest_known(const PrefixScope& scope, const Tokens& tokens) const {
    int64_t most = 0;
    for (const Known& k : known_)
      if (k.scope == scope) most = std::max(most, num_common(k.tokens, tokens));
    return most;
  }

  // Full pages that are known, one after the other.
  size_t known_pages(const PrefixScope& scope, const Tokens& tokens) const {
    size_t pages = 0;
    const auto is_next = [&](const Known& k) {
      return k.scope == scope && k.tokens.size() == (pages + 1) * static_cast<size_t>(page_size_) &&
             begins_with(tokens, k.tokens);
    };
    while (std::ranges::any_of(known_, is_next)) ++pages;
    return pages;
  }

  struct PinnedTokens {
    PinId id;
    PrefixScope scope;
    Tokens tokens;  // whole pages
    int64_t num_tokens, expires_at;
  };

  bool is_pinned(const Known& k) const {
    return std::ranges::any_of(pins_, [&](const PinnedTokens& p) {
      return p.scope == k.scope && begins_with(p.tokens, k.tokens) &&
             k.tokens.size() % static_cast<size_t>(page_size_) == 0;
    });
  }

  // Whether a page before it went. A fork may hold a page that its origin made known behind one that it had merged: the
  // fork does not hold that one, and once nobody does and it goes, nothing behind it can be found.
  bool went_along(const Known& k) const {
    return std::ranges::any_of(known_, [&](const Known& before) {
      return before.scope == k.scope && before.tokens.size() < k.tokens.size() &&
             begins_with(k.tokens, before.tokens) && !pool_.is_kept(0, before.page) &&
             before.tokens.size() % static_cast<size_t>(page_size_) == 0;
    });
  }

  // What is known, once the operation is over: pages that went must have been the first to go, and no other.
  void forget_what_went() {
    std::pair<int, int64_t> last_gone{-1, -1}, first_left{1000, 0};
    int64_t gone = 0;
    for (const Known& k : known_) {
      const std::pair<int, int64_t> rank{k.priority, k.cached_as};
      if (!pool_.is_kept(0, k.page)) {
        gone += k.cached_as > 0;
        if (went_along(k)) continue;
        if (k.cached_as == 0 || is_pinned(k))
          fail("page ", k.page, " went although it was held or pinned");
        last_gone = std::max(last_gone, rank);
      } else if (k.cached_as > 0 && !is_pinned(k)) {
        first_left = std::min(first_left, rank);
      }
    }
    const PrefixIndexStats now = index_.stats();
    const int64_t counted =
        now.pages_evicted - before_.pages_evicted + now.pages_expired - before_.pages_expired;
    if (gone != counted) fail(gone, " pages went, ", counted, " are counted");
    if (reclaims_ && last_gone > first_left)
      fail("a page of rank ", last_gone.first, '/', last_gone.second, " went, one of ",
           first_left.first, '/', first_left.second, " stayed");
    std::erase_if(known_, [&](const Known& k) { return !pool_.is_kept(0, k.page); });
  }

  // Pages that nobody holds any more, deepest first, in the order in which the index hears of them.
  void note_cached() {
    std::vector<Known*> fresh;
    for (Known& k : known_) {
      const bool is_free_to_go = pool_.references(0, k.page) == 0 && !is_pinned(k);
      if (!is_free_to_go) k.cached_as = 0;
      if (is_free_to_go && k.cached_as == 0) fresh.push_back(&k);
    }
    std::ranges::sort(
        fresh, [](const Known* a, const Known* b) { return a->tokens.size() > b->tokens.size(); });
    for (Known* k : fresh) {
      k->cached_as = ++num_cached_;
      k->cached_at = time_;
    }
  }

  // Whoever applied all events knows the full pages that match() finds, and no other.
  void check_follower(Draw& draw) {
    const PageEventBatch batch = queue_.poll(next_event_, 1000);
    if (batch.first_sequence != next_event_) fail("events were dropped");
    next_event_ = batch.next_sequence();
    for (const auto& event : batch.events) follower_.apply(*event);
    const bool has_window =
        pool_.num_groups() > 1 || pool_.sliding_window(0) > 0;  // whose pages may be missing
    for (const auto& [name, page] : follower_.pages())
      if (!has_window &&
          index_.match(page.scope, page.tokens) != static_cast<int64_t>(page.tokens.size()))
        fail("a page of ", page.tokens.size(), " tokens is followed and not found");
    if (!prompts_.empty()) {
      Tokens found = prompts_[static_cast<size_t>(draw(static_cast<int>(prompts_.size())))];
      const PrefixScope scope = draw_scope(draw);
      found.resize(static_cast<size_t>(index_.match(scope, found) / page_size_ * page_size_));
      for (; !found.empty(); found.resize(found.size() - static_cast<size_t>(page_size_)))
        if (!follower_.has(scope, found))
          fail("a page of ", found.size(), " tokens is found and not followed");
    }
    const auto is_full = [&](const Known& k) {
      return k.tokens.size() % static_cast<size_t>(page_size_) == 0;
    };
    if (exact_ &&
        std::ranges::count_if(known_, is_full) != static_cast<int64_t>(follower_.pages().size()))
      fail(follower_.pages().size(), " pages are followed");
  }

  void check(Draw& draw) {
    if (exact_) {
      forget_what_went();
      note_cached();
    }
    if (follows_) check_follower(draw);
    std::vector<std::vector<int32_t>> expected(static_cast<size_t>(pool_.num_groups()));
    for (int g = 0; g < pool_.num_groups(); ++g) {
      expected[static_cast<size_t>(g)].assign(64 + 1, 0);
      for (const SharedSequence& s : sequences_)
        for (const PageId page : s.table.pages(g))
          if (page != kNoPage) ++expected[static_cast<size_t>(g)][static_cast<size_t>(page)];
    }
    pool_.verify(&expected);
    index_.verify();
    if (max_bytes_ > 0 && index_.stats().bytes > max_bytes_)
      fail(index_.stats().bytes, " bytes are kept, ", max_bytes_, " may be");
    const PagePoolStats stats = pool_.stats();
    int64_t free = 0;
    for (int g = 0; g < pool_.num_groups(); ++g) free += pool_.pages_free(g);
    if (free + stats.pages_held + stats.pages_cached != stats.pages_capacity)
      fail(free, " free, ", stats.pages_held, " held, ", stats.pages_cached, " cached of ",
           stats.pages_capacity);
    for (const PinnedTokens& p : pins_)
      if (index_.match(p.scope, Tokens(p.tokens.begin(), p.tokens.begin() + p.num_tokens)) <
              p.num_tokens &&
          exact_)
        fail("a pinned prefix is not found");
    if (const SharedSequence* s = any_sequence(draw); s != nullptr && s->first_wrong(pool_) >= 0)
      fail("token ", s->first_wrong(pool_), " of ", s->table.length(), " has another's content");
  }

  Draw draw_;
  bool exact_;
  int page_size_;
  int64_t time_ = 5 * kSecond, default_ttl_ = 0, max_bytes_ = 0;
  PageEventQueue queue_{1000};
  uint64_t next_event_ = 0;
  bool follows_ = false;
  Follower follower_;
  PagePool pool_;
  PrefixIndex index_;
  std::vector<Sequence> sequences_;
  std::vector<Tokens> prompts_;
  std::vector<Known> known_;
  std::vector<PinnedTokens> pins_;
  PrefixIndexStats before_;
  bool reclaims_ = false;
  int64_t num_cached_ = 0;
  std::string what_, problem_;
};

TEST(SharingRandom, PoolTablesAndIndexKeepToTheModel) {
  RandomCounts counts;
  PrefixIndexStats seen;
  const auto finish = [&](Session& session) {
    session.count(seen);
    return std::string();
  };
  run_random_sessions<Session>("seed=20261201 max_size=300", finish, counts);
  std::printf(
      "[ COUNT    ] %lld random operations on %lld pools: %lld hits, %lld inside a page, %lld "
      "pages merged, %lld evicted, %lld expired, %lld refused\n",
      static_cast<long long>(counts.operations), static_cast<long long>(counts.sessions),
      static_cast<long long>(seen.hits), static_cast<long long>(seen.partial_hits),
      static_cast<long long>(seen.pages_merged), static_cast<long long>(seen.pages_evicted),
      static_cast<long long>(seen.pages_expired), static_cast<long long>(seen.pages_refused));
}

// Pools and indexes of different threads have nothing in common (run under ThreadSanitizer by test.sh --all).
TEST(SharingRandom, ThreadsWithPoolsOfTheirOwnDoNotMeet) {
  std::vector<std::string> problems(4);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < problems.size(); ++t)
    threads.emplace_back([t, &problem = problems[t]] {
      Draw draw(t);
      for (int round = 0; round < scaled(20) && problem.empty(); ++round) {
        Session session(static_cast<uint32_t>(draw(1 << 30)));
        for (int i = 0; i < 100 && problem.empty(); ++i)
          problem = session.step({draw(100), draw(40), static_cast<uint32_t>(draw(1 << 30))});
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
}

}  // namespace
}  // namespace pagedkv::testing
