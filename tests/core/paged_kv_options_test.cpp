#include <gtest/gtest.h>

#include <cstdlib>

#include "core/cache_testing.h"
#include "core/environment.h"
#include "core/scoped_environment.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv {
namespace {

using testing::error_of;
using testing::ScopedEnvironment;

TEST(PagedKVCacheOptions, AnEmptyEnvironmentLeavesEverythingUnset) {
  const ScopedEnvironment env;
  const auto o = PagedKVCacheOptions::from_environment();
  EXPECT_FALSE(o.block_size || o.num_blocks || o.dtype || o.quant || o.dynamic ||
               o.context_window || o.sliding_window || o.max_bytes);
  const PagedKVCache cache(o);
  EXPECT_EQ(cache.block_size(), 16);
  EXPECT_EQ(cache.capacity(), 16 * 1024);
}

TEST(PagedKVCacheOptions, TheSeedsVariablesAreRead) {
  ScopedEnvironment env;
  env.set("MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE", " 32 ");
  env.set("MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS", "1_0");
  env.set("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "8bit");
  env.set("MTPLX_DYNAMIC_PAGED_KV", "Yes");
  env.set("MTPLX_CONTEXT_WINDOW_TOKENS", "1000");
  env.set("MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW", "128");
  const auto o = PagedKVCacheOptions::from_environment();
  EXPECT_EQ(o.block_size, 32);
  EXPECT_EQ(o.num_blocks, 10);
  EXPECT_EQ(o.quant, PagedKVQuantConfig("q8"));
  EXPECT_EQ(o.dynamic, true);
  EXPECT_EQ(o.context_window, 1000);
  EXPECT_EQ(o.sliding_window, 128);
}

TEST(PagedKVCacheOptions, OursWinAndWhatIsGivenWinsOverBoth) {
  ScopedEnvironment env;
  env.set("MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE", "32");
  env.set("PAGEDKV_BLOCK_SIZE", "64");
  env.set("MTPLX_PAGED_KV_QUANT", "q8");
  env.set("PAGEDKV_KV_CACHE_DTYPE", "q4");
  env.set("PAGEDKV_CACHE_TYPE_V", "bf16");
  env.set("MTPLX_DYNAMIC_PAGED_KV", "1");
  env.set("PAGEDKV_DYNAMIC", "off");
  env.set("PAGEDKV_KV_CACHE_MEMORY_BYTES", "1.5MiB");
  const auto o = PagedKVCacheOptions::from_environment();
  EXPECT_EQ(o.block_size, 64);
  EXPECT_EQ(o.quant, PagedKVQuantConfig("k=q4,v=off"));
  EXPECT_EQ(o.dtype, DType::kBF16);
  EXPECT_EQ(o.dynamic, false);
  EXPECT_EQ(o.max_bytes, 3 << 19);

  PagedKVCacheOptions given;
  given.block_size = 8;
  given.quant = PagedKVQuantConfig();
  given.dynamic = true;
  const auto mixed = PagedKVCacheOptions::from_environment(given);
  EXPECT_EQ(mixed.block_size, 8);
  EXPECT_EQ(mixed.quant, PagedKVQuantConfig());
  EXPECT_EQ(mixed.dynamic, true);
}

TEST(PagedKVCacheOptions, OneSideGivenLeavesTheOtherToTheSeed) {
  ScopedEnvironment env;
  env.set("MTPLX_PAGED_KV_QUANT", "q4");
  env.set("PAGEDKV_CACHE_TYPE_K", "q8");
  EXPECT_EQ(PagedKVCacheOptions::from_environment().quant, PagedKVQuantConfig("k=q8,v=q4"));
  env.set("PAGEDKV_KV_CACHE_DTYPE", "off");  // not quantised: the dtype is the first write's
  const auto o = PagedKVCacheOptions::from_environment();
  EXPECT_EQ(o.quant, PagedKVQuantConfig("k=q8,v=off"));
  EXPECT_FALSE(o.dtype);
}

TEST(PagedKVCacheOptions, TheConstructorReadsNoEnvironment) {
  ScopedEnvironment env;
  env.set("MTPLX_PAGED_KV_QUANT", "q4");
  env.set("PAGEDKV_BLOCK_SIZE", "64");
  const PagedKVCache cache;
  EXPECT_EQ(cache.block_size(), 16);
  EXPECT_FALSE(cache.quant().enabled());
}

TEST(PagedKVCacheOptions, ABadValueIsAnErrorThatNamesTheVariable) {
  for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
           {"PAGEDKV_BLOCK_SIZE", "0"},
           {"PAGEDKV_BLOCK_SIZE", "257"},
           {"PAGEDKV_NUM_BLOCKS", "many"},
           {"PAGEDKV_NUM_BLOCKS", "99999999999999999999"},
           {"PAGEDKV_DYNAMIC", "perhaps"},
           {"PAGEDKV_CTX_SIZE", "-2"},
           {"PAGEDKV_CTX_SIZE", "0"},
           {"PAGEDKV_KV_CACHE_MEMORY_BYTES", "1XB"},
           {"PAGEDKV_KV_CACHE_DTYPE", "q5"},
           {"PAGEDKV_CACHE_TYPE_K", "q5"},
           {"MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE", "x"},
           {"MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW", "1e3"},
           {"MTPLX_PAGED_KV_QUANT", "true"}}) {
    ScopedEnvironment env;
    env.set(name, value);
    const std::string text =
        error_of<std::invalid_argument>([] { PagedKVCacheOptions::from_environment(); });
    EXPECT_EQ(text.rfind(name + "=" + value + ": ", 0), 0u) << text;
  }
}

