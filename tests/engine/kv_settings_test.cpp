#include "engine/kv_settings.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "engine/threads.h"
#include "models/toy/toy_model.h"

namespace pagedkv {
namespace {

TEST(KvSettings, ContextIsTheModelsUnlessASmallerOneIsAsked) {
  const auto model = make_toy_model({.context_length = 1000});
  KvSettings s;
  EXPECT_EQ(context_tokens(model->info(), s), 1000);
  s.context = 10;
  EXPECT_EQ(context_tokens(model->info(), s), 10);
  s.context = 1001;
  EXPECT_THROW(context_tokens(model->info(), s), std::invalid_argument);
}

TEST(KvSettings, AContextWindowIsACeilingNotADemand) {
  const auto model = make_toy_model({.context_length = 1000});
  KvSettings s;
  s.context_window = 600;
  EXPECT_EQ(context_tokens(model->info(), s), 600);
  s.context_window = 5000;
  EXPECT_EQ(context_tokens(model->info(), s), 1000);
  s.context = 700;
  s.context_window = 600;
  EXPECT_EQ(context_tokens(model->info(), s), 700);
}

TEST(KvSettings, AGivenWindowReplacesTheModels) {
  const auto model = make_toy_model({.sliding_window = 32});
  KvSettings s;
  s.sliding_window = 8;
  for (const auto& group : pool_options(model->info(), s).groups)
    EXPECT_EQ(group.sliding_window, 8);
  s.sliding_window = 0;
  for (const auto& group : pool_options(model->info(), s).groups)
    EXPECT_EQ(group.sliding_window, 0);
}

TEST(KvSettings, BeginsWithNoMorePagesThanTheContextNeeds) {
  const auto model = make_toy_model({.context_length = 1000});
  KvSettings s;
  EXPECT_EQ(pool_options(model->info(), s).num_pages, 63);
  s.num_pages = 7;
  EXPECT_EQ(pool_options(model->info(), s).num_pages, 7);
}

TEST(KvSettings, FormatsOfKeysAndValuesMayDiffer) {
  const auto model = make_toy_model({.sliding_window = 32});
  KvSettings s;
  s.value_format = PageFormat::kQ8;
  for (const auto& group : pool_options(model->info(), s).groups) {
    EXPECT_EQ(group.layers[0].key_format, PageFormat::kF16);
    EXPECT_EQ(group.layers[0].value_format, PageFormat::kQ8);
  }
  EXPECT_EQ(format_label(s), "k=f16,v=q8");
}

TEST(Threads, DefaultStaysWithinTheUsableCores) {
  EXPECT_GE(default_num_threads(), 1);
  EXPECT_LE(default_num_threads(), usable_cores());
}

}  // namespace
}  // namespace pagedkv
