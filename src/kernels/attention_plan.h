// The work list that all fast kernel sets share: which rows, heads and tokens one item covers, where its partial results
// go, and who merges them. How work is cut never changes a bit: partitions are fixed by the sequence, every partition's
// result is kept apart, and merging goes left to right.
//
// A job is a set of query rows of one sequence and the kv heads they share. One item does a whole job, or several items
// share its partitions; then each leaves the partial states in memory, counts the job down when it is done, and
// the one that comes last merges and writes the rows. It also sets the count back, so the plan serves the next layer.
//
// Pages that several decoding sequences hold in common are read once: a shared job has one kv head's rows of all of them
// and the partitions they share (shared_partitions.h). It writes no rows: each of its items leaves, for every sequence,
// the states that the sequence's own job would have computed, and counts that job down.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kernels/arithmetic.h"
#include "kernels/shared_partitions.h"
#include "kernels/visibility.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv {

// Grow-only floats at a cache line's start.
class FloatBuffer {
 public:
  float* data() const noexcept { return data_.get(); }
  void reserve(int64_t count) {
    if (count <= capacity_) return;
    data_.reset(new (std::align_val_t{64}) float[static_cast<size_t>(count)]);
    capacity_ = count;
  }

 private:
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<float[], Free> data_;
  int64_t capacity_ = 0;
};

struct Job {
  int32_t sequence;  // whose block table is read
  // Query rows, counted within the sequence. Of a shared job: the one row of each sequence from
  // shared.members()[first_member] on.
  int32_t first_query = 0, num_queries;
  int32_t first_member = -1;
  int32_t first_head, num_heads;  // kv heads; 1 unless direct
  // Those with a token that some row may see (array mask aside). The first num_shared are left to shared jobs.
  int32_t first_partition, num_partitions;
  int32_t num_shared = 0;
  TokenRange range;       // what any row may look at
  bool direct = false;    // one query row, read straight from the pages: see cpu/attention.cpp
  int32_t num_items = 1;  // that leave states for this job; of a shared job: its own items
  // First float of those states, [num_partitions, rows, state_stride]; -1: none are kept.
  int64_t partials = -1;

  bool is_shared() const noexcept { return first_member >= 0; }
  int32_t own_partitions() const noexcept { return num_partitions - num_shared; }
};

struct WorkItem {
  int32_t job;
  int32_t first_partition, num_partitions;
  int64_t cost;
};

// Each row of a partial or total state is value_lanes floats of sum(p v), then the maximum and the sum of p. A sum of 0:
// no token was seen. The stride is no power of two, so that rows do not meet in one cache set.
constexpr int kStateTail = 16;
// Rows of scores likewise.
constexpr int kScoreStride = kPartition + 16;
// More query heads a kv head than this are worth decoding a tile to floats first: at 12 direct is 25 % faster in f16 and q8 and
// equal in q4, at 16 equal and 7 % slower (head_dim 128, 16k tokens, Xeon).
constexpr int kMaxDirectQueries = 12;

// One worker's memory, all 64-byte aligned. rows: (query row, query head) pairs of a job, padded to whole blocks of 4.
struct WorkerScratch {
  float* queries;       // [rows, key_lanes] scaled, in storage order
  float* scores;        // [rows, kScoreStride]
  float* partial;       // [rows, value_lanes + kStateTail]
  float* total;         // [rows, value_lanes + kStateTail]
  float* tile;          // [kTile, max(key_lanes, value_lanes)]
  float* key_scales;    // [heads, kScoreStride]
  float* value_scales;  // [heads, kScoreStride]
  uint16_t* visible;    // [query rows, kTilesPerPartition]
};

struct AttentionPlan::Impl {
  std::vector<Job> jobs;
  std::vector<WorkItem> items;
  std::vector<uint32_t> items_left;  // [jobs], counted down through atomic_ref
  SharedPartitions shared;
  std::vector<int32_t> owners;  // [num_seqs, num_kv_heads] the jobs of sequences in shared jobs
  FloatBuffer partials;
  FloatBuffer scratch;

  int num_workers = 0;
  int num_kv_heads = 0, queries_per_kv = 0;
  int key_lanes = 0, value_lanes = 0;  // of a row, padded
  int max_rows = 0, max_heads = 0, max_queries = 0;
  int64_t scratch_floats = 0;  // of one worker

  int state_stride() const noexcept { return value_lanes + kStateTail; }
  int rows(const Job& job) const noexcept {
    return job.num_queries * job.num_heads * queries_per_kv;
  }
  float* partial_state(const Job& job, int partition) const noexcept {
    return partials.data() + job.partials +
           int64_t{partition - job.first_partition} * rows(job) * state_stride();
  }
  WorkerScratch worker_scratch(int worker) const noexcept;
  // The job that has a kv head's rows of a sequence in a shared job.
  int32_t owner(int sequence, int head) const noexcept {
    return owners[int64_t{sequence} * num_kv_heads + head];
  }

  // Counts a job's item as done. True for the last of them, which then sees what the others wrote.
  bool finish_item(int32_t job) noexcept {
    const std::atomic_ref<uint32_t> left(items_left[job]);
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    left.store(static_cast<uint32_t>(jobs[job].num_items), std::memory_order_relaxed);
    return true;
  }

 private:
  friend class AttentionPlan;
  WorkerScratch carve(float* base, int64_t* used) const noexcept;
  void add_jobs(const AttentionArgs& args);
  bool decodes_direct(const AttentionArgs& args) const noexcept;
  void add_sequence(const AttentionArgs& args, int sequence, int queries_per_tile);
  void add_shared(const SharedPartitions::Run& run, int queries_per_tile);
  void add_items();
  void find_owners(int num_seqs);
  int64_t pieces(const Job& job, int64_t target) const noexcept;
  int chunks(const Job& job, int64_t target) const noexcept;
  void split(int32_t job, int64_t target, bool heads);
  int64_t cost(const Job& job) const noexcept;
  void add_item(int32_t job, int partition, int count);
  void size_buffers();
};

}  // namespace pagedkv
