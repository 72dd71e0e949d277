#include "pagedkv/core/batch_tables.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "pagedkv/base/error.h"

namespace pagedkv {
namespace {

std::span<const PageId> pages_of(const BlockTable& table, int group) {
  if (group < 0 || group >= table.num_groups())
    throw std::invalid_argument("layer group " + std::to_string(group) + ": must be in 0.." +
                                std::to_string(table.num_groups() - 1));
  return table.pages(group);
}

int32_t checked(int64_t count, const char* what) {
  if (count > std::numeric_limits<int32_t>::max())
    throw CapacityError(std::to_string(count) + " " + what + " of a batch: must be at most " +
                        std::to_string(std::numeric_limits<int32_t>::max()));
  return static_cast<int32_t>(count);
}

}  // namespace

CsrTables csr_tables(std::span<const BlockTable* const> tables, int group) {
  CsrTables out;
  out.indptr.reserve(tables.size() + 1);
  out.indptr.push_back(0);
  for (const BlockTable* table : tables) {
    const std::span<const PageId> all = pages_of(*table, group);
    const auto pages = all.subspan(static_cast<size_t>(table->num_passed(group)));
    out.indices.insert(out.indices.end(), pages.begin(), pages.end());
    out.indptr.push_back(checked(static_cast<int64_t>(out.indices.size()), "pages"));
    const int64_t before = (static_cast<int64_t>(all.size()) - 1) * table->page_size();
    out.last_page_len.push_back(
        pages.empty() ? 0 : checked(table->length() - before, "tokens of a page"));
  }
  return out;
}

DenseTables dense_tables(std::span<const BlockTable* const> tables, int group, PageId padding) {
  DenseTables out;
  for (const BlockTable* table : tables) {
    out.stride = std::max(out.stride, static_cast<int64_t>(pages_of(*table, group).size()));
    out.seq_lens.push_back(checked(table->length(), "tokens of a sequence"));
  }
  out.block_table.assign(tables.size() * static_cast<size_t>(out.stride), padding);
  for (size_t s = 0; s < tables.size(); ++s)
    std::ranges::copy(tables[s]->pages(group),
                      out.block_table.begin() + static_cast<std::ptrdiff_t>(s) * out.stride);
  return out;
}

}  // namespace pagedkv
