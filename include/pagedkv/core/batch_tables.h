// The block tables of a batch in the two forms that attention kernels of the field read. Both name pages of one
// layer group, in the order of the sequences.
//
// Source: FlashInfer 0.7 (paged KV table, CSR) and vLLM 0.32 (block_table, seq_lens).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagedkv/core/block_table.h"

namespace [[gnu::visibility("default")]] pagedkv {

// FlashInfer's: sequence s has pages indices[indptr[s] .. indptr[s + 1]), the last of them holding
// last_page_len[s] tokens, so that its length is page_size * (pages - 1) + last_page_len[s]. A sequence
// without a token has no page and last_page_len 0. Pages that a window has given back are left out, so that the
// sequence begins with the first page that is there: causality and windows (window_left) count from the end, where
// nothing has changed.
struct CsrTables {
  std::vector<int32_t> indptr;         // [num_seqs + 1]
  std::vector<PageId> indices;         // [indptr[num_seqs]]
  std::vector<int32_t> last_page_len;  // [num_seqs], 1..page_size where there is a page
};

// vLLM's: row s of block_table has ceil(seq_lens[s] / page_size) entries, then padding. The first ones are kNoPage
// where a window has given them back.
struct DenseTables {
  std::vector<PageId> block_table;  // [num_seqs, stride]
  std::vector<int32_t> seq_lens;    // [num_seqs] tokens
  int64_t stride = 0;               // the most pages that a sequence has
};

// Both throw std::invalid_argument when `group` is not one of the tables', CapacityError when a count does not fit
// int32.
CsrTables csr_tables(std::span<const BlockTable* const> tables, int group = 0);
DenseTables dense_tables(std::span<const BlockTable* const> tables, int group = 0,
                         PageId padding = 0);

}  // namespace pagedkv
