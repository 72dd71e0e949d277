#include "kernels/attention_plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "base/page_codec.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv {
namespace {

// Query rows (times heads) of a tile job: the states and scores of 128 rows fit a 1 MB L2 (64 costs 2-8 %, 256 gains
// 2 %). Smaller only where workers would stand idle.
constexpr int kTileRows = 128;
constexpr int kMinTileRows = 16;
// Enough items that the slowest worker ends within an eighth of the others.
constexpr int kItemsPerWorker = 8;
// Fewer than this and kv heads are cut apart too. That is dear where memory is read: an item without all heads of a page
// reads it in strips (SmolLM2 at 7,168 tokens, 2 threads: 19.5 ms a token instead of 14.0).
constexpr int kMinItemsPerWorker = 2;
// Decoding sequences that must share a partition, for it to be worth a tile: two to three read it faster each for itself.
// Time of each for itself / together, 4,096 f16 tokens in memory, 32/8 x 128: four 1.25 on AVX-512, 0.93 on AVX2;
// eight 1.36, 1.05; sixteen 1.44, 1.07. 32/32 x 128: three 1.3, 1.1. Where a lone sequence takes tiles, two gain.
constexpr int kMinSharing = 4;
// Rows x tokens below which an item is not worth another: some 25 us at head_dim 128.
constexpr int64_t kMinItemCost = 4096;

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("attention: " + text);
}

std::string str(int64_t value) { return std::to_string(value); }

void check_layout(const AttentionArgs& args) {
  const LayerPages& p = args.pages;
  check_head_dim(p.keys.format, p.keys.head_dim);
  check_head_dim(p.values.format, p.values.head_dim);
  if (p.page_size < 1 || p.page_size > 256)
    fail("page_size " + str(p.page_size) + ": must be in 1..256");
  if (p.num_kv_heads < 1) fail("num_kv_heads " + str(p.num_kv_heads) + ": must be at least 1");
  if (args.num_q_heads < 1 || args.num_q_heads % p.num_kv_heads != 0)
    fail("num_q_heads " + str(args.num_q_heads) + ": must be a multiple of num_kv_heads " +
         str(p.num_kv_heads));
  if (!std::isfinite(args.scale)) fail("scale is not finite");
  if (!(args.logit_softcap >= 0) || !std::isfinite(args.logit_softcap))
    fail("logit_softcap " + std::to_string(args.logit_softcap) +
         ": must be finite and not negative");
  if (args.sliding_window < 0)
    fail("sliding_window " + str(args.sliding_window) + ": must not be negative");
}

void check_sequences(const AttentionArgs& args) {
  if (args.num_seqs < 0) fail("num_seqs " + str(args.num_seqs) + ": must not be negative");
  if (!args.query_start) fail("query_start is null");
  if (args.query_start[0] != 0)
    fail("query_start[0] is " + str(args.query_start[0]) + ": must be 0");
  if (args.num_seqs > 0 && !args.seq_lens) fail("seq_lens is null");
  int64_t longest = 0;
  for (int s = 0; s < args.num_seqs; ++s) {
    const int64_t query_len = int64_t{args.query_start[s + 1]} - args.query_start[s];
    const int64_t seq_len = args.seq_lens[s];
    if (query_len < 0) fail("query_start falls at sequence " + str(s));
    if (seq_len < 0) fail("seq_lens[" + str(s) + "] is " + str(seq_len) + ": must not be negative");
    if (seq_len > 0 && query_len > seq_len)
      fail("sequence " + str(s) + " has " + str(query_len) + " query rows but holds " +
           str(seq_len) + " tokens: rows are its newest tokens");
    longest = std::max(longest, seq_len);
  }
  const int64_t pages = (longest + args.pages.page_size - 1) / args.pages.page_size;
  if (longest > 0 && !args.block_table) fail("block_table is null");
  if (args.block_table_stride < pages)
    fail("block_table_stride " + str(args.block_table_stride) + ": a sequence of " + str(longest) +
         " tokens needs " + str(pages) + " pages");
  if (args.mask && args.mask_stride < longest)
    fail("mask_stride " + str(args.mask_stride) + ": the longest sequence holds " + str(longest) +
         " tokens");
  if (args.bias && args.bias_stride < longest)
    fail("bias_stride " + str(args.bias_stride) + ": the longest sequence holds " + str(longest) +
         " tokens");
}

int lanes_of(const PageArray& pages) {
  return with_page_format(pages.format,
                          [&](auto format) { return decltype(format)::num_lanes(pages.head_dim); });
}

// Whether whole registers may be read straight from the pages. What lies behind a short row meets queries of zero or lands
// in lanes that nobody reads: codes are finite whatever the bytes are, floats need not be.
bool fills_lanes(const PageArray& pages, int lanes) {
  return lanes == pages.head_dim || has_scales(pages.format);
}

}  // namespace

AttentionPlan::AttentionPlan() : impl_(std::make_unique<Impl>()) {}
AttentionPlan::~AttentionPlan() = default;
AttentionPlan::AttentionPlan(AttentionPlan&&) noexcept = default;
AttentionPlan& AttentionPlan::operator=(AttentionPlan&&) noexcept = default;

