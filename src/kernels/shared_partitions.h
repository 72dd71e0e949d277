// Partitions that several decoding sequences of a batch hold in the same pages: a prompt's beginning that a prefix cache
// or a fork gave to all of them. Equal page ids are what is looked at, for they alone say that the tokens are the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/visibility.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv {

class SharedPartitions {
 public:
  // Sequences members()[first_member, + num_members) and the partitions that all of them hold in the same pages.
  struct Run {
    int32_t first_member, num_members;
    int32_t first_partition, num_partitions;
    TokenRange range;  // what any member sees of them
  };

  // Finds the runs of `min_members` (at least 2) sequences or more. Sequences form a tree: where ten have eight
  // partitions in common and four of them another four, there is a run of ten and one of four. Memory grows only.
  //   Only sequences of one query row: several rows already share what a tile costs among themselves.
  //   Only whole partitions: one that is cut by the end of a sequence or of the common pages is each sequence's own.
  //   Only from the first page on that a window leaves, which must be equal too: sequences whose windows begin in
  // different pages are not compared. Then what a sequence shares is how its partitions begin, and no page that one
  // of them gave back is read for another.
  void find(const AttentionArgs& args, int min_members);

  std::span<const Run> runs() const noexcept { return runs_; }
  std::span<const int32_t> members() const noexcept { return members_; }
  // Partitions of a sequence that are in runs: its first ones.
  int num_shared(int sequence) const noexcept { return num_shared_[sequence]; }

 private:
  struct Candidate {
    int32_t sequence;
    int32_t first_partition,
        last_partition;  // [first, last): those with a visible token, the end whole
    TokenRange range;
  };
  struct Pages {
    int64_t first;
    std::span<const PageId> ids;
  };

  void find(std::span<Candidate> group, int level);
  void add(std::span<Candidate> group, int level);
  bool holds(const Candidate& c, int level) const noexcept;
  Pages pages(const Candidate& c, int level) const noexcept;
  bool same(const Candidate& a, const Candidate& b, int level) const noexcept;
  bool less(const Candidate& a, const Candidate& b, int level) const noexcept;

  const AttentionArgs* args_ = nullptr;  // during find()
  size_t min_members_ = 2;
  std::vector<Candidate> candidates_;
  std::vector<Run> runs_;
  std::vector<int32_t> members_;
  std::vector<int32_t> num_shared_;  // [num_seqs]
};

}  // namespace pagedkv
