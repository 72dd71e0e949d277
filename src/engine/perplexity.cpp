#include "engine/perplexity.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "pagedkv/base/executor.h"

namespace pagedkv {
namespace {

// Vocabularies of 262,144 entries exist: a row of logits is 1 MiB, and a step holds two of each.
constexpr size_t kMostLogitBytes = size_t{256} << 20;

// A row of logits, read once.
struct Row {
  int32_t top = 0;  // the largest logit; of equal ones the first
  double log_norm =
      0;  // log of the sum of the exponentials; NaN where a logit is, or where all are infinite
};

Row read_row(std::span<const float> logits) {
  Row row;
  for (size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[row.top]) row.top = static_cast<int32_t>(i);
  const double max = logits[row.top];
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - max);
  row.log_norm = max + std::log(sum);
  return row;
}

// KL(base || other), summed in index order. Logits of minus infinity are probabilities of 0.
double divergence(std::span<const float> base, const Row& base_row, std::span<const float> other,
                  const Row& other_row) {
  double sum = 0;
  for (size_t i = 0; i < base.size(); ++i) {
    const double log_p = base[i] - base_row.log_norm;
    const double p = std::exp(log_p);
    if (p > 0) sum += p * (log_p - (other[i] - other_row.log_norm));
  }
  return sum;
}

struct MeanAndError {
  double mean = 0, error = 0;
};

// As llama-perplexity: from the sums of values and squares, in order.
MeanAndError mean_and_error(const std::vector<double>& values) {
  const auto count = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const double x : values) sum += x, squares += x * x;
  const double mean = sum / count;
  const double variance = squares / count - mean * mean;
  return {mean, variance > 0 ? std::sqrt(variance / (count - 1)) : 0};
}

// Between the two values nearest to the place, linearly.
double percentile(const std::vector<double>& sorted, double fraction) {
  const double place = fraction * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(place);
  const double part = place - static_cast<double>(below);
  return (1 - part) * sorted[below] + part * sorted[std::min(below + 1, sorted.size() - 1)];
}

// What is known of the scored tokens with one pool's pages, in the text's order.
struct Scores {
  std::vector<double> nll, kl;  // negative log-likelihood; divergence from the first pool's
  std::vector<uint8_t> same_top;

  PerplexityResult result() const {
    PerplexityResult r;
    const auto [mean, error] = mean_and_error(nll);
    r.perplexity = std::exp(mean);
    r.perplexity_error = error * r.perplexity;
    const auto [kl_mean, kl_error] = mean_and_error(kl);
    r.kl_mean = kl_mean;
    r.kl_mean_error = kl_error;
    auto sorted = kl;
    std::ranges::sort(sorted);
    r.kl_p99 = percentile(sorted, 0.99);
    r.kl_max = sorted.back();
    r.same_top = static_cast<double>(std::ranges::count(same_top, uint8_t{1})) /
                 static_cast<double>(same_top.size());
    return r;
  }
};

void check(const PerplexityOptions& o, const ModelInfo& info, std::span<const int32_t> tokens,
           size_t num_pools) {
  const auto fail = [](const std::string& text) { throw std::invalid_argument(text); };
  if (num_pools == 0) fail("perplexity: no page pool");
  if (o.context < 3)
    fail("context " + std::to_string(o.context) +
         ": must be at least 3, since the second half of a chunk is scored");
  if (o.context > info.context_length)
    fail("context " + std::to_string(o.context) + ": the model's limit is " +
         std::to_string(info.context_length) + " tokens");
  if (o.max_chunks == 0 || o.max_chunks < -1)
    fail("chunks " + std::to_string(o.max_chunks) + ": must be at least 1, or -1 for all");
  if (static_cast<int64_t>(tokens.size()) < o.context)
    fail("the text has " + std::to_string(tokens.size()) + " tokens, one chunk needs " +
         std::to_string(o.context) + ": take a longer text or a smaller context");
}

