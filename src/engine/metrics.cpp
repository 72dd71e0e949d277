#include "engine/metrics.h"

#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <atomic>
#include <limits>
#include <utility>
#include <vector>

namespace pagedkv {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

// vLLM's boundaries and, since small models are quicker, some below them.
const std::vector<double> kFirstTokenSeconds = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                                0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                                20,    40,    80,   160,  640,  2560};
const std::vector<double> kTokenSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1,
                                           0.15,  0.2,    0.3,   0.4,  0.5,   0.75, 1,     2.5,
                                           5,     7.5,    10,    20,   40,    80};
const std::vector<double> kRequestSeconds = {0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1,    1.5,
                                             2,    2.5,  5,   10,  15,  20,  30,   40,
                                             50,   60,   120, 240, 480, 960, 1920, 7680};
const std::vector<double> kTokens = {1,   2,    5,    10,   20,    50,    100,   200,
                                     500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};

constexpr std::array kFinishReasons = {FinishReason::kStop, FinishReason::kLength,
                                       FinishReason::kCancelled, FinishReason::kError};
constexpr auto kNumMissReasons = static_cast<size_t>(MissReason::kArithmeticDiffers) + 1;

// What vLLM calls the end of a request.
std::string_view vllm_reason(FinishReason reason) noexcept {
  return reason == FinishReason::kCancelled ? "abort" : finish_reason_name(reason);
}

double seconds_between(RequestProgress::Clock::time_point a,
                       RequestProgress::Clock::time_point b) noexcept {
  return std::chrono::duration<double>(b - a).count();
}

ClientMetric histogram_of(const DurationCounts& durations) {
  ClientMetric metric;
  metric.histogram.sample_sum = durations.seconds;
  for (size_t i = 0; i < durations.counts.size(); ++i) {
    metric.histogram.sample_count += static_cast<uint64_t>(durations.counts[i]);
    metric.histogram.bucket.push_back(
        {metric.histogram.sample_count, i < DurationCounts::kSeconds.size()
                                            ? DurationCounts::kSeconds[i]
                                            : std::numeric_limits<double>::infinity()});
  }
  return metric;
}

// Builds families one after the other.
class Families {
 public:
  Families& begin(const char* name, MetricType type, const char* help) {
    families_.push_back({name, help, type, {}});
    return *this;
  }
  Families& gauge(const char* name, const char* help) {
    return begin(name, MetricType::Gauge, help);
  }
  Families& counter(const char* name, const char* help) {
    return begin(name, MetricType::Counter, help);
  }
  // A sample of the family begun last.
  template <class T>
  Families& add(T value, Labels labels = {}) {
    ClientMetric metric;
    metric.counter.value = metric.gauge.value = static_cast<double>(value);
    return add_metric(std::move(metric), std::move(labels));
  }
  Families& histogram(const char* name, const char* help, ClientMetric metric, Labels labels = {}) {
    return begin(name, MetricType::Histogram, help)
        .add_metric(std::move(metric), std::move(labels));
  }
  const std::vector<MetricFamily>& all() const noexcept { return families_; }

 private:
  Families& add_metric(ClientMetric metric, Labels labels) {
    metric.label = std::move(labels);
    families_.back().metric.push_back(std::move(metric));
    return *this;
  }
  std::vector<MetricFamily> families_;
};

}  // namespace

struct Metrics::Impl {
  explicit Impl(MetricsOptions o) : options(std::move(o)) {}

  void add_pool(const EngineState& state, Families& out) const;
  void add_prefixes(const EngineState& state, Families& out) const;
  void add_requests(const EngineState& state, Families& out) const;
  void add_vllm(const EngineState& state, Families& out) const;

  const MetricsOptions options;
  prometheus::Histogram first_token{kFirstTokenSeconds}, between_tokens{kTokenSeconds},
      whole{kRequestSeconds}, queue{kRequestSeconds}, prompt_length{kTokens},
      answer_length{kTokens};
  std::array<std::atomic<int64_t>, kFinishReasons.size()> finished = {};
  std::array<std::atomic<int64_t>, kNumMissReasons> misses = {};
};

