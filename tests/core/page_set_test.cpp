#include "core/page_set.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/pool_testing.h"

namespace pagedkv {
namespace {

// The model is std::set.
class RandomPageSet : public ::testing::TestWithParam<int64_t> {};

TEST_P(RandomPageSet, FindsTheNearestMember) {
  const int64_t most = GetParam();
  PageSet set(most);
  std::set<int64_t> model;
  std::mt19937_64 random(3);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  int64_t num_pages = 0;
  for (int round = testing::scaled(20000); round > 0; --round) {
    int64_t page = num_pages > 0 ? below(num_pages) : 0;
    if (below(200) == 0) {
      num_pages = below(most + 1);
      while (!model.empty() && *model.rbegin() >= num_pages) {
        set.erase(*model.rbegin());
        model.erase(*model.rbegin());
      }
      set.reserve(num_pages);
      set.resize(num_pages);
      page = 0;
    } else if (num_pages > 0 && model.insert(page).second) {
      set.insert(page);
    } else if (num_pages > 0) {
      set.erase(page);
      model.erase(page);
    }
    const int64_t from = below(most + 2) - 1;
    const auto after = model.lower_bound(from), beyond = model.upper_bound(from);
    ASSERT_EQ(set.at_or_after(from), after == model.end() ? -1 : *after);
    ASSERT_EQ(set.at_or_before(from), beyond == model.begin() ? -1 : *std::prev(beyond));
    ASSERT_EQ(set.lowest(), model.empty() ? -1 : *model.begin());
    ASSERT_EQ(set.size(), static_cast<int64_t>(model.size()));
    ASSERT_EQ(set.empty(), model.empty());
    ASSERT_EQ(num_pages > 0 && set.contains(page), model.contains(page));
    ASSERT_TRUE(round % 100 != 0 || set.is_consistent());
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RandomPageSet,
                         ::testing::Values(1, 63, 64, 65, 4096, 4097, 300000));

}  // namespace
}  // namespace pagedkv