// In a process of its own, since each warning is given once in a process.
TEST(PagedKVCacheOptionsDeathTest, WhereTheSeedTakesItsDefaultAWarningSaysSo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto read = [] {
    ScopedEnvironment env;
    env.set("MTPLX_CONTEXT_WINDOW_TOKENS", "lots");
    env.set("MTPLX_DYNAMIC_PAGED_KV", "enabled");
    const auto o = PagedKVCacheOptions::from_environment();
    PagedKVCacheOptions::from_environment();
    std::exit(o.context_window == 0 && o.dynamic == false ? 0 : 1);
  };
  EXPECT_EXIT(read(), ::testing::ExitedWithCode(0),
              "^[^\n]*MTPLX_DYNAMIC_PAGED_KV=enabled[^\n]*\n"
              "[^\n]*MTPLX_CONTEXT_WINDOW_TOKENS=lots[^\n]*\n$");
}

TEST(PagedKVCacheOptions, GrowthStartsWithWhatTheRequestNeeds) {
  ScopedEnvironment env;
  env.set("MTPLX_DYNAMIC_PAGED_KV_TOKENS", "20000");
  EXPECT_FALSE(PagedKVCacheOptions::from_environment().num_blocks);  // growth was not turned on
  env.set("MTPLX_DYNAMIC_PAGED_KV", "1");
  EXPECT_EQ(PagedKVCacheOptions::from_environment().num_blocks, (20000 + 128 + 15) / 16);
  env.set("MTPLX_DYNAMIC_PAGED_KV_MIN_BLOCKS", "2000");
  EXPECT_EQ(PagedKVCacheOptions::from_environment().num_blocks, 2000);
}

TEST(PagedKVCacheOptions, OptionsOutsideTheirLimitsAreRefused) {
  const auto refused = [](auto change) {
    PagedKVCacheOptions o;
    change(o);
    return error_of<std::invalid_argument>([&] { PagedKVCache cache(o); });
  };
  EXPECT_NE(refused([](auto& o) { o.block_size = 0; }).find("block_size 0"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.block_size = 257; }).find("1..256"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.num_blocks = -4; }).find("num_blocks -4"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.context_window = -1; }).find("context_window -1"),
            std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.sliding_window = -1; }).find("sliding_window -1"),
            std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.max_bytes = -1; }).find("max_bytes -1"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.num_layers = 0; }).find("num_layers 0"), std::string::npos);
}

TEST(Environment, IntegersAreReadAsPythonReadsThem) {
  for (const auto& [text, value] : std::vector<std::pair<std::string, int64_t>>{
           {"7", 7}, {" 7 ", 7}, {"+7", 7}, {"-7", -7}, {"1_000", 1000}, {"007", 7}})
    EXPECT_EQ(parse_integer(text), value) << text;
  for (const char* text : {"", " ", "1e3", "0x10", "3.5", "_1", "1_", "1__0", "+-5", "--5", "- 5",
                           "7 8", "9223372036854775808", "junk"})
    EXPECT_EQ(parse_integer(text), std::nullopt) << text;
}

}  // namespace
}  // namespace pagedkv
