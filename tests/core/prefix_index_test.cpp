#include "pagedkv/core/prefix_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <set>
#include <stdexcept>

#include "core/sharing_testing.h"

namespace pagedkv::testing {
namespace {

using std::chrono::seconds;

int64_t ns(seconds s) { return std::chrono::nanoseconds(s).count(); }

PagePoolOptions fixed_pool(int32_t num_pages, int page_size = 16) {
  PagePoolOptions o = options(num_pages, page_size, tiny_group());
  o.dynamic = false;
  o.max_pages = 0;
  return o;
}

// An index whose clock stands until it is moved.
struct Clock {
  int64_t time = 1000;
  PrefixIndexOptions options(PrefixIndexOptions o = {}) {
    o.now = [this] { return time; };
    return o;
  }
};

TEST(PrefixIndex, FindsEveryBeginningToTheToken) {
  for (int page_size : {1, 3, 16, 32}) {
    PagePool pool(options(8, page_size, tiny_group()));
    PrefixIndex index(pool, {.min_hit_tokens = 1});
    const auto stored = tokens_from(0, 80);
    EXPECT_EQ(serve(pool, index, stored), 0);
    for (int64_t n = 1; n <= 80; ++n) {
      const auto prompt = joined(tokens_from(0, n), {-1, -2});
      EXPECT_EQ(index.match({}, prompt), n) << page_size;
      SharedSequence s = begin(pool, index, prompt);
      EXPECT_EQ(s.table.length(), n) << page_size;
      ASSERT_TRUE(s.compute_all(pool));
      EXPECT_EQ(s.first_wrong(pool), -1) << page_size << ' ' << n;
      index.verify();
    }
    EXPECT_EQ(index.match({}, tokens_from(0, 200)), 80);
    EXPECT_EQ(index.match({}, tokens_from(1, 80)), 0);
    EXPECT_EQ(index.match({}, {}), 0);
  }
}

TEST(PrefixIndex, AHitHoldsItsPagesAtOnce) {
  PagePool pool(fixed_pool(4));
  PrefixIndex index(pool);
  serve(pool, index, tokens_from(0, 48));
  EXPECT_EQ(pool.stats().pages_cached, 3);
  EXPECT_EQ(pool.stats().pages_held, 0);
  const BlockTable hit = index.acquire({}, tokens_from(0, 48));
  EXPECT_EQ(hit.length(), 48);
  EXPECT_EQ(pool.stats().pages_held, 3);
  EXPECT_EQ(pool.stats().pages_cached, 0);
  EXPECT_EQ(take(pool, 2).size(), 0u);  // nothing is left that may go
  EXPECT_EQ(index.match({}, tokens_from(0, 48)), 48);
  index.verify();
}

TEST(PrefixIndex, PagesOfRunningSequencesAreFound) {
  PagePool pool(fixed_pool(16));
  PrefixIndex index(pool);
  SharedSequence running = begin(pool, index, tokens_from(0, 60));
  ASSERT_TRUE(running.compute(pool, 40));
  index.insert(running.table, {}, running.tokens, false, &running.position);
  SharedSequence other = begin(pool, index, tokens_from(0, 60));
  EXPECT_EQ(other.table.length(), 32);
  EXPECT_EQ(pool.stats().pages_held, 3);
  ASSERT_TRUE(running.compute(pool, 20));
  index.insert(running.table, {}, running.tokens, false, &running.position);
  EXPECT_EQ(index.match({}, tokens_from(0, 60)), 48);
  ASSERT_TRUE(other.compute_all(pool));
  EXPECT_EQ(other.first_wrong(pool), -1);
  // What both computed is kept once.
  const int64_t held = pool.stats().pages_held;
  index.insert(other.table, {}, other.tokens, false, &other.position);
  EXPECT_EQ(index.stats().pages_merged, 1);
  EXPECT_EQ(pool.stats().pages_held, held - 1);
  EXPECT_EQ(other.table.pages(0)[2], running.table.pages(0)[2]);
  EXPECT_EQ(other.first_wrong(pool), -1);
  index.verify();
}

// FC-06
TEST(PrefixIndex, AForkAndItsOriginDoNotSeeEachOther) {
  PagePool pool(fixed_pool(16));
  SharedSequence a{BlockTable(pool), {}, tokens_from(0, 37)};
  ASSERT_TRUE(a.compute_all(pool));
  SharedSequence b{a.table.fork(), {}, joined(tokens_from(0, 20), tokens_from(500, 12))};
  b.table.trim_to(20);
  ASSERT_TRUE(b.compute(pool, 12));
  EXPECT_EQ(b.first_wrong(pool), -1);
  EXPECT_EQ(a.first_wrong(pool), -1);
  EXPECT_EQ(pool.references(0, a.table.pages(0)[0]), 2);
  EXPECT_EQ(pool.stats().page_copies, 1);
  for (int64_t i = 20; i < 37; ++i)
    slots_of(pool, 0)[a.table.pages(0)[i / 16] * 16 + i % 16] = 0x7fc00000;  // NaN
  EXPECT_EQ(b.first_wrong(pool), -1);
  pool.verify();
}

TEST(PrefixIndex, WhatIsWrittenBehindAKnownPageGoesToACopy) {
  PagePool pool(fixed_pool(16));
  PrefixIndex index(pool);
  SharedSequence s = begin(pool, index, tokens_from(0, 40));
  ASSERT_TRUE(s.compute_all(pool));
  index.insert(s.table, {}, s.tokens, true, &s.position);
  s.tokens = joined(tokens_from(0, 40), tokens_from(900, 8));
  ASSERT_TRUE(s.compute_all(pool));  // behind the known tail
  EXPECT_EQ(pool.stats().page_copies, 1);
  s.table.trim_to(20);  // into a full known page
  s.tokens = joined(tokens_from(0, 20), tokens_from(700, 9));
  ASSERT_TRUE(s.compute_all(pool));
  EXPECT_EQ(pool.stats().page_copies, 2);
  EXPECT_EQ(s.first_wrong(pool), -1);
  SharedSequence other = begin(pool, index, tokens_from(0, 41));
  EXPECT_EQ(other.table.length(), 40);
  EXPECT_EQ(other.first_wrong(pool), -1);
  index.verify();
}

TEST(PrefixIndex, ALongerEndReplacesAShorterOne) {
  PagePool pool(fixed_pool(16));
  PrefixIndex index(pool);
  for (int64_t n = 18; n <= 40; ++n) {
    serve(pool, index, tokens_from(0, n));
    EXPECT_EQ(pool.stats().pages_cached, (n + 15) / 16) << n;
    EXPECT_EQ(index.match({}, tokens_from(0, 100)), n);
    index.verify();
  }
  serve(pool, index, tokens_from(0, 35));
  EXPECT_EQ(pool.stats().pages_cached, 3);
  EXPECT_EQ(index.match({}, tokens_from(0, 100)), 40);
}

TEST(PrefixIndex, EveryPartOfTheScopeCounts) {
  PagePool pool(fixed_pool(64));
  PrefixIndex index(pool);
  const std::vector<PrefixScope> scopes = {{},
                                           {"a", "", "", ""},
                                           {"", "a", "", ""},
                                           {"", "", "a", ""},
                                           {"", "", "", "a"},
                                           {"b", "", "", ""}};
  for (const PrefixScope& scope : scopes)
    EXPECT_EQ(serve(pool, index, tokens_from(0, 40), scope), 0);
  for (const PrefixScope& scope : scopes)
    EXPECT_EQ(serve(pool, index, tokens_from(0, 40), scope), 39);
  EXPECT_EQ(index.stats().scopes, 6);
  index.clear_salt("a");
  EXPECT_EQ(index.match(scopes[1], tokens_from(0, 40)), 0);
  EXPECT_EQ(index.match(scopes[2], tokens_from(0, 40)), 40);
  for (const char* salt : {"a/x", "a/y", "ab"})
    EXPECT_EQ(serve(pool, index, tokens_from(0, 40), {salt, "", "", ""}), 0);
  index.clear_salts("a/");
  EXPECT_EQ(index.match({"a/x", "", "", ""}, tokens_from(0, 40)), 0);
  EXPECT_EQ(index.match({"ab", "", "", ""}, tokens_from(0, 40)), 40);
  EXPECT_EQ(index.match(scopes[5], tokens_from(0, 40)), 40);
  index.clear();
  EXPECT_EQ(index.stats().scopes, 0);
  EXPECT_EQ(index.stats().bytes, 0);
  EXPECT_EQ(pool.stats().pages_cached, 0);
  index.verify();
}

// FC-09, the part of core: another salt never hits, the same one does.
TEST(PrefixIndex, SaltsKeepTenantsApart) {
  PagePool pool(fixed_pool(256));
  PrefixIndex index(pool);
  const auto prompt = tokens_from(0, 320);
  std::vector<int64_t> cached;
  for (const char* salt : {"A", "A", "B", "", "A"})
    cached.push_back(serve(pool, index, prompt,
                           {.salt = salt, .model = "smol", .kv_format = "", .arithmetic_id = ""}));
  EXPECT_EQ(cached, (std::vector<int64_t>{0, 319, 0, 0, 319}));
}

// FC-08
TEST(PrefixIndex, EqualHashesNeverMixUpTokens) {
  PagePool pool(fixed_pool(4096));
  PrefixIndex index(pool, {.min_hit_tokens = 1, .hash_bits = 8});
  std::mt19937 random(8);
  std::set<std::vector<int32_t>> seen;
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 1000; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 48; ++t) prompt.push_back(static_cast<int32_t>(random() % 4));
    // Pairs with an equal last page behind different ones.
    if (i % 10 == 9) std::copy_n(prompts.back().begin() + 32, 16, prompt.begin() + 32);
    prompts.push_back(std::move(prompt));
  }
  const auto longest_common = [&](const std::vector<int32_t>& prompt) {
    int64_t most = 0;
    for (const auto& other : seen) {
      const auto end = std::mismatch(prompt.begin(), prompt.end() - 1, other.begin()).first;
      most = std::max<int64_t>(most, end - prompt.begin());
    }
    return most;
  };
  for (int round = 0; round < 2; ++round)
    for (const auto& prompt : prompts) {
      const int64_t hit = serve(pool, index, prompt);
      ASSERT_EQ(hit, longest_common(prompt));
      seen.insert(prompt);
    }
  index.verify();
}

