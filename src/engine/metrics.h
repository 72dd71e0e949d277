// What a server tells Prometheus: text format 0.0.4. Own names begin with pagedkv_; the same values come under vLLM's
// names too, so that its dashboards, llm-d and the Gateway API Inference Extension work as they are.
//
//   Metrics metrics({.model_name = "m"});
//   Engine engine(..., {.observer = &metrics});
//   metrics.text(loop.call(engine_state))   // any thread
//
// Gauges and counters of pages are those of the pool when it is asked; times are counted from requests as they run,
// about 0.2 us a token. No label has more values than there are layer groups, reasons or tiers.
#pragma once

#include <memory>
#include <string>

#include "engine/engine_state.h"
#include "engine/request_observer.h"

namespace pagedkv {

struct MetricsOptions {
  std::string model_name = {};
  std::string version = {};
  std::string backend = "cpu";  // where pages live: the value of the label `tier` too
  std::string kernels = {};     // the active set
  std::string kv_format = {};   // of pages
  std::string arithmetic_id = {};
  bool exact = false;
  bool prefix_cache = true;
  bool vllm_names = true;
};

class Metrics final : public RequestObserver {
 public:
  explicit Metrics(MetricsOptions options);
  ~Metrics() override;

  void on_start(const RequestProgress& progress) noexcept override;
  void on_token(const RequestProgress& before,
                RequestProgress::Clock::time_point now) noexcept override;
  void on_finish(const RequestProgress& progress, FinishReason reason) noexcept override;

  // Any thread may call it.
  std::string text(const EngineState& state) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
