#include <gtest/gtest.h>

#include "core/cache_testing.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv {
namespace {

using testing::rows;

TEST(PagedKVCacheStats, CountWhatHappened) {
  PagedKVCacheOptions o;
  o.block_size = 4;
  o.num_blocks = 4;
  o.quant = PagedKVQuantConfig("q8");
  PagedKVCache cache(o);
  cache.update(rows(1, 2, 10, 8), rows(2, 2, 10, 8));
  cache.attend(rows(3, 2, 10, 8));
  cache.update(rows(1, 2, 1, 8), rows(2, 2, 1, 8));
  for (int i = 0; i < 3; ++i) cache.attend(rows(3, 4, 1, 8));
  (void)cache.keys();
  (void)cache.state();
  const auto s = cache.stats();
  EXPECT_EQ(s.key_format, "q8");
  EXPECT_EQ(s.updates, 2);
  EXPECT_EQ(s.allocation_events, 1);  // the third page held room for the eleventh token
  EXPECT_EQ(s.grow_events, 0);
  EXPECT_EQ(s.reads, 2);
  EXPECT_EQ(s.dequant_reads, 2);
  EXPECT_EQ(s.dequant_tokens, 22);
  EXPECT_EQ(s.pages_in_use, 3);
  EXPECT_EQ(s.pages_peak, 3);
  EXPECT_EQ(s.pages_capacity, 4);
  EXPECT_DOUBLE_EQ(s.block_utilization, 11.0 / 12.0);
  EXPECT_EQ(s.bytes_in_use, 3 * 4 * 2 * 2 * (8 + 4));
  EXPECT_LE(s.bytes_in_use, s.bytes_committed);
  EXPECT_LE(s.bytes_committed, s.bytes_resident);
  EXPECT_LE(s.bytes_resident, s.bytes_reserved);
  ASSERT_EQ(s.attention_calls.size(), 1u);
  EXPECT_EQ(s.attention_calls[0].kernel_set, kernels().name);
  EXPECT_EQ(s.attention_calls[0].by_phase, (std::array<int64_t, 2>{1, 3}));
  EXPECT_GT(s.attention_seconds, 0);
  EXPECT_GT(s.write_seconds, 0);
}

TEST(PagedKVCacheStats, NameTheSetsThatRanAndTheFallback) {
  const std::string best = kernels().name;
  PagedKVCache cache;
  cache.update(rows(1, 1, 3, 8), rows(2, 1, 3, 8));
  cache.attend(rows(3, 1, 1, 8));
  select_kernels("reference");
  cache.attend(rows(3, 1, 1, 8));
  cache.attend(rows(3, 1, 2, 8));
  select_kernels(best);
  const auto s = cache.stats();
  ASSERT_EQ(s.fallbacks.size(), 1u);
  EXPECT_EQ(s.fallbacks[0].reason, "reference kernels");
  EXPECT_EQ(s.fallbacks[0].calls, best == "reference" ? 3 : 2);
}

TEST(PagedKVCacheStats, AreOneJsonObject) {
  PagedKVCacheStats s{.key_format = "q8", .value_format = "q4", .kernel_set = "a\"b"};
  s.block_size = 16;
  s.offset = 5;
  s.block_utilization = 0.3125;
  s.attention_calls.push_back({"avx2", {1, 2}});
  s.fallbacks.push_back({"reference kernels", 3});
  EXPECT_EQ(
      to_json(s),
      "{\"key_format\":\"q8\",\"value_format\":\"q4\",\"kernel_set\":\"a\\\"b\",\"num_layers\":1,"
      "\"block_size\":16,\"num_blocks\":0,\"capacity\":0,\"offset\":5,\"updates\":0,"
      "\"allocation_events\":0,\"grow_events\":0,\"shrink_events\":0,\"reads\":0,"
      "\"dequant_reads\":0,\"dequant_tokens\":0,\"pages_in_use\":0,\"pages_peak\":0,"
      "\"pages_capacity\":0,\"block_utilization\":0.3125,\"bytes_reserved\":0,"
      "\"bytes_committed\":0,\"bytes_resident\":0,\"bytes_in_use\":0,\"bytes_moved\":0,"
      "\"attention_calls\":{\"avx2\":{\"prefill\":1,\"decode\":2}},"
      "\"fallbacks\":{\"reference kernels\":3},\"commit_seconds\":0,\"touch_seconds\":0,"
      "\"write_seconds\":0,\"attention_seconds\":0,\"read_seconds\":0}");
}

}  // namespace
}  // namespace pagedkv
