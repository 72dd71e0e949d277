#include "kernels/shared_partitions.h"

#include <algorithm>

namespace pagedkv {

// One sort by the ids of the first partition, which differ at the first one where nothing is shared; after that each
// partition of a group is compared once with its first member's, and sorted again where the group falls apart.
void SharedPartitions::find(const AttentionArgs& args, int min_members) {
  args_ = &args;
  min_members_ = static_cast<size_t>(min_members);
  runs_.clear();
  members_.clear();
  candidates_.clear();
  num_shared_.assign(static_cast<size_t>(args.num_seqs), 0);
  for (int32_t s = 0; s < args.num_seqs; ++s) {
    if (args.query_start[s + 1] - args.query_start[s] != 1) continue;
    const int64_t seq_len = args.seq_lens[s];
    const TokenRange range = visible_range(args, seq_len, seq_len - 1);
    candidates_.push_back({s, static_cast<int32_t>(range.first / kPartition),
                           static_cast<int32_t>(range.last / kPartition), range});
  }
  find(candidates_, 0);
}

// Splits a group by the pages of each member's partition number `level`, counted from its first visible one.
void SharedPartitions::find(std::span<Candidate> group, int level) {
  const auto end = std::partition(group.begin(), group.end(),
                                  [&](const Candidate& c) { return holds(c, level); });
  std::sort(group.begin(), end,
            [&](const Candidate& a, const Candidate& b) { return less(a, b, level); });
  for (auto at = group.begin(); at != end;) {
    const auto next =
        std::find_if(at + 1, end, [&](const Candidate& c) { return !same(*at, c, level); });
    add({at, next}, level);
    at = next;
  }
}

// A group whose members have partition `level` in common: a run as long as they have the next ones too.
void SharedPartitions::add(std::span<Candidate> group, int level) {
  if (group.size() < min_members_) return;
  int end = level + 1;
  while (std::all_of(group.begin(), group.end(),
                     [&](const Candidate& c) { return holds(c, end) && same(group[0], c, end); }))
    ++end;
  const int32_t first = group[0].first_partition;
  Run run{static_cast<int32_t>(members_.size()),
          static_cast<int32_t>(group.size()),
          first + level,
          end - level,
          {group[0].range.first, int64_t{first + end} * kPartition}};
  for (const Candidate& c : group) {
    run.range.first = std::min(run.range.first, c.range.first);
    members_.push_back(c.sequence);
    num_shared_[c.sequence] = end;
  }
  runs_.push_back(run);
  find(group, end);
}

bool SharedPartitions::holds(const Candidate& c, int level) const noexcept {
  return c.first_partition + level < c.last_partition;
}

SharedPartitions::Pages SharedPartitions::pages(const Candidate& c, int level) const noexcept {
  const int64_t page_size = args_->pages.page_size,
                token = int64_t{c.first_partition + level} * kPartition,
                first = std::max(token, c.range.first) / page_size,
                last = (token + kPartition - 1) / page_size + 1;
  return {first,
          {args_->block_table + c.sequence * args_->block_table_stride + first,
           static_cast<size_t>(last - first)}};
}

bool SharedPartitions::same(const Candidate& a, const Candidate& b, int level) const noexcept {
  const Pages x = pages(a, level), y = pages(b, level);
  return x.first == y.first && std::equal(x.ids.begin(), x.ids.end(), y.ids.begin(), y.ids.end());
}

bool SharedPartitions::less(const Candidate& a, const Candidate& b, int level) const noexcept {
  const Pages x = pages(a, level), y = pages(b, level);
  if (x.first != y.first) return x.first < y.first;
  return std::lexicographical_compare(x.ids.begin(), x.ids.end(), y.ids.begin(), y.ids.end());
}

}  // namespace pagedkv
