#include "apps/attention_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace pagedkv::apps {
namespace {

int32_t as_int32(int64_t count, const char* what) {
  if (count > INT32_MAX)
    throw std::invalid_argument(std::to_string(count) + ' ' + what + ": must be at most " +
                                std::to_string(INT32_MAX));
  return static_cast<int32_t>(count);
}

AttentionCase with_copies(AttentionCase c) {
  c.copied = true;
  return c;
}

}  // namespace

PagePoolOptions pool_options(const AttentionCase& c) {
  const int64_t shared_pages = c.copied ? 0 : c.shared / c.page_size;
  int64_t pages = shared_pages;
  for (const SequenceLength& s : c.sequences)
    pages += (int64_t{s.seq_len} + c.page_size - 1) / c.page_size - shared_pages;
  PagePoolOptions p;
  p.groups = {{0, {{c.heads.kv, c.key_dim, c.value_dim, c.key_format, c.value_format}}}};
  p.page_size = c.page_size;
  p.num_pages = as_int32(pages, "pages");
  p.dynamic = false;
  p.shuffle_seed = 1;
  return p;
}

AttentionProblem::AttentionProblem(const AttentionCase& c, int num_threads)
    : case_(c), pool_(pool_options(c)), threads_(std::make_unique<ThreadPool>(num_threads)) {
  c.check_shared();
  const int64_t rows = as_int32(c.num_queries(), "queries in a call");
  int64_t stride = 0;
  for (const SequenceLength& s : c.sequences) {
    append(static_cast<int>(tables_.size()));
    query_start_.push_back(query_start_.back() + s.query_len);
    seq_lens_.push_back(s.seq_len);
    stride = std::max(stride, static_cast<int64_t>(tables_.back().pages(0).size()));
  }
  block_table_.resize(tables_.size() * stride);
  for (size_t s = 0; s < tables_.size(); ++s)
    std::ranges::copy(tables_[s].pages(0), block_table_.begin() + s * stride);
  queries_.resize(rows * c.heads.query * c.key_dim);
  out_.resize(rows * c.heads.query * c.value_dim);
  fill(queries_, 7);
  if (c.sinks) {
    sinks_.resize(c.heads.query);
    fill(sinks_, 8);
  }
  args_.queries = queries_.data();
  args_.out = out_.data();
  args_.pages = pool_.layer_pages(0);
  args_.num_q_heads = c.heads.query;
  args_.num_seqs = static_cast<int>(tables_.size());
  args_.query_start = query_start_.data();
  args_.seq_lens = seq_lens_.data();
  args_.block_table = block_table_.data();
  args_.block_table_stride = stride;
  args_.scale = 1.0f / std::sqrt(static_cast<float>(c.key_dim));
  args_.sliding_window = c.window;
  args_.logit_softcap = c.softcap;
  args_.sinks = c.sinks ? sinks_.data() : nullptr;
  plan_.prepare(args_, num_threads);
}

void AttentionProblem::append(int sequence) {
  constexpr int kRun = 256;
  const bool shares = sequence > 0 && !case_.copied;
  BlockTable& table = tables_.emplace_back(
      shares ? tables_[0].share_prefix(case_.shared / case_.page_size) : BlockTable(pool_));
  const int length = case_.sequences[sequence].seq_len;
  std::vector<float> keys(static_cast<size_t>(kRun) * case_.heads.kv * case_.key_dim);
  std::vector<float> values(static_cast<size_t>(kRun) * case_.heads.kv * case_.value_dim);
  std::vector<int64_t> slots;
  for (int first = static_cast<int>(table.length()), count; first < length; first += count) {
    const bool is_shared = first < case_.shared;
    count = std::min(kRun, (is_shared ? case_.shared : length) - first);
    // Other tokens in each run and, unless shared, sequence, so that a page read in another's place is noticed.
    const uint32_t seed = 2 * (static_cast<uint32_t>(length) * (is_shared ? 0 : sequence) + first);
    fill(keys, seed);
    fill(values, seed + 1);
    table.append(count);
    slots.resize(count);
    table.slot_mapping(0, first, slots);
    StoreArgs args;
    args.keys = keys.data();
    args.values = values.data();
    args.pages = pool_.layer_pages(0);
    args.slot_mapping = slots.data();
    args.num_tokens = count;
    if (!store(args, *threads_)) throw std::logic_error("a finite row was not stored");
  }
}

void AttentionProblem::use_threads(int num_threads) {
  if (num_threads == this->num_threads()) return;
  threads_ = std::make_unique<ThreadPool>(num_threads);
  plan_.prepare(args_, num_threads);
}

std::span<const float> AttentionProblem::run(const KernelSet& set) noexcept {
  set.attend(args_, plan_.impl(), *threads_);
  return out_;
}

void AttentionProblem::check(const KernelSet& set) {
  std::ranges::fill(out_, std::numeric_limits<float>::quiet_NaN());
  run(set);
  const int64_t row_floats = int64_t{case_.heads.query} * case_.value_dim;
  for (int s = 0; s < args_.num_seqs; ++s)
    for (const bool last : {false, true}) {
      const int row = last ? query_start_[s + 1] - 1 : query_start_[s];
      const size_t at = 2 * static_cast<size_t>(s) + last;
      if (at == expected_.size())
        expected_.push_back(last && row == query_start_[s] ? expected_.back()
                                                           : reference_row(s, row));
      if (std::memcmp(expected_[at].data(), out_.data() + row * row_floats,
                      row_floats * sizeof(float)) != 0)
        throw std::runtime_error("row " + std::to_string(row) + " of kernel set " + set.name +
                                 " differs from the reference");
    }
}

CallTimes AttentionProblem::time(const KernelSet& set, int runs) {
  return time_calls(runs, [&] { run(set); });
}

int64_t AttentionProblem::bytes() const { return case_.tokens_stored() * pool_.bytes_per_token(); }

// The row alone.
std::vector<float> AttentionProblem::reference_row(int sequence, int row) const {
  const int32_t query_start[] = {0, 1};
  const int32_t seq_len = seq_lens_[sequence] - (query_start_[sequence + 1] - row) + 1;
  std::vector<float> out(int64_t{case_.heads.query} * case_.value_dim);
  AttentionArgs alone = args_;
  alone.queries += int64_t{row} * case_.heads.query * case_.key_dim;
  alone.out = out.data();
  alone.num_seqs = 1;
  alone.query_start = query_start;
  alone.seq_lens = &seq_len;
  alone.block_table += sequence * args_.block_table_stride;
  AttentionPlan plan;
  ThreadPool one(1);
  plan.prepare(alone, 1);
  kernel_sets().back().attend(alone, plan.impl(), one);
  return out;
}

SharingProblem::SharingProblem(const AttentionCase& c, int num_threads)
    : shared_(c, num_threads), copied_(with_copies(c), num_threads) {}

void SharingProblem::use_threads(int num_threads) {
  shared_.use_threads(num_threads);
  copied_.use_threads(num_threads);
}

void SharingProblem::check(const KernelSet& set) {
  shared_.check(set);
  const std::span<const float> out = shared_.run(set), expected = copied_.run(set);
  if (std::memcmp(out.data(), expected.data(), out.size_bytes()) != 0)
    throw std::runtime_error(std::string("kernel set ") + set.name +
                             ": shared pages give other bits than copies of them");
}

PairTimes SharingProblem::time(const KernelSet& set, int runs) {
  return time_pairs(runs, [&] { copied_.run(set); }, [&] { shared_.run(set); });
}

}  // namespace pagedkv::apps
