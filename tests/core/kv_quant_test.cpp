#include "pagedkv/core/kv_quant.h"

#include <gtest/gtest.h>

#include <type_traits>

#include "core/cache_testing.h"
#include "core/scoped_environment.h"

namespace pagedkv {
namespace {

using testing::error_of;
using testing::ScopedEnvironment;

TEST(KvQuant, TakesTheSpellingsOfTheSeed) {
  for (const char* word : {"off", "", " ", "None", "FALSE", "0", "disabled", "disable"})
    EXPECT_EQ(parse_quant_mode(word), PagedKVQuantMode::kOff) << word;
  for (const char* word : {"q8", " Q8 ", "8", "8bit", "int8", "uint8", "q8_0", "Q8-0"})
    EXPECT_EQ(parse_quant_mode(word), PagedKVQuantMode::kQ8) << word;
  for (const char* word : {"q6", "6", "6bit", "int6", "uint6"})
    EXPECT_EQ(parse_quant_mode(word), PagedKVQuantMode::kQ6) << word;
  for (const char* word : {"q4", "4", "4bit", "int4", "uint4", "q4_0", "q4-0"})
    EXPECT_EQ(parse_quant_mode(word), PagedKVQuantMode::kQ4) << word;
}

TEST(KvQuant, AnUnknownWordIsAnErrorThatNamesItAndTheModes) {
  for (const char* word : {"no", "true", "8_bit", "q-8", "q5", "q8q", "8.0", "bogus"}) {
    const std::string text = error_of<std::invalid_argument>([&] { parse_quant_mode(word); });
    EXPECT_NE(text.find(std::string(1, '"').append(word).append("\"")), std::string::npos) << word;
    EXPECT_NE(text.find("off, q8, q6 or q4"), std::string::npos) << word;
  }
}

TEST(KvQuant, AConfigurationIsImmutableAndMayDifferForKeysAndValues) {
  static_assert(!std::is_aggregate_v<PagedKVQuantConfig>);
  EXPECT_FALSE(PagedKVQuantConfig().enabled());
  EXPECT_EQ(PagedKVQuantConfig("q4").mode(), "q4");
  const PagedKVQuantConfig mixed("k=q8,v=int4");
  EXPECT_EQ(mixed.keys(), PagedKVQuantMode::kQ8);
  EXPECT_EQ(mixed.values(), PagedKVQuantMode::kQ4);
  EXPECT_EQ(mixed.mode(), "k=q8,v=q4");
  EXPECT_TRUE(PagedKVQuantConfig("k=off,v=q4").enabled());
  for (const char* bad : {"k=q8", "v=q4,k=q8", "k=,v=q4", "k=q8,v=q9", "=", "k=q8,v=q4,"})
    EXPECT_THROW(PagedKVQuantConfig{bad}, std::invalid_argument) << bad;
}

TEST(KvQuant, TheFirstVariableThatIsNotBlankDecides) {
  ScopedEnvironment env;
  EXPECT_EQ(paged_kv_quant_mode_from_env(), PagedKVQuantMode::kOff);
  env.set("MTPLX_PAGED_KV_QUANT", "q8");
  EXPECT_EQ(paged_kv_quant_mode_from_env(), PagedKVQuantMode::kQ8);
  env.set("MTPLX_VLLM_METAL_PAGED_KV_QUANT", " ");  // the seed takes a blank one as "off"
  EXPECT_EQ(paged_kv_quant_mode_from_env(), PagedKVQuantMode::kQ8);
  env.set("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q4");
  EXPECT_EQ(paged_kv_quant_mode_from_env(), PagedKVQuantMode::kQ4);
  env.set("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "off");
  EXPECT_EQ(paged_kv_quant_mode_from_env(), PagedKVQuantMode::kOff);
  env.set("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "junk");
  EXPECT_NE(error_of<std::invalid_argument>(paged_kv_quant_mode_from_env)
                .find("MTPLX_VLLM_METAL_PAGED_KV_QUANT=junk: "),
            std::string::npos);
}

}  // namespace
}  // namespace pagedkv
