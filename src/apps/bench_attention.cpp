#include "apps/bench_attention.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "pagedkv/core/block_table.h"
#include "pagedkv/kernels/attention.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {
namespace {

using Clock = std::chrono::steady_clock;

struct Heads {
  int query, kv;
};

Heads parse_heads(const std::string& text) {
  const auto number = [](const char* begin, const char* end) {
    int value = 0;
    const auto [stop, error] = std::from_chars(begin, end, value);
    return error == std::errc() && stop == end ? value : 0;
  };
  const size_t slash = std::min(text.find('/'), text.size());
  const char* const begin = text.data();
  const int query = number(begin, begin + slash);
  const int kv = slash < text.size() ? number(begin + slash + 1, begin + text.size()) : query;
  if (query < 1 || kv < 1 || query % kv != 0)
    throw std::invalid_argument("--heads " + text +
                                ": write query/kv heads, query a multiple of kv, as in 32/8");
  return {query, kv};
}

// Values in [-1, 1): what they are does not matter to the time.
void fill(std::vector<float>& x, uint32_t seed) {
  for (float& f : x)
    f = static_cast<float>((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
}

class Problem {
 public:
  explicit Problem(const AttentionBench& o)
      : o_(o),
        heads_(parse_heads(o.heads)),
        pool_(pool_options(o, heads_)),
        threads_(o.num_threads) {
    if (o.new_tokens > o.context)
      throw std::invalid_argument("--new-tokens " + std::to_string(o.new_tokens) + ": --context " +
                                  std::to_string(o.context) + " counts them");
    if (int64_t{o.num_seqs} * o.new_tokens > INT32_MAX)
      throw std::invalid_argument(std::to_string(rows()) + " queries in a call: must be at most " +
                                  std::to_string(INT32_MAX));
    for (int s = 0; s < o.num_seqs; ++s) {
      tables_.emplace_back(pool_);
      query_start_.push_back(s * o.new_tokens);
      seq_lens_.push_back(o.context);
    }
    query_start_.push_back(o.num_seqs * o.new_tokens);
    append();
    queries_.resize(rows() * row_floats());
    out_.resize(queries_.size());
    fill(queries_, 7);
    for (const BlockTable& table : tables_) {
      const auto pages = table.pages(0);
      block_table_.insert(block_table_.end(), pages.begin(), pages.end());
    }
    args_.queries = queries_.data();
    args_.out = out_.data();
    args_.pages = pool_.layer_pages(0);
    args_.num_q_heads = heads_.query;
    args_.num_seqs = o.num_seqs;
    args_.query_start = query_start_.data();
    args_.seq_lens = seq_lens_.data();
    args_.block_table = block_table_.data();
    args_.block_table_stride = static_cast<int64_t>(tables_[0].pages(0).size());
    args_.scale = 1.0f / std::sqrt(static_cast<float>(o.head_dim));
    plan_.prepare(args_, o.num_threads);
  }

  void attend() { pagedkv::attend(args_, plan_, threads_); }

  void check() const {
    for (int s = 0; s < o_.num_seqs; ++s)
      for (const int row : {query_start_[s], query_start_[s + 1] - 1}) check_row(s, row);
  }

  int64_t bytes() const {  // of K and V that the queries see, each once
    return int64_t{o_.num_seqs} * o_.context * pool_.bytes_per_token();
  }
  double flops() const {  // a multiply and an add for each element of K and of V
    const double first = o_.context - o_.new_tokens + 1.0;
    const double tokens = o_.num_seqs * o_.new_tokens * (first + o_.context) / 2;
    return 4.0 * o_.head_dim * heads_.query * tokens;
  }

 private:
  static PagePoolOptions pool_options(const AttentionBench& o, Heads heads) {
    PagePoolOptions p;
    p.groups = {{0, {{heads.kv, o.head_dim, o.head_dim, o.key_format, o.value_format}}}};
    p.page_size = o.page_size;
    const int64_t pages = (int64_t{o.context} + o.page_size - 1) / o.page_size * o.num_seqs;
    if (pages > INT32_MAX)
      throw std::invalid_argument(std::to_string(pages) + " pages: must be at most " +
                                  std::to_string(INT32_MAX));
    p.num_pages = static_cast<int32_t>(pages);
    p.dynamic = false;
    p.shuffle_seed = 1;
    return p;
  }
  int64_t rows() const noexcept { return int64_t{o_.num_seqs} * o_.new_tokens; }
  int64_t row_floats() const noexcept { return int64_t{heads_.query} * o_.head_dim; }

  void append() {
    constexpr int kRun = 256;
    std::vector<float> keys(static_cast<size_t>(kRun) * heads_.kv * o_.head_dim), values(keys);
    std::vector<int64_t> slots;
    fill(keys, 1);
    fill(values, 2);
    for (int first = 0; first < o_.context; first += kRun)
      for (BlockTable& table : tables_) {
        const int count = std::min(kRun, o_.context - first);
        table.append(count);
        slots.resize(count);
        table.slot_mapping(0, first, slots);
        StoreArgs args;
        args.keys = keys.data();
        args.values = values.data();
        args.pages = pool_.layer_pages(0);
        args.slot_mapping = slots.data();
        args.num_tokens = count;
        if (!store(args, threads_)) throw std::logic_error("a finite row was not stored");
      }
  }

  // The row alone, by the reference.
  void check_row(int sequence, int row) const {
    const KernelSet& reference = kernel_sets().back();
    const int32_t query_start[] = {0, 1};
    const int32_t seq_len = o_.context - (query_start_[sequence + 1] - row) + 1;
    std::vector<float> out(row_floats());
    AttentionArgs alone = args_;
    alone.queries += row * row_floats();
    alone.out = out.data();
    alone.num_seqs = 1;
    alone.query_start = query_start;
    alone.seq_lens = &seq_len;
    alone.block_table += sequence * args_.block_table_stride;
    AttentionPlan plan;
    ThreadPool one(1);
    plan.prepare(alone, 1);
    reference.attend(alone, plan.impl(), one);
    if (std::memcmp(out.data(), out_.data() + row * row_floats(), out.size() * sizeof(float)) != 0)
      throw std::runtime_error("row " + std::to_string(row) + " of kernel set " + kernels().name +
                               " differs from the reference");
  }

  const AttentionBench& o_;
  const Heads heads_;
  PagePool pool_;
  ThreadPool threads_;
  std::vector<BlockTable> tables_;
  std::vector<int32_t> query_start_, seq_lens_;
  std::vector<PageId> block_table_;
  std::vector<float> queries_, out_;
  AttentionArgs args_;
  AttentionPlan plan_;
};

std::string case_name(const AttentionBench& o) {
  const std::string k(page_format_name(o.key_format)), v(page_format_name(o.value_format));
  std::string name = o.heads;
  name.append(" x ").append(std::to_string(o.head_dim)).append(" ").append(k);
  if (v != k) name.append("/").append(v);
  name.append(", ").append(std::to_string(o.new_tokens)).append(" of ");
  name.append(std::to_string(o.context));
  if (o.num_seqs > 1) name.append(" x ").append(std::to_string(o.num_seqs));
  return name;
}

}  // namespace

nlohmann::ordered_json bench_attention(const AttentionBench& o) {
  kernels();  // a bad PAGEDKV_KERNELS is told before anything else
  check_head_dim(o.key_format, o.head_dim);
  check_head_dim(o.value_format, o.head_dim);
  Problem problem(o);
  problem.attend();
  problem.check();
  std::vector<double> ms;
  for (int i = 0; i < o.repetitions; ++i) {
    const auto start = Clock::now();
    problem.attend();
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::vector<double> sorted = ms;
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[sorted.size() / 2];
  return {{"case", case_name(o)},
          {"kernel_set", kernels().name},
          {"threads", o.num_threads},
          {"ms", median},
          {"gb_s", 1e-6 * static_cast<double>(problem.bytes()) / median},
          {"gflop_s", 1e-6 * problem.flops() / median},
          {"bytes", problem.bytes()},
          {"flops", static_cast<int64_t>(problem.flops())},
          {"block_size", o.page_size},
          {"checked", true},
          {"samples_ms", ms}};
}

}  // namespace pagedkv::apps
