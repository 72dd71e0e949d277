#include "pagedkv/core/batch_tables.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "core/pool_testing.h"

namespace pagedkv {
namespace {

using testing::options;

class BatchTables : public ::testing::Test {
 protected:
  BatchTables() : pool(options(16, 4)), a(pool), b(pool), c(pool) {
    a.append(9);
    c.append(8);
  }
  std::vector<const BlockTable*> all() const { return {&a, &b, &c}; }
  PagePool pool;
  BlockTable a, b, c;  // of 9, 0 and 8 tokens in pages of 4
};

TEST_F(BatchTables, CsrNamesEachSequencesPagesOnceAndItsLastPagesTokens) {
  const CsrTables csr = csr_tables(all());
  EXPECT_EQ(csr.indptr, (std::vector<int32_t>{0, 3, 3, 5}));
  EXPECT_EQ(csr.last_page_len, (std::vector<int32_t>{1, 0, 4}));
  std::vector<PageId> pages(a.pages(0).begin(), a.pages(0).end());
  pages.insert(pages.end(), c.pages(0).begin(), c.pages(0).end());
  EXPECT_EQ(csr.indices, pages);
  for (size_t s : {size_t{0}, size_t{2}})  // FlashInfer's length
    EXPECT_EQ(4 * (csr.indptr[s + 1] - csr.indptr[s] - 1) + csr.last_page_len[s],
              all()[s]->length());
}

TEST_F(BatchTables, DensePadsRowsToTheLongest) {
  const DenseTables dense = dense_tables(all(), 0, -1);
  EXPECT_EQ(dense.stride, 3);
  EXPECT_EQ(dense.seq_lens, (std::vector<int32_t>{9, 0, 8}));
  const auto p = a.pages(0), q = c.pages(0);
  EXPECT_EQ(dense.block_table, (std::vector<PageId>{p[0], p[1], p[2], -1, -1, -1, q[0], q[1], -1}));
}

TEST(WindowTables, DenseShowsWhatWasGivenBackAndCsrBeginsBehindIt) {
  PagePool pool(options(16, 4, testing::group(1, testing::layer(1, 32), 5)));
  BlockTable a(pool), b(pool);
  a.append(14);
  b.append(3);
  ASSERT_EQ(a.release_passed(), 2);  // the next token sees 10..14
  const std::vector<const BlockTable*> all = {&a, &b};
  const auto p = a.pages(0), q = b.pages(0);
  EXPECT_EQ(dense_tables(all).block_table,
            (std::vector<PageId>{kNoPage, kNoPage, p[2], p[3], q[0], 0, 0, 0}));
  const CsrTables csr = csr_tables(all);
  EXPECT_EQ(csr.indptr, (std::vector<int32_t>{0, 2, 3}));
  EXPECT_EQ(csr.indices, (std::vector<PageId>{p[2], p[3], q[0]}));
  EXPECT_EQ(csr.last_page_len, (std::vector<int32_t>{2, 3}));
}

TEST_F(BatchTables, ABatchOfNothingHasOneBound) {
  EXPECT_EQ(csr_tables({}).indptr, std::vector<int32_t>{0});
  EXPECT_EQ(dense_tables({}).stride, 0);
}

TEST_F(BatchTables, GroupsThatAreNotThereAreRefused) {
  EXPECT_THROW(csr_tables(all(), 1), std::invalid_argument);
  EXPECT_THROW(dense_tables(all(), -1), std::invalid_argument);
}

}  // namespace
}  // namespace pagedkv