int64_t AttentionPlan::num_items() const noexcept {
  return static_cast<int64_t>(impl_->items.size());
}

void AttentionPlan::prepare(const AttentionArgs& args, int num_workers) {
  kernels();  // a bad PAGEDKV_KERNELS shows here: attend() cannot throw
  if (num_workers < 1) fail("num_workers " + str(num_workers) + ": must be at least 1");
  check_layout(args);
  check_sequences(args);
  Impl& p = *impl_;
  p.num_workers = num_workers;
  p.num_kv_heads = args.pages.num_kv_heads;
  p.queries_per_kv = args.num_q_heads / args.pages.num_kv_heads;
  p.key_lanes = lanes_of(args.pages.keys);
  p.value_lanes = lanes_of(args.pages.values);
  try {
    p.add_jobs(args);
    p.add_items();
    p.find_owners(args.num_seqs);
    p.size_buffers();
  } catch (...) {  // std::bad_alloc: parts of two plans are no plan
    p.items.clear();
    throw;
  }
}

void AttentionPlan::Impl::add_jobs(const AttentionArgs& args) {
  shared.find(args, decodes_direct(args) ? kMinSharing : 2);
  int tile_rows = kTileRows;
  for (;; tile_rows /= 2) {
    jobs.clear();
    int64_t most_items = 0;
    const int queries_per_tile = std::max(1, tile_rows / queries_per_kv);
    for (int s = 0; s < args.num_seqs; ++s) add_sequence(args, s, queries_per_tile);
    for (const SharedPartitions::Run& run : shared.runs()) add_shared(run, queries_per_tile);
    for (const Job& job : jobs)
      most_items += std::max(1, job.own_partitions()) * int64_t{job.num_heads};
    if (tile_rows <= kMinTileRows || num_workers == 1 ||
        most_items >= int64_t{num_workers} * kItemsPerWorker)
      return;
  }
}

bool AttentionPlan::Impl::decodes_direct(const AttentionArgs& args) const noexcept {
  return queries_per_kv <= kMaxDirectQueries && fills_lanes(args.pages.keys, key_lanes) &&
         fills_lanes(args.pages.values, value_lanes);
}

void AttentionPlan::Impl::add_sequence(const AttentionArgs& args, int sequence,
                                       int queries_per_tile) {
  const int query_len = args.query_start[sequence + 1] - args.query_start[sequence];
  const int64_t seq_len = args.seq_lens[sequence], first_position = seq_len - query_len;
  const bool direct = query_len == 1 && decodes_direct(args);
  const int heads = direct ? num_kv_heads : 1;
  for (int q = 0; q < query_len; q += queries_per_tile) {
    const int num_queries = std::min(queries_per_tile, query_len - q);
    // Ranges neither shrink nor move back from row to row.
    const TokenRange range{visible_range(args, seq_len, first_position + q).first,
                           visible_range(args, seq_len, first_position + q + num_queries - 1).last};
    const int from = static_cast<int>(range.first / kPartition);
    const int to =
        range.empty() ? from : static_cast<int>((range.last + kPartition - 1) / kPartition);
    for (int h = 0; h < num_kv_heads; h += heads)
      jobs.push_back({.sequence = sequence,
                      .first_query = q,
                      .num_queries = num_queries,
                      .first_head = h,
                      .num_heads = heads,
                      .first_partition = from,
                      .num_partitions = to - from,
                      .num_shared = shared.num_shared(sequence),
                      .range = range,
                      .direct = direct});
  }
}

void AttentionPlan::Impl::add_shared(const SharedPartitions::Run& run, int queries_per_tile) {
  const int jobs_per_head = (run.num_members - 1) / queries_per_tile + 1;
  for (int j = 0; j < jobs_per_head; ++j) {
    const int begin = run.num_members * j / jobs_per_head,
              end = run.num_members * (j + 1) / jobs_per_head;
    for (int h = 0; h < num_kv_heads; ++h)
      jobs.push_back({.sequence = shared.members()[run.first_member + begin],
                      .num_queries = end - begin,
                      .first_member = run.first_member + begin,
                      .first_head = h,
                      .num_heads = 1,
                      .first_partition = run.first_partition,
                      .num_partitions = run.num_partitions,
                      .range = run.range});
  }
}

int64_t AttentionPlan::Impl::cost(const Job& job) const noexcept {
  return int64_t{rows(job)} * std::max(1, job.own_partitions()) * kPartition;
}