Metrics::Metrics(MetricsOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Metrics::~Metrics() = default;

// ---- requests as they run

void Metrics::on_start(const RequestProgress& progress) noexcept {
  impl_->queue.Observe(seconds_between(progress.queued, progress.started));
  if (progress.asks_cache && progress.miss != MissReason::kNone)
    ++impl_->misses[static_cast<size_t>(progress.miss)];
}

void Metrics::on_token(const RequestProgress& before,
                       RequestProgress::Clock::time_point now) noexcept {
  if (before.num_generated == 0)
    impl_->first_token.Observe(seconds_between(before.queued, now));
  else
    impl_->between_tokens.Observe(seconds_between(before.last_token, now));
}

void Metrics::on_finish(const RequestProgress& progress, FinishReason reason) noexcept {
  ++impl_->finished[static_cast<size_t>(reason)];
  if (reason != FinishReason::kStop && reason != FinishReason::kLength) return;
  impl_->whole.Observe(seconds_between(progress.queued, RequestProgress::Clock::now()));
  impl_->prompt_length.Observe(static_cast<double>(progress.num_prompt));
  impl_->answer_length.Observe(static_cast<double>(progress.num_generated));
}

// ---- text

void Metrics::Impl::add_pool(const EngineState& state, Families& out) const {
  out.gauge(
      "pagedkv_pool_pages",
      "Pages that have memory, by layer group: free, held by requests, or cached for later ones.");
  for (size_t g = 0; g < state.groups.size(); ++g) {
    const GroupState& group = state.groups[g];
    const std::string name = std::to_string(g);
    out.add(group.free(), {{"group", name}, {"state", "free"}});
    out.add(group.held, {{"group", name}, {"state", "held"}});
    out.add(group.cached, {{"group", name}, {"state", "cached"}});
  }
  out.gauge("pagedkv_pool_capacity_pages", "Pages usable without growth, by layer group.");
  for (size_t g = 0; g < state.groups.size(); ++g)
    out.add(state.groups[g].capacity, {{"group", std::to_string(g)}});
  int64_t shared = 0;
  for (const GroupState& group : state.groups) shared += group.shared;
  out.gauge("pagedkv_pinned_pages", "Pages that a pin keeps from eviction.")
      .add(state.prefix.pages_pinned);
  out.gauge("pagedkv_shared_pages", "Pages that more than one request holds.").add(shared);
  const auto kind = [&](const char* name) {
    return Labels{{"tier", options.backend}, {"kind", name}};
  };
  out.gauge("pagedkv_pool_bytes",
            "Bytes of pages: committed memory, reserved address space, and the most that may be "
            "committed.")
      .add(state.pool.bytes_committed, kind("committed"))
      .add(state.pool.bytes_reserved, kind("reserved"))
      .add(state.pool.bytes_limit, kind("limit"));
  out.gauge("pagedkv_usage_ratio",
            "Share of the pages or bytes the pool may have that requests hold, 0 to 1.")
      .add(state.usage());
  out.counter("pagedkv_grow_events_total", "Times the pool grew in place.")
      .add(state.pool.grow_events);
  out.counter("pagedkv_shrink_events_total", "Times the pool gave memory back.")
      .add(state.pool.shrink_events);
  out.counter("pagedkv_cow_copies_total", "Pages copied before a request wrote into them.")
      .add(state.pool.page_copies);
  out.counter("pagedkv_allocation_refusals_total", "Allocations for which the pool had no pages.")
      .add(state.pool.refusals);
}

void Metrics::Impl::add_prefixes(const EngineState& state, Families& out) const {
  const PrefixIndexStats& prefix = state.prefix;
  out.counter("pagedkv_prefix_query_tokens_total", "Prompt tokens looked for in the cache.")
      .add(state.engine.looked_up_tokens);
  out.counter("pagedkv_prefix_hit_tokens_total",
              "Prompt tokens found in the cache, by where they were.")
      .add(state.engine.cached_tokens, {{"tier", options.backend}});
  out.counter("pagedkv_prefix_miss_total", "Prompts not found, or not all of them, by reason.");
  for (size_t i = 1; i < kNumMissReasons; ++i)
    out.add(misses[i].load(),
            {{"reason", std::string(miss_reason_name(static_cast<MissReason>(i)))}});
  const auto reason = [&](const char* name) {
    return Labels{{"reason", name}, {"tier", options.backend}};
  };
  out.counter("pagedkv_evicted_pages_total",
              "Cached pages that went: for room, time or their salt's quota.")
      .add(prefix.pages_evicted, reason("room_needed"))
      .add(prefix.pages_expired, reason("ttl"))
      .add(prefix.pages_over_quota, reason("quota"));
  out.gauge("pagedkv_prefix_index_bytes", "Bytes of the index that finds cached pages.")
      .add(prefix.index_bytes);
  out.histogram("pagedkv_page_lifetime_seconds",
                "From when a page was stored until it was evicted.", histogram_of(prefix.lifetime));
  out.histogram("pagedkv_page_reuse_gap_seconds",
                "From when a page was cached until it was used again.",
                histogram_of(prefix.reuse_gap));
}

void Metrics::Impl::add_requests(const EngineState& state, Families& out) const {
  out.gauge("pagedkv_requests_running", "Requests that run.").add(state.num_running);
  out.gauge("pagedkv_requests_waiting", "Requests that wait to run, preempted ones included.")
      .add(state.num_waiting);
  out.counter("pagedkv_preemptions_total", "Requests whose pages went to others.")
      .add(state.engine.preemptions);
  out.counter("pagedkv_recomputed_tokens_total", "Tokens computed again after a preemption.")
      .add(state.engine.recomputed_tokens);
  out.counter("pagedkv_engine_steps_total", "Steps of the model.").add(state.engine.steps);
  out.counter("pagedkv_request_prompt_tokens_total", "Prompt tokens, by where they came from.")
      .add(state.engine.prompt_tokens, {{"source", "computed"}})
      .add(state.engine.cached_tokens, {{"source", "cached"}});
  out.counter("pagedkv_generation_tokens_total", "Generated tokens.")
      .add(state.engine.generated_tokens);
  out.counter("pagedkv_requests_finished_total", "Requests that ended, by reason.");
  for (size_t i = 0; i < kFinishReasons.size(); ++i)
    out.add(finished[i].load(), {{"reason", std::string(finish_reason_name(kFinishReasons[i]))}});
  out.histogram("pagedkv_time_to_first_token_seconds",
                "From a request's arrival to its first token.", first_token.Collect());
  out.histogram("pagedkv_inter_token_latency_seconds", "Between two tokens of one request.",
                between_tokens.Collect());
  out.histogram("pagedkv_request_duration_seconds", "From a request's arrival to its end.",
                whole.Collect());
  out.histogram("pagedkv_request_queue_seconds", "From a request's arrival to its first step.",
                queue.Collect());
  out.histogram("pagedkv_request_prompt_length_tokens", "Prompt tokens of a request.",
                prompt_length.Collect());
  out.histogram("pagedkv_request_generation_length_tokens", "Generated tokens of a request.",
                answer_length.Collect());
}

// The names and help of vLLM 0.32's v1/metrics/loggers.py; only the words are ours.
void Metrics::Impl::add_vllm(const EngineState& state, Families& out) const {
  const Labels labels = {{"model_name", options.model_name}, {"engine", "0"}};
  const auto with = [&](Labels more) {
    more.insert(more.begin(), labels.begin(), labels.end());
    return more;
  };
  out.gauge("vllm:num_requests_running", "Requests that run.").add(state.num_running, labels);
  out.gauge("vllm:num_requests_waiting", "Requests that wait to run.")
      .add(state.num_waiting, labels);
  out.gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that requests hold, 0 to 1.")
      .add(state.usage(), labels);
  out.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked for in the cache.")
      .add(state.engine.looked_up_tokens, labels);
  out.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.")
      .add(state.engine.cached_tokens, labels);
  out.counter("vllm:num_preemptions_total", "Requests whose pages went to others.")
      .add(state.engine.preemptions, labels);
  out.counter("vllm:prompt_tokens_total", "Prompt tokens, cached ones included.")
      .add(state.engine.prompt_tokens + state.engine.cached_tokens, labels);
  out.counter("vllm:generation_tokens_total", "Generated tokens.")
      .add(state.engine.generated_tokens, labels);
  out.histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.",
                first_token.Collect(), labels);
  out.histogram("vllm:inter_token_latency_seconds", "Between two tokens of one request.",
                between_tokens.Collect(), labels);
  out.histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.",
                whole.Collect(), labels);
  out.counter("vllm:request_success_total", "Requests that ended, by reason.");
  for (size_t i = 0; i < kFinishReasons.size(); ++i)
    out.add(finished[i].load(),
            with({{"finished_reason", std::string(vllm_reason(kFinishReasons[i]))}}));
  out.gauge("vllm:cache_config_info", "How the KV cache is set up.")
      .add(1, with({{"block_size", std::to_string(state.page_size)},
                    {"cache_dtype", options.kv_format},
                    {"enable_prefix_caching", options.prefix_cache ? "True" : "False"},
                    {"num_gpu_blocks", std::to_string(state.groups.front().most)}}));
}

std::string Metrics::text(const EngineState& state) const {
  const MetricsOptions& o = impl_->options;
  Families out;
  out.gauge("pagedkv_build_info", "What runs.")
      .add(1, {{"version", o.version},
               {"backend", o.backend},
               {"kernels", o.kernels},
               {"kv_format", o.kv_format},
               {"page_size", std::to_string(state.page_size)},
               {"arithmetic_id", o.arithmetic_id},
               {"exact", o.exact ? "true" : "false"},
               {"model", o.model_name}});
  impl_->add_pool(state, out);
  impl_->add_prefixes(state, out);
  impl_->add_requests(state, out);
  if (o.vllm_names) impl_->add_vllm(state, out);
  return prometheus::TextSerializer().Serialize(out.all());
}

}  // namespace pagedkv