TEST(PrefixIndex, TheOldestEndGoesFirst) {
  PagePool pool(fixed_pool(6));
  PrefixIndex index(pool);
  serve(pool, index, tokens_from(0, 48));     // 3 pages
  serve(pool, index, tokens_from(1000, 48));  // 3 pages
  EXPECT_EQ(take(pool, 1).size(), 1u);
  EXPECT_EQ(index.match({}, tokens_from(0, 48)), 32);  // its last page went
  EXPECT_EQ(index.match({}, tokens_from(1000, 48)), 48);
  {
    const BlockTable used = index.acquire({}, tokens_from(0, 48));
  }  // now the younger
  EXPECT_EQ(take(pool, 4).size(), 4u);
  EXPECT_EQ(index.match({}, tokens_from(0, 48)), 16);
  EXPECT_EQ(index.match({}, tokens_from(1000, 48)), 0);
  EXPECT_EQ(index.stats().pages_evicted, 5);
  EXPECT_EQ(pool.stats().pages_reclaimed, 5);
  index.verify();
}

TEST(PrefixIndex, PriorityComesBeforeAge) {
  PagePool pool(fixed_pool(6));
  PrefixIndex index(pool);
  serve(pool, index, tokens_from(0, 48), {}, {.priority = 80});
  serve(pool, index, tokens_from(1000, 48), {}, {.priority = 20});
  const auto pages = take(pool, 3);
  EXPECT_EQ(index.match({}, tokens_from(0, 48)), 48);
  EXPECT_EQ(index.match({}, tokens_from(1000, 48)), 0);
  pool.release(0, pages);
  // What a page builds on stays as long as the page.
  serve(pool, index, tokens_from(2000, 32), {}, {.priority = 10});
  serve(pool, index, joined(tokens_from(2000, 32), tokens_from(5, 16)), {}, {.priority = 90});
  index.verify();
  EXPECT_EQ(take(pool, 3).size(), 3u);
  EXPECT_EQ(index.match({}, tokens_from(0, 48)), 0);
  EXPECT_EQ(index.match({}, joined(tokens_from(2000, 32), tokens_from(5, 16))), 48);
  EXPECT_THROW(serve(pool, index, tokens_from(0, 8), {}, {.priority = 101}), std::invalid_argument);
}