void AttentionPlan::Impl::add_items() {
  items.clear();
  int64_t total = 0;
  for (const Job& job : jobs) total += cost(job);
  const int64_t target = num_workers == 1
                             ? INT64_MAX
                             : std::max(total / (num_workers * kItemsPerWorker), kMinItemCost);
  int64_t between_partitions = 0;
  for (const Job& job : jobs) between_partitions += chunks(job, target);
  const bool heads = between_partitions < int64_t{num_workers} * kMinItemsPerWorker;
  for (int32_t j = 0, n = static_cast<int32_t>(jobs.size()); j < n; ++j) split(j, target, heads);
  // Dearest first, so that the last items drawn are short; else in order, so that pages are read as they lie.
  std::sort(items.begin(), items.end(), [](const WorkItem& a, const WorkItem& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    return a.job != b.job ? a.job < b.job : a.first_partition < b.first_partition;
  });
}

int64_t AttentionPlan::Impl::pieces(const Job& job, int64_t target) const noexcept {
  return (cost(job) - 1) / target + 1;
}

// Runs of partitions to cut a job into, for items of about `target`.
int AttentionPlan::Impl::chunks(const Job& job, int64_t target) const noexcept {
  if (job.own_partitions() == 0 && job.num_shared > 0) return 0;
  return static_cast<int>(
      std::clamp<int64_t>(pieces(job, target), 1, std::max(1, job.own_partitions())));
}

// Cuts a job into items of about `target`: between partitions and, where `heads`, between kv heads too.
void AttentionPlan::Impl::split(int32_t job, int64_t target, bool heads) {
  const Job whole = jobs[job];
  const int chunks = this->chunks(whole, target);
  const int ranges = heads && chunks > 0
                         ? static_cast<int>(std::min<int64_t>(
                               (pieces(whole, target) - 1) / chunks + 1, whole.num_heads))
                         : 1;
  for (int r = 0; r < ranges; ++r) {
    const int32_t at = r == 0 ? job : static_cast<int32_t>(jobs.size());
    if (r > 0) jobs.push_back(whole);
    Job& part = jobs[at];
    const int from = whole.num_heads * r / ranges, to = whole.num_heads * (r + 1) / ranges;
    part.first_head = whole.first_head + from;
    part.num_heads = to - from;
    part.num_items = chunks;
    for (int c = 0; c < chunks; ++c) {
      const int begin = whole.own_partitions() * c / chunks,
                end = whole.own_partitions() * (c + 1) / chunks;
      add_item(at, whole.first_partition + whole.num_shared + begin, end - begin);
    }
  }
}

void AttentionPlan::Impl::find_owners(int num_seqs) {
  if (shared.runs().empty()) return;
  owners.resize(static_cast<size_t>(num_seqs) * num_kv_heads);
  for (int32_t j = 0, n = static_cast<int32_t>(jobs.size()); j < n; ++j)
    for (int h = 0; h < jobs[j].num_heads && !jobs[j].is_shared(); ++h)
      owners[int64_t{jobs[j].sequence} * num_kv_heads + jobs[j].first_head + h] = j;
  for (const Job& job : jobs)
    for (int m = 0; m < job.num_queries && job.is_shared(); ++m)
      jobs[owner(shared.members()[job.first_member + m], job.first_head)].num_items +=
          job.num_items;
}

void AttentionPlan::Impl::add_item(int32_t job, int partition, int count) {
  items.push_back({job, partition, count, int64_t{rows(jobs[job])} * std::max(1, count)});
}

void AttentionPlan::Impl::size_buffers() {
  items_left.clear();
  int64_t floats = 0;
  max_rows = max_heads = max_queries = 0;
  for (Job& job : jobs) {
    items_left.push_back(static_cast<uint32_t>(job.num_items));
    max_rows = std::max(max_rows, (rows(job) + 3) / 4 * 4);
    max_heads = std::max(max_heads, job.num_heads);
    max_queries = std::max(max_queries, job.num_queries);
    if (job.is_shared() || (job.num_items == 1 && job.num_shared == 0)) continue;
    job.partials = floats;
    floats += int64_t{job.num_partitions} * rows(job) * state_stride();
  }
  partials.reserve(floats);
  carve(nullptr, &scratch_floats);
  scratch.reserve(scratch_floats * num_workers);
}

WorkerScratch AttentionPlan::Impl::carve(float* base, int64_t* used) const noexcept {
  int64_t at = 0;
  auto take = [&](int64_t count) {
    float* const p = base ? base + at : nullptr;
    at += (count + 15) / 16 * 16;
    return p;
  };
  WorkerScratch s;
  s.queries = take(int64_t{max_rows} * key_lanes);
  s.scores = take(int64_t{max_rows} * kScoreStride);
  s.partial = take(int64_t{max_rows} * state_stride());
  s.total = take(int64_t{max_rows} * state_stride());
  s.tile = take(int64_t{kTile} * std::max(key_lanes, value_lanes));
  s.key_scales = take(int64_t{max_heads} * kScoreStride);
  s.value_scales = take(int64_t{max_heads} * kScoreStride);
  s.visible = reinterpret_cast<uint16_t*>(take(int64_t{max_queries} * kTilesPerPartition / 2));
  if (used) *used = at;
  return s;
}

WorkerScratch AttentionPlan::Impl::worker_scratch(int worker) const noexcept {
  return carve(scratch.data() + worker * scratch_floats, nullptr);
}

}  // namespace pagedkv
