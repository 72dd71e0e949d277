// Runs requests on a model: continuous batching over one page pool.
//
// Each step packs the next token of every running sequence and then chunks of waiting prompts, oldest
// first, up to a token budget. Not thread-safe: one thread submits, steps and cancels.
//
// A prompt begins with what the pool has of it: pages of finished requests and of running ones. A request whose beginning
// another one is about to compute waits for that, so that it is computed once.
//
// A request's text and log-probabilities do not depend on what else runs, nor on how its prompt was cut,
// where the model is exact (ModelInfo::exact).
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>

#include "engine/request.h"
#include "models/model.h"
#include "models/text.h"

namespace pagedkv {

using RequestId = int64_t;
using SamplerFactory = std::function<std::unique_ptr<Sampler>(const SamplerOptions&)>;

struct EngineOptions {
  int64_t context = 0;    // tokens a sequence may hold; 0: the model's
  int prefill_chunk = 0;  // most prompt tokens of one sequence in a step; 0: the step's limit
  int max_seqs = 256;     // sequences that run at once
  bool prefix_cache = true;
  PrefixIndexOptions prefix = {};
};

struct EngineStats {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;  // computed
  int64_t cached_tokens = 0;  // of prompts, that need not be computed
  int64_t generated_tokens = 0;
};

class Engine {
 public:
  // All references must outlive the engine. Throws std::invalid_argument for options outside their limits.
  Engine(Model& model, const Tokenizer& tokenizer, PagePool& pool, SamplerFactory make_sampler,
         EngineOptions options = {});
  ~Engine();

  // Queues a request; `sink` must outlive it. Throws std::invalid_argument (empty prompt, a token outside the
  // vocabulary, an empty stop text, a retention outside its limits) and CapacityError (more prompt tokens than the
  // context or the whole pool can hold), naming the value and the limit.
  RequestId submit(GenerationRequest request, RequestSink& sink);

  // One answer a sink to one prompt, whose pages they share: it is computed once, then each answer branches. Answer i
  // draws with seed + i; the first alone reports the prompt's log-probabilities. Throws as
  // submit(), and std::invalid_argument for no sink; then nothing is queued.
  std::vector<RequestId> submit(GenerationRequest request, std::span<RequestSink* const> sinks);

  // Ends a request: its pages are free or cached when this returns, and its sink hears kCancelled. Unknown or finished
  // ids are ignored. Between steps, not from within a sink.
  void cancel(RequestId id);

  // One iteration. False when no request is left.
  bool step();

  int64_t context() const noexcept;  // tokens a sequence may hold
  EngineStats stats() const noexcept;
  PrefixIndex& prefix_index() noexcept { return prefix_; }  // for pins, explanations and events
  size_t num_requests() const noexcept;

 private:
  struct Running;
  struct Work;

  Running make_request(GenerationRequest request, RequestSink& sink);
  void check_pool_holds(int64_t num_prompt) const;
  void branch_from(const Running& request);
  void release_branches(const Running& request);
  bool uses_cache(const Running& request) const noexcept;
  int64_t in_full_pages(int64_t num_tokens) const noexcept;
  bool is_being_computed(const Running& request) const;
  bool start(Running& request);
  void make_known(Running& request, bool tail);
  std::vector<Work> schedule();
  void run(std::vector<Work>& work);
  void take_outputs(const Work& work, std::span<const float> logits);
  void take_token(Running& request, std::span<const float> logits);
  void finish(Running& request, FinishReason reason, std::exception_ptr error = nullptr);
  void fail_newest_blocked();

  Model& model_;
  const Tokenizer& tokenizer_;
  PagePool& pool_;
  SamplerFactory make_sampler_;
  EngineOptions options_;
  PrefixIndex prefix_;
  PrefixScope scope_;            // of all requests, but for their salts
  std::list<Running> requests_;  // by arrival
  RequestId next_id_ = 1;
  EngineStats stats_;
};

}  // namespace pagedkv