TEST(PrefixIndex, GrowthComesBeforeEviction) {
  PagePoolOptions o = options(4, 16, tiny_group());
  o.max_bytes = 8 * 16 * 4 * 2;
  PagePool pool(o);
  PrefixIndex index(pool);
  serve(pool, index, tokens_from(0, 64));
  serve(pool, index, tokens_from(1000, 64));
  EXPECT_EQ(pool.stats().pages_cached, 8);
  EXPECT_EQ(index.stats().pages_evicted, 0);
  EXPECT_EQ(serve(pool, index, tokens_from(2000, 96)), 0);
  EXPECT_EQ(index.stats().pages_evicted, 6);
  EXPECT_EQ(index.match({}, tokens_from(1000, 64)), 32);
  EXPECT_EQ(serve(pool, index, tokens_from(3000, 16 * 9)), -1);  // never fits; nothing goes for it
  EXPECT_EQ(index.stats().pages_evicted, 6);
  EXPECT_EQ(index.match({}, tokens_from(2000, 96)), 96);
  index.verify();
}

TEST(PrefixIndex, TimeFreesWhatNobodyUses) {
  PagePool pool(fixed_pool(32));
  Clock clock;
  PrefixIndex index(pool, clock.options({.ttl_ns = ns(seconds(60))}));
  serve(pool, index, tokens_from(0, 40));
  serve(pool, index, tokens_from(1000, 40), {}, {.ttl_ns = ns(seconds(600))});
  SharedSequence running = begin(pool, index, tokens_from(0, 41));
  clock.time += ns(seconds(61));
  EXPECT_EQ(index.expire(), 0);  // held, or with more time
  running.table.trim_to(0);
  clock.time += ns(seconds(59));
  EXPECT_EQ(index.expire(), 0);
  clock.time += ns(seconds(1));
  EXPECT_EQ(index.expire(), 3);
  EXPECT_EQ(index.explain({}, tokens_from(0, 40)).reason, MissReason::kExpired);
  EXPECT_EQ(index.match({}, tokens_from(1000, 40)), 40);
  clock.time += ns(seconds(600));
  EXPECT_EQ(serve(pool, index, tokens_from(1000, 40)), 0);  // every call sees to it
  EXPECT_EQ(index.stats().pages_expired, 6);
  index.verify();
}

// FC-36
TEST(PrefixIndex, APinnedPrefixOutlivesAFlood) {
  PagePool pool(fixed_pool(128));
  Clock clock;
  PrefixIndex index(pool, clock.options());
  const PrefixScope tenant{"tenant", "", "", ""};
  const auto system = tokens_from(0, 512);
  serve(pool, index, system, tenant);
  const PinResult pin = index.pin(tenant, system, ns(seconds(60)));
  ASSERT_TRUE(pin.id.has_value());
  EXPECT_EQ(pin.num_tokens, 512);
  EXPECT_EQ(pin.refusal, "");
  for (int i = 0; i < 1000; ++i)
    ASSERT_EQ(serve(pool, index, tokens_from(10000 + 256 * i, 256)), 0) << i;
  EXPECT_EQ(serve(pool, index, joined(system, tokens_from(-20, 10)), tenant), 512);
  clock.time += ns(seconds(15));
  const auto pins = index.pins();
  ASSERT_EQ(pins.size(), 1u);
  EXPECT_EQ(pins[0].tokens, system);
  EXPECT_EQ(pins[0].scope, tenant);
  EXPECT_EQ(pins[0].bytes, 32 * 16 * 8);
  EXPECT_EQ(pins[0].ns_left, ns(seconds(45)));
  index.verify();
  clock.time += ns(seconds(46));
  EXPECT_EQ(index.pins().size(), 0u);
  for (int i = 0; i < 1000; ++i) serve(pool, index, tokens_from(500000 + 256 * i, 256));
  EXPECT_EQ(index.match(tenant, system), 0);
  index.verify();
}

TEST(PrefixIndex, PinsNothingThatNoRequestWouldFind) {
  PagePool pool(fixed_pool(16));
  PrefixIndex index(pool);
  serve(pool, index, tokens_from(0, 40));
  const auto tokens = joined(tokens_from(0, 15), tokens_from(300, 20));
  const PinResult none = index.pin({}, tokens);
  EXPECT_FALSE(none.id);
  EXPECT_EQ(none.num_tokens, 0);
  EXPECT_NE(none.refusal.find("15 of 35 tokens"), std::string::npos) << none.refusal;
  EXPECT_EQ(index.stats().pages_pinned, 0);
  EXPECT_TRUE(index.pin({}, joined(tokens_from(0, 16), tokens_from(300, 20))).id);
}