class Measurement {
 public:
  Measurement(Model& model, std::span<PagePool* const> pools, const PerplexityOptions& options)
      : model_(model),
        pools_(pools),
        options_(options),
        vocab_(static_cast<size_t>(model.info().vocab_size)),
        // The last token of a chunk is scored but predicts nothing: it need not be computed.
        num_inputs_(options.context - 1),
        first_scoring_(options.context / 2),
        step_tokens_(
            std::clamp<int64_t>(static_cast<int64_t>(kMostLogitBytes / (vocab_ * sizeof(float))), 1,
                                model.max_step_tokens())),
        threads_(options.num_threads),
        scores_(pools.size()) {
    for (PagePool* pool : pools) tables_.emplace_back(*pool, options.context);
  }

  PerplexityReport run(std::span<const int32_t> tokens) {
    PerplexityReport report;
    report.chunks = static_cast<int64_t>(tokens.size()) / options_.context;
    if (options_.max_chunks > 0) report.chunks = std::min(report.chunks, options_.max_chunks);
    const auto total =
        static_cast<double>(report.chunks * num_inputs_ * static_cast<int64_t>(pools_.size()));
    for (int64_t c = 0; c < report.chunks; ++c)
      run_chunk(tokens.subspan(c * options_.context, options_.context), total);
    report.scored = static_cast<int64_t>(scores_[0].nll.size());
    for (const Scores& s : scores_) report.results.push_back(s.result());
    return report;
  }

 private:
  void run_chunk(std::span<const int32_t> chunk, double total) {
    std::vector<int32_t> inputs(chunk.begin(), chunk.begin() + num_inputs_);
    if (options_.begin) inputs[0] = *options_.begin;
    for (BlockTable& table : tables_) table.trim_to(0);
    for (int64_t first = 0; first < num_inputs_; first += step_tokens_) {
      const int64_t end = std::min(first + step_tokens_, num_inputs_);
      const int64_t scoring = std::max<int64_t>(0, end - std::max(first, first_scoring_));
      const auto step = std::span(inputs).subspan(first, end - first);
      const auto next = chunk.subspan(end - scoring + 1, scoring);
      for (size_t p = 0; p < pools_.size(); ++p) {
        tables_[p].append(end - first);
        StepBatch batch;
        batch.sequences.push_back({&tables_[p], step, static_cast<int32_t>(scoring)});
        score(p, model_.step(batch, *pools_[p]), next);
        done_ += end - first;
        if (options_.progress) options_.progress(static_cast<double>(done_) / total);
      }
    }
  }

  // Row i of `logits` predicts next[i].
  void score(size_t pool, std::span<const float> logits, std::span<const int32_t> next) {
    const size_t n = next.size();
    if (n == 0) return;
    const bool is_base = pool == 0;
    if (is_base && pools_.size() > 1) base_.assign(logits.begin(), logits.end());
    if (is_base) base_rows_.resize(n);
    Scores& s = scores_[pool];
    const size_t before = s.nll.size();
    s.nll.resize(before + n);
    s.kl.resize(before + n);
    s.same_top.resize(before + n);
    threads_.run(static_cast<int64_t>(n), [&](int64_t i, int) {
      const auto row = logits.subspan(i * vocab_, vocab_);
      const Row read = read_row(row);
      if (is_base) base_rows_[i] = read;
      s.nll[before + i] = read.log_norm - row[next[i]];
      s.same_top[before + i] = read.top == base_rows_[i].top;
      if (!is_base)
        s.kl[before + i] =
            divergence(std::span(base_).subspan(i * vocab_, vocab_), base_rows_[i], row, read);
    });
    for (size_t i = before; i < s.nll.size(); ++i)
      if (std::isnan(s.nll[i]))
        throw std::runtime_error("scored token " + std::to_string(i) +
                                 ": a logit of the model is not finite");
  }

  Model& model_;
  std::span<PagePool* const> pools_;
  const PerplexityOptions& options_;
  size_t vocab_;
  int64_t num_inputs_, first_scoring_, step_tokens_;
  ThreadPool threads_;
  std::vector<BlockTable> tables_;  // by pool
  std::vector<Scores> scores_;      // by pool
  std::vector<float> base_;         // the first pool's logits of this step
  std::vector<Row> base_rows_;
  int64_t done_ = 0;
};

}  // namespace

PerplexityReport measure_perplexity(Model& model, std::span<const int32_t> tokens,
                                    std::span<PagePool* const> pools,
                                    const PerplexityOptions& options) {
  check(options, model.info(), tokens, pools.size());
  return Measurement(model, pools, options).run(tokens);
}

}  // namespace pagedkv
