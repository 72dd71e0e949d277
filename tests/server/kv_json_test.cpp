#include "server/kv_json.h"

#include <gtest/gtest.h>

#include <regex>

namespace pagedkv {
namespace {

constexpr int32_t kFree = PagePool::kFreePage, kCached = PagePool::kCachedPage,
                  kNone = PagePool::kPageWithoutMemory;

std::vector<int32_t> read_runs(const std::string& runs) {
  static const std::regex kRun("(\\d*)([fcnh])(\\d*),?");
  std::vector<int32_t> map;
  for (std::sregex_iterator it(runs.begin(), runs.end(), kRun), end; it != end; ++it) {
    const std::string count = (*it)[1], state = (*it)[2], references = (*it)[3];
    const int32_t page = state == "f"         ? kFree
                         : state == "c"       ? kCached
                         : state == "n"       ? kNone
                         : references.empty() ? 1
                                              : std::stoi(references);
    map.insert(map.end(), count.empty() ? 1 : std::stoul(count), page);
  }
  return map;
}

TEST(KvJson, PagesAreRuns) {
  EXPECT_EQ(page_runs({}), "");
  const std::vector<int32_t> map = {1, 1, 1, 2, kCached, kCached, kFree, kNone, kNone, 17};
  EXPECT_EQ(page_runs(map), "3h,h2,2c,f,2n,h17");
  EXPECT_EQ(read_runs(page_runs(map)), map);
}

TEST(KvJson, AMapIsSmallAtItsWorstToo) {
  std::vector<int32_t> map(100'000, 1);
  EXPECT_EQ(page_runs(map), "100000h");
  for (size_t i = 0; i < map.size(); i += 2) map[i] = kCached;
  const std::string runs = page_runs(map);
  EXPECT_LE(runs.size(), 200'000u);
  EXPECT_EQ(read_runs(runs), map);
}

TEST(KvJson, SaltsAreToldApartAndNotTold) {
  EXPECT_TRUE(shown_salt("").is_null());
  const std::string a = shown_salt("tenant-a"), b = shown_salt("tenant-b");
  EXPECT_EQ(a.size(), 8u);
  EXPECT_NE(a, b);
  EXPECT_EQ(a, shown_salt("tenant-a").get<std::string>());
}

TEST(KvJson, EventsHaveVllmsMembers) {
  PagesStored stored;
  stored.block_hashes = {page_name(root_name(), std::vector<int32_t>{1, 2})};
  stored.token_ids = {1, 2};
  stored.block_size = 2;
  stored.extra_keys.salt = "tenant-a";
  const Json json = event_json(PageEvent(stored), 17);
  EXPECT_EQ(json["type"], "BlockStored");
  EXPECT_EQ(json["block_hashes"][0], hex(stored.block_hashes[0]));
  EXPECT_TRUE(json["parent_block_hash"].is_null());
  EXPECT_EQ(json["token_ids"], (std::vector<int>{1, 2}));
  EXPECT_EQ(json["medium"], "CPU");
  EXPECT_EQ(json["sequence"], 17);
  EXPECT_EQ(json.dump().find("tenant-a"), std::string::npos);
  EXPECT_EQ(event_json(
                PageEvent(PagesRemoved{stored.block_hashes, PageMedium::kCpu, RemovalReason::kTtl}),
                0)["reason"],
            "ttl");
  EXPECT_EQ(event_json(PageEvent(AllPagesCleared()), 0)["type"], "AllBlocksCleared");
  EXPECT_EQ(
      event_json(PageEvent(PageCopied{.group = 1, .from = 3, .to = 5, .num_tokens = 7}), 0)["to"],
      5);
}

}  // namespace
}  // namespace pagedkv