TEST(PrefixIndex, PinsEndAtTheirCap) {
  PagePool pool(fixed_pool(128));
  PrefixIndex index(pool);
  const auto most = tokens_from(0, 16 * 115);  // 90 %
  serve(pool, index, most);
  const PinResult partly = index.pin({}, most);
  ASSERT_TRUE(partly.id.has_value());
  EXPECT_EQ(partly.num_tokens, 64 * 16);
  EXPECT_EQ(partly.refusal, "1024 of 1840 tokens are pinned: no more than 64 pages may be, 64 are");
  serve(pool, index, tokens_from(9000, 32));
  const PinResult none = index.pin({}, tokens_from(9000, 32));
  EXPECT_FALSE(none.id.has_value());
  EXPECT_EQ(none.num_tokens, 0);
  EXPECT_EQ(serve(pool, index, tokens_from(20000, 64 * 16)), 0);  // what is left serves
  EXPECT_EQ(index.match({}, most), 1024);
  // The same pages twice cost no more room.
  EXPECT_EQ(index.pin({}, tokens_from(0, 100)).num_tokens, 100);
  EXPECT_TRUE(index.unpin(*partly.id));
  EXPECT_FALSE(index.unpin(*partly.id));
  EXPECT_EQ(index.stats().pages_pinned, 7);
  EXPECT_EQ(index.pin({}, tokens_from(77777, 20)).refusal, "nothing of these 20 tokens is stored");
  index.verify();
}

TEST(PrefixIndex, ASaltHasItsShare) {
  PagePool pool(fixed_pool(64));
  const int64_t page = pool.page_bytes(0);
  PrefixIndex index(pool, {.max_bytes = 20 * page, .max_bytes_per_salt = 4 * page});
  const PrefixScope a{"a", "", "", ""}, b{"b", "", "", ""};
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(serve(pool, index, tokens_from(1000 * i, 32), a), 0);
    EXPECT_EQ(serve(pool, index, tokens_from(1000 * i, 32), b), 0);
    index.verify();
  }
  EXPECT_EQ(index.stats().bytes, 8 * page);
  EXPECT_EQ(index.match(a, tokens_from(9000, 32)), 32);
  EXPECT_EQ(index.match(a, tokens_from(8000, 32)), 32);
  EXPECT_EQ(index.match(a, tokens_from(7000, 32)), 0);
  EXPECT_EQ(index.explain(a, tokens_from(7000, 32)).reason, MissReason::kQuotaExceeded);
  // One sequence beyond the share: its first pages are known, nothing of others goes for the rest.
  EXPECT_EQ(serve(pool, index, tokens_from(50000, 160), a), 0);
  EXPECT_EQ(index.match(a, tokens_from(50000, 160)), 64);
  EXPECT_EQ(index.explain(a, tokens_from(50000, 160)).reason, MissReason::kQuotaExceeded);
  EXPECT_GT(index.stats().pages_over_quota, 0);
  EXPECT_EQ(index.stats().pages_evicted, 0);
  EXPECT_EQ(index.match(b, tokens_from(9000, 32)), 32);
  for (int i = 0; i < 10; ++i) serve(pool, index, tokens_from(90000 + 1000 * i, 64));
  EXPECT_LE(index.stats().bytes, 20 * page);
  index.verify();
}

TEST(PrefixIndex, FreedPagesOfATenantCanBeZeroed) {
  PagePool pool(fixed_pool(8));
  PrefixIndex index(pool);
  SharedSequence s = begin(pool, index, tokens_from(0, 40), {"a", "", "", ""});
  s.table.zero_when_freed();
  ASSERT_TRUE(s.compute_all(pool));
  index.insert(s.table, s.scope, s.tokens, false, &s.position);
  const std::vector<PageId> pages(s.table.pages(0).begin(), s.table.pages(0).end());
  const auto sum = [&](PageId page) {
    uint64_t all = 0;
    for (int i = 0; i < 16; ++i) all |= slots_of(pool, 0)[page * 16 + i];
    return all;
  };
  s.table.trim_to(0);
  EXPECT_NE(sum(pages[0]), 0u);  // cached
  EXPECT_EQ(sum(pages[2]), 0u);  // freed
  index.clear_salt("a");
  EXPECT_EQ(sum(pages[0]), 0u);
  EXPECT_EQ(sum(pages[1]), 0u);
}

TEST(PrefixIndex, ExplainsItsMisses) {
  PagePool pool(fixed_pool(16));
  Clock clock;
  PrefixIndex index(pool, clock.options());
  const PrefixScope scope{"", "m", "f16", "id"};
  const auto reason = [&](const PrefixScope& s, const std::vector<int32_t>& tokens) {
    return std::string(miss_reason_name(index.explain(s, tokens).reason));
  };
  const auto stored = tokens_from(0, 70);
  EXPECT_EQ(reason(scope, stored), "new_session");
  EXPECT_EQ(reason(scope, tokens_from(0, 9)), "below_one_page");
  serve(pool, index, stored, scope);
  EXPECT_EQ(reason(scope, stored), "none");
  EXPECT_EQ(reason(scope, tokens_from(0, 30)), "none");
  EXPECT_EQ(reason(scope, tokens_from(0, 90)), "no_snapshot_coverage");
  EXPECT_EQ(reason(scope, tokens_from(300, 90)), "new_session");
  EXPECT_EQ(reason(scope, joined(tokens_from(0, 7), tokens_from(300, 90))), "below_one_page");
  EXPECT_EQ(reason({"tenant", "m", "f16", "id"}, stored), "salt_differs");
  EXPECT_EQ(reason({"", "n", "f16", "id"}, stored), "model_mismatch");
  EXPECT_EQ(reason({"", "m", "q8", "id"}, stored), "kv_format_differs");
  EXPECT_EQ(reason({"", "m", "f16", "other"}, stored), "arithmetic_differs");
  for (int64_t n : {16, 20, 37, 69}) {
    const auto other = joined(tokens_from(0, n), tokens_from(300, 90));
    const PrefixExplanation e = index.explain(scope, other);
    EXPECT_EQ(e.reason, MissReason::kPrefixDivergence);
    EXPECT_EQ(e.first_differing_token, n);
    EXPECT_EQ(e.hit_tokens, n);
    EXPECT_EQ(e.num_tokens, n + 90);
    EXPECT_NE(e.text.find("at token " + std::to_string(n)), std::string::npos) << e.text;
  }
  take(pool, 13);
  EXPECT_EQ(reason(scope, stored), "evicted");
  EXPECT_EQ(index.explain(scope, stored).known_tokens, 48);
  index.clear();
  EXPECT_EQ(reason(scope, tokens_from(0, 64)), "new_session");  // nothing of its scope is left
}

TEST(PrefixIndex, TellsATenantNothingOfOtherSalts) {
  PagePool pool(fixed_pool(64));
  PrefixIndex index(pool);
  const PrefixScope own{"tenant", "m", "f16", "id"}, others{"", "m", "f16", "id"};
  const auto stored = tokens_from(0, 70);
  const PrefixExplanation before = index.explain(own, stored, Asker::kTenant);
  serve(pool, index, stored, others);
  const PrefixExplanation after = index.explain(own, stored, Asker::kTenant);
  EXPECT_EQ(after.reason, MissReason::kNewSession);
  EXPECT_EQ(after.text, before.text);
  EXPECT_EQ(index.explain(own, stored).reason, MissReason::kSaltDiffers);
  // What its own salt has of another model it may know.
  EXPECT_EQ(index.explain({"", "n", "f16", "id"}, stored, Asker::kTenant).reason,
            MissReason::kModelDiffers);
}

TEST(PrefixIndex, ListsWhatIsStoredTheLargestFirst) {
  PagePool pool(fixed_pool(64));
  PrefixIndex index(pool);
  EXPECT_TRUE(index.prefixes(10).prefixes.empty());
  EXPECT_TRUE(index.prefixes(10).is_all);
  const auto system = tokens_from(0, 48);
  for (int32_t question : {1000, 2000, 3000})
    serve(pool, index, joined(system, tokens_from(question, 20)));  // 2 pages each beyond the 3
  serve(pool, index, tokens_from(500, 70), {.salt = "tenant"});
  serve(pool, index, tokens_from(700, 9), {.salt = "tenant"});
  const PinResult pin = index.pin({.salt = "tenant"}, tokens_from(500, 70));
  ASSERT_TRUE(pin.id);

  const KnownPrefixes all = index.prefixes(10);
  EXPECT_TRUE(all.is_all);
  ASSERT_EQ(all.prefixes.size(), 3u);
  const KnownPrefix& shared = all.prefixes[0];
  EXPECT_EQ(shared.scope.salt, "");
  EXPECT_EQ(shared.num_tokens, 48);
  EXPECT_EQ(shared.tokens, tokens_from(0, KnownPrefix::kMostTokens));
  EXPECT_EQ(shared.num_sequences, 3);
  EXPECT_EQ(shared.num_pages, 9);
  EXPECT_EQ(shared.bytes, 9 * pool.page_bytes(0));
  EXPECT_FALSE(shared.is_pinned);
  EXPECT_EQ(all.prefixes[1].scope.salt, "tenant");
  EXPECT_EQ(all.prefixes[1].num_tokens, 70);
  EXPECT_TRUE(all.prefixes[1].is_pinned);
  EXPECT_EQ(all.prefixes[2].num_tokens, 9);
  EXPECT_EQ(all.prefixes[2].tokens, tokens_from(700, 9));
  int64_t bytes = 0;
  for (const KnownPrefix& prefix : all.prefixes) bytes += prefix.bytes;
  EXPECT_EQ(bytes, index.stats().bytes);

  EXPECT_EQ(index.stats().pins, 1);
  EXPECT_EQ(index.prefixes(10, "tenant").prefixes.size(), 2u);
  EXPECT_EQ(index.prefixes(10, "ten").prefixes.size(), 2u);
  EXPECT_EQ(index.prefixes(10, "nobody").prefixes.size(), 0u);
  EXPECT_EQ(index.prefixes(2).prefixes.size(), 2u);
  EXPECT_FALSE(index.prefixes(2).is_all);
  EXPECT_FALSE(index.prefixes(10, "", 4).is_all);
}

TEST(PrefixIndex, CountsHowLongPagesLiveAndWait) {
  PagePool pool(fixed_pool(64));
  Clock clock;
  PrefixIndex index(pool, clock.options());
  const auto counts = [](std::initializer_list<std::pair<double, int64_t>> pairs) {
    std::array<int64_t, DurationCounts::kSeconds.size() + 1> out = {};
    for (const auto& [upper, count] : pairs)
      out[static_cast<size_t>(std::ranges::find(DurationCounts::kSeconds, upper) -
                              DurationCounts::kSeconds.begin())] += count;
    return out;
  };
  serve(pool, index, tokens_from(0, 49));  // three full pages and a tail of one token
  clock.time += ns(seconds(3));
  EXPECT_EQ(index.stats().reuse_gap.counts, counts({}));
  serve(pool, index, tokens_from(0, 49));
  EXPECT_EQ(index.stats().reuse_gap.counts, counts({{5, 3}}));
  EXPECT_DOUBLE_EQ(index.stats().reuse_gap.seconds, 9);
  EXPECT_EQ(index.stats().lifetime.counts, counts({}));
  clock.time += ns(seconds(100'000));
  index.clear();
  EXPECT_EQ(index.stats().lifetime.counts, counts({{0, 4}}));  // longer than all
}

TEST(PrefixIndex, TellsWhatHappensToItsPages) {
  PageEventQueue queue(100);
  PagePool pool(fixed_pool(6));
  PrefixIndex index(pool, {.max_bytes_per_salt = 2 * pool.page_bytes(0), .events = &queue});
  uint64_t next = 0;
  const auto told = [&] {
    std::vector<PageEvent> events;
    const PageEventBatch batch = queue.poll(next, 100);
    for (const auto& event : batch.events) events.push_back(*event);
    next = batch.next_sequence();
    return events;
  };
  const auto tokens = tokens_from(0, 40);
  const PageName first = first_page_name(std::span(tokens).first(16), {});
  const PageName second = page_name(first, std::span(tokens).subspan(16, 16));
  EXPECT_EQ(hex(first), "dc918a88b139e5afe60b88eda27508d4aee16c10fdc354791efea06206ac0749");
  EXPECT_EQ(hex(second), "c300ec275d7bf08af8fc63e76cdc0086911bbc7091e03c5cf892553bef84ef0c");

  serve(pool, index, tokens);
  PagesStored stored;
  stored.block_hashes = {first, second};
  stored.token_ids = tokens_from(0, 32);
  stored.block_size = 16;
  EXPECT_EQ(told(), std::vector<PageEvent>{stored});

  serve(pool, index,
        joined(tokens_from(0, 20), tokens_from(50, 12)));  // copies from the second page
  const auto branch = joined(tokens_from(16, 4), tokens_from(50, 12));
  stored.block_hashes = {page_name(first, branch)};
  stored.parent_block_hash = first;
  stored.token_ids = branch;
  const auto events = told();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(std::get<PageCopied>(events[0]).num_tokens, 4);
  EXPECT_EQ(events[1], PageEvent(stored));

  const auto pages = take(pool, 4);  // the end of the first, and its second page
  EXPECT_EQ(told(), std::vector<PageEvent>{(PagesRemoved{{second}})});
  pool.release(0, pages);
  serve(pool, index, tokens_from(100, 32), {.salt = "a"});
  serve(pool, index, tokens_from(200, 16), {.salt = "a"});
  index.clear_salt("a");
  std::vector<RemovalReason> reasons;
  for (const PageEvent& event : told())
    if (const auto* removed = std::get_if<PagesRemoved>(&event)) reasons.push_back(removed->reason);
  EXPECT_EQ(reasons, (std::vector{RemovalReason::kQuota, RemovalReason::kRequested,
                                  RemovalReason::kRequested}));
  index.clear();
  EXPECT_EQ(told(), std::vector<PageEvent>{AllPagesCleared()});
  EXPECT_EQ(index.stats().events_lost, 0);
}

// FC-05, the part of the index; window_test.cpp has the rest.
TEST(PrefixIndex, AHitBehindAWindowHasTheWholeWindow) {
  for (const bool has_full_group : {false, true}) {
    PagePoolOptions o = options(64, 16, tiny_group(32));
    if (has_full_group) o.groups.push_back(tiny_group());
    PagePool pool(o);
    PrefixIndex index(pool);
    const auto first = tokens_from(0, 200);
    SharedSequence a = begin(pool, index, first);
    while (a.table.length() < 200) {
      ASSERT_TRUE(a.compute(pool, a.table.length() < 100 ? 20 : 1));
      index.insert(a.table, {}, a.tokens, a.table.length() == 200, &a.position);
      a.table.release_passed();
      EXPECT_LE(std::ranges::count_if(a.table.pages(0), [](PageId p) { return p != kNoPage; }), 4);
    }
    a.table.trim_to(0);
    const auto changed = joined(tokens_from(0, 97), tokens_from(900, 103));
    SharedSequence b = begin(pool, index, changed);
    EXPECT_EQ(b.table.length(), 97);
    EXPECT_EQ(b.table.num_passed(0), 4);  // tokens 66 to 96 are seen next
    EXPECT_EQ(b.first_wrong(pool), -1);
    b.table.trim_to(0);
    EXPECT_EQ(index.match({}, tokens_from(0, 150)), 150);

    // Without the window's pages there is no hit, and it says so.
    index.evict(0, 1000);
    index.verify();
    const int64_t hit = index.match({}, changed);
    EXPECT_EQ(hit, 0);
    if (has_full_group) {
      EXPECT_EQ(index.explain({}, tokens_from(0, 97)).reason, MissReason::kWindowEvicted);
      EXPECT_EQ(index.explain({}, tokens_from(0, 97)).known_tokens, 97);
    }
    SharedSequence c = begin(pool, index, changed);
    EXPECT_EQ(c.table.length(), hit);
    ASSERT_TRUE(c.compute_all(pool));
    EXPECT_EQ(c.first_wrong(pool), -1);
    index.insert(c.table, {}, c.tokens, true, &c.position);
    index.verify();
  }
}

TEST(PrefixIndex, ForgetsHeldPagesWithoutHarm) {
  PagePool pool(fixed_pool(16));
  PrefixIndex index(pool);
  SharedSequence s = begin(pool, index, tokens_from(0, 80));
  ASSERT_TRUE(s.compute(pool, 60));
  index.insert(s.table, {}, s.tokens, false, &s.position);
  index.clear();
  EXPECT_EQ(pool.stats().pages_held, 4);
  ASSERT_TRUE(s.compute(pool, 20));
  index.insert(s.table, {}, s.tokens, false, &s.position);  // the position is out of date
  EXPECT_EQ(index.match({}, s.tokens), 80);
  EXPECT_EQ(s.first_wrong(pool), -1);
  index.verify();
}

TEST(PrefixIndex, ForgetsWhatCannotBeTrusted) {
  PagePool pool(fixed_pool(32));
  PrefixIndex index(pool);
  serve(pool, index, tokens_from(0, 100));
  serve(pool, index, joined(tokens_from(0, 70), tokens_from(900, 30)));
  ASSERT_TRUE(index.pin({}, tokens_from(0, 100)).id.has_value());
  index.forget({}, tokens_from(0, 100), 70);  // from the fifth page on
  index.verify();
  EXPECT_EQ(index.match({}, tokens_from(0, 100)), 70);  // six tokens of the other sequence's
  EXPECT_EQ(index.pins().size(), 0u);
  index.forget({}, tokens_from(0, 100), 20);
  EXPECT_EQ(index.match({}, tokens_from(0, 100)), 16);
  index.forget({.salt = "unknown"}, tokens_from(0, 100), 0);
  index.forget({}, tokens_from(500, 100), 0);
  EXPECT_EQ(index.match({}, tokens_from(0, 100)), 16);
  EXPECT_THROW(index.forget({}, tokens_from(0, 100), -1), std::invalid_argument);
  index.verify();
}

TEST(PrefixIndex, EndsBeforeItsPool) {
  PagePool pool(fixed_pool(16));
  BlockTable held(pool);
  {
    PrefixIndex index(pool);
    EXPECT_THROW(PrefixIndex second(pool), std::invalid_argument);
    serve(pool, index, tokens_from(0, 80));
    held = index.acquire({}, tokens_from(0, 32));
    (void)index.pin({}, tokens_from(0, 80));
  }
  EXPECT_EQ(pool.stats().pages_cached, 0);
  EXPECT_EQ(pool.stats().pages_held, 2);
  pool.verify();
  PrefixIndex next(pool);
  EXPECT_EQ(next.match({}, tokens_from(0, 80)), 0);
}

TEST(PrefixIndex, RefusesOptionsOutsideTheirLimits) {
  PagePool pool(fixed_pool(4));
  for (const PrefixIndexOptions& o : std::vector<PrefixIndexOptions>{{.max_bytes = -1},
                                                                     {.max_bytes_per_salt = -1},
                                                                     {.max_pinned_share = 1.5},
                                                                     {.max_pinned_share = NAN},
                                                                     {.ttl_ns = -1},
                                                                     {.min_hit_tokens = 0},
                                                                     {.hash_bits = 0},
                                                                     {.hash_bits = 65}})
    EXPECT_THROW(PrefixIndex index(pool, o), std::invalid_argument);
  PrefixIndex index(pool);
  SharedSequence s = begin(pool, index, tokens_from(0, 20));
  ASSERT_TRUE(s.compute_all(pool));
  EXPECT_THROW(index.insert(s.table, {}, tokens_from(0, 19), false), std::invalid_argument);
  PagePool other(fixed_pool(4));
  BlockTable foreign(other);
  foreign.append(20);
  EXPECT_THROW(index.insert(foreign, {}, tokens_from(0, 20), false), std::invalid_argument);
}

uint32_t bits_of(PagePool& pool, PageId page) {
  uint32_t all = 0;
  for (int i = 0; i < pool.page_size(); ++i) all |= slots_of(pool, 0)[page * pool.page_size() + i];
  return all;
}

// The page that takes the place of a tenant's own is one of its pages, and so is a copy of what it computed.
TEST(PrefixIndex, MergedAndCopiedPagesOfATenantAreZeroedToo) {
  PagePool pool(fixed_pool(8));
  PrefixIndex index(pool);
  const PrefixScope scope{"a", "", "", ""};
  serve(pool, index, tokens_from(0, 16), scope);  // nobody asked for zeros
  SharedSequence s{BlockTable(pool), scope, tokens_from(0, 24)};
  s.table.zero_when_freed();
  ASSERT_TRUE(s.compute_all(pool));
  index.insert(s.table, scope, s.tokens, true);
  EXPECT_EQ(index.stats().pages_merged, 1);
  const std::vector<PageId> pages(s.table.pages(0).begin(), s.table.pages(0).end());
  PageId copy;
  {
    SharedSequence other = begin(pool, index, joined(tokens_from(0, 20), {7, 7}), scope);
    ASSERT_EQ(other.table.length(), 20);
    ASSERT_TRUE(other.compute_all(pool));  // in a copy of the tail, whose bytes are to be zeroed
    copy = other.table.pages(0)[1];
    ASSERT_NE(copy, pages[1]);
  }
  EXPECT_EQ(bits_of(pool, copy), 0u);
  s.table.trim_to(0);
  EXPECT_NE(bits_of(pool, pages[0]), 0u);
  index.clear();
  EXPECT_EQ(bits_of(pool, pages[0]), 0u);
  EXPECT_EQ(bits_of(pool, pages[1]), 0u);
}

// The page at the position is gone from the index and passed in the table: that says nothing about its tokens.
TEST(PrefixIndex, APositionWithoutItsPageIsNotTrue) {
  PagePoolOptions o = fixed_pool(16, 1);
  o.groups[0].sliding_window = 1;
  PagePool pool(o);
  PrefixIndex index(pool, {.min_hit_tokens = 1});
  SharedSequence s{BlockTable(pool), {}, tokens_from(0, 8)};
  ASSERT_TRUE(s.compute(pool, 2));
  index.insert(s.table, {}, s.tokens, false, &s.position);
  SharedSequence longer{BlockTable(pool), {}, s.tokens};
  ASSERT_TRUE(longer.compute(pool, 2));
  index.insert(longer.table, {}, longer.tokens, false);
  longer.table.release_passed();
  ASSERT_TRUE(longer.compute(pool, 1));
  index.insert(longer.table, {}, longer.tokens, false);
  s.table.trim_to(0);
  ASSERT_EQ(index.evict(0, 2), 2);  // the third page is held
  s.tokens = tokens_from(100, 8);
  ASSERT_TRUE(s.compute(pool, 2));
  s.table.release_passed();
  ASSERT_TRUE(s.compute(pool, 2));
  index.insert(s.table, {}, s.tokens, false, &s.position);
  EXPECT_EQ(index.match({}, joined(tokens_from(0, 2), tokens_from(102, 2))), 2);
  index.verify();
}

// A pool with a window alone: its pages go one by one, and it is told why.
TEST(PrefixIndex, TellsWhyPagesOfAWindowWent) {
  PageEventQueue queue(100);
  PagePoolOptions o = fixed_pool(8);
  o.groups[0].sliding_window = 64;
  PagePool pool(o);
  Clock clock;
  PrefixIndex index(pool, clock.options({.ttl_ns = 10, .events = &queue}));
  serve(pool, index, tokens_from(0, 32));
  take(pool, 7);
  EXPECT_EQ(index.explain({}, tokens_from(0, 32)).reason, MissReason::kEvicted);
  clock.time += 10;
  EXPECT_EQ(index.expire(), 1);
  std::vector<RemovalReason> reasons;
  for (const auto& event : queue.poll(0, 100).events)
    if (const auto* removed = std::get_if<PagesRemoved>(event.get()))
      reasons.push_back(removed->reason);
  EXPECT_EQ(reasons, (std::vector{RemovalReason::kRoomNeeded, RemovalReason::kTtl}));
}

// What a known page lacks and a sequence gives counts as well.
TEST(PrefixIndex, PagesGivenToKnownOnesKeepToTheBytes) {
  PagePoolOptions o = fixed_pool(32);
  o.groups.push_back(tiny_group(16));
  PagePool pool(o);
  const int64_t page = pool.page_bytes(0);
  PrefixIndex index(pool, {.max_bytes = 6 * page});
  SharedSequence s = begin(pool, index, tokens_from(0, 64));
  ASSERT_TRUE(s.compute_all(pool));
  s.table.release_passed();
  index.insert(s.table, {}, s.tokens, false, &s.position);  // four pages, of the window the last
  ASSERT_EQ(index.stats().bytes, 5 * page);
  SharedSequence other{BlockTable(pool), {}, s.tokens};
  ASSERT_TRUE(other.compute_all(pool));
  index.insert(other.table, {}, other.tokens, false);
  EXPECT_EQ(index.stats().bytes, 6 * page);
  index.verify();
}

TEST(PrefixIndex, AnyClockWillDo) {
  for (int64_t start : {INT64_MIN, INT64_MIN + 5, int64_t{-1}, INT64_MAX - 5}) {
    PagePool pool(fixed_pool(8));
    Clock clock{start};
    PrefixIndex index(pool, clock.options({.ttl_ns = 1000}));
    serve(pool, index, tokens_from(0, 32));
    serve(pool, index, tokens_from(100, 32), {}, {.ttl_ns = INT64_MAX});
    (void)index.pin({}, tokens_from(0, 32), INT64_MAX - 1);
    EXPECT_EQ(index.pins().size(), 1u) << start;
    clock.time = start > INT64_MIN + 100 ? start - 100 : start;  // backwards
    EXPECT_EQ(index.expire(), 0) << start;
    index.verify();
  }
}

TEST(PrefixIndex, PinsLeaveAShareOfTheByteBudget) {
  PagePoolOptions o = options(4, 16, tiny_group());
  o.max_bytes = 16 * 16 * 8;  // 16 pages; address space for 4,100
  PagePool pool(o);
  PrefixIndex index(pool);
  ASSERT_EQ(serve(pool, index, tokens_from(0, 16 * 16)), 0);
  EXPECT_EQ(index.pin({}, tokens_from(0, 16 * 16)).num_tokens, 8 * 16);
  EXPECT_EQ(serve(pool, index, tokens_from(1000, 8 * 16)), 0);
}

// Full attention and a window share a budget: what the window's group does not need is memory for the other.
TEST(PrefixIndex, CachedPagesOfOneGroupGiveTheirMemoryToAnother) {
  PagePoolOptions o;
  const LayerSpec spec = layer(1, 64, PageFormat::kF32);  // 4 KiB a page in each array
  o.groups = {group(1, spec), group(1, spec, 32)};
  o.num_pages = 1;
  o.max_pages = 4096;
  o.max_bytes = 64 * 2 * 4096 * 2;  // 64 pages of both, or 120 of one and some of the other
  o.available_bytes = [] { return std::numeric_limits<int64_t>::max(); };
  PagePool pool(o);
  PrefixIndex index(pool);
  const auto run = [&](int32_t first, int64_t num_tokens) {
    BlockTable table(pool);
    const auto tokens = tokens_from(first, num_tokens);
    PrefixIndex::Position position;
    while (table.length() < num_tokens) {
      if (!table.try_append(std::min<int64_t>(32, num_tokens - table.length()))) return false;
      index.insert(table, {}, tokens, false, &position);
      table.release_passed();
    }
    index.verify();
    return true;
  };
  EXPECT_TRUE(run(0, 60 * 16));  // both groups commit about as much
  EXPECT_GT(pool.committed(1), 40);
  EXPECT_TRUE(run(5000, 110 * 16));
  EXPECT_EQ(index.match({}, tokens_from(5000, 110 * 16)), 110 * 16);
  EXPECT_LE(pool.stats().bytes_committed, o.max_bytes);
  EXPECT_FALSE(run(9000, 130 * 16));  // there is never room for it
  EXPECT_TRUE(run(20000, 110 * 16));
}

// 64 sequences of 4,096 tokens, 3,500 of them the same: what they share is held once.
TEST(PrefixIndex, SharesAPromptAmongManySequences) {
  PagePool pool(options(1024, 16, tiny_group()));
  PrefixIndex index(pool);
  std::vector<SharedSequence> running;
  for (int i = 0; i < 64; ++i) {
    const auto own = tokens_from(100000 + 1000 * i, 596);
    SharedSequence& s = running.emplace_back(begin(pool, index, joined(tokens_from(0, 3500), own)));
    EXPECT_EQ(s.table.length(), i == 0 ? 0 : 3500);  // of a running one too
    ASSERT_TRUE(s.compute_all(pool));
    index.insert(s.table, {}, s.tokens, false, &s.position);
    EXPECT_EQ(s.first_wrong(pool), -1);
  }
  EXPECT_EQ(pool.stats().pages_held, 3500 / 16 + 64 * (4096 / 16 - 3500 / 16));
  index.verify();
}

}  // namespace
}  // namespace pagedkv::testing
