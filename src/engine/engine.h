// Runs requests on a model: continuous batching over one page pool.
//
// Each step packs the next token of every running sequence and then chunks of prompts, up to a token budget. Requests
// have a rank: lower priority numbers first, of equal ones the first come. Where pages run out, who ranks higher takes
// those of who ranks lowest: that one is preempted, its pages stay cached, and it goes on later as if nothing had
// happened. A request starts when the pages for its prompt are there, or can be taken; while a long one waits for that, those that rank lower run. Not thread-safe, but for prepare(): one thread queues, steps and cancels.
//
// A prompt begins with what the pool has of it: pages of finished requests and of running ones. A request whose beginning
// another one is about to compute waits for that, so that it is computed once.
//
// A request's text and log-probabilities do not depend on what else runs, nor on how its prompt was cut,
// where the model is exact (ModelInfo::exact).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>

#include "engine/request.h"
#include "engine/request_observer.h"
#include "models/model.h"
#include "models/text.h"

namespace pagedkv {

using RequestId = int64_t;
using SamplerFactory = std::function<std::unique_ptr<Sampler>(const SamplerOptions&)>;

struct EngineOptions {
  int64_t context = 0;       // tokens a sequence may hold; 0: the model's
  bool within_pool = false;  // no more tokens than the pool can hold of one sequence
  int prefill_chunk = 0;     // most prompt tokens of one sequence in a step; 0: the step's limit
  int max_step_tokens = 0;   // of all sequences together; 0: the model's limit
  int max_seqs = 256;        // sequences that run at once
  bool prefix_cache = true;
  PrefixIndexOptions prefix = {};
  RequestObserver* observer = nullptr;  // must outlive the engine; null: nobody measures
};

struct EngineStats {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;  // computed
  int64_t cached_tokens = 0;  // of prompts, that need not be computed
  int64_t generated_tokens = 0;
  int64_t looked_up_tokens = 0;  // of prompts, in the cache
  int64_t preemptions = 0;
  int64_t recomputed_tokens = 0;  // after preemptions; counted nowhere else
};

enum class RequestPhase { kWaiting, kPreempted, kPrefill, kDecode };
std::string_view request_phase_name(RequestPhase phase) noexcept;  // "waiting", ...

// One answer that has not ended.
struct RequestState {
  RequestId id = 0;
  RequestPhase phase = RequestPhase::kWaiting;
  int32_t priority = 0;
  std::string cache_salt;
  RequestProgress progress = {};
  int64_t num_computed = 0;  // tokens that its pages have
  int64_t num_pages = 0;     // that it holds, over all layer groups
};

// A request that has been checked and is ready to be queued.
class PreparedRequest {
 public:
  PreparedRequest(PreparedRequest&&) noexcept;
  PreparedRequest& operator=(PreparedRequest&&) noexcept;
  ~PreparedRequest();
  std::vector<RequestId> ids() const;  // of its answers, in the order of their sinks

 private:
  friend class Engine;
  struct Impl;
  explicit PreparedRequest(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

class Engine {
 public:
  // All references must outlive the engine. Throws std::invalid_argument for options outside their limits.
  Engine(Model& model, const Tokenizer& tokenizer, PagePool& pool, SamplerFactory make_sampler,
         EngineOptions options = {});
  ~Engine();

  // Queues a request; `sink` must outlive it. Throws std::invalid_argument (empty prompt, a token outside the
  // vocabulary, an empty stop text, a retention or a number of top_logprobs outside its limits) and CapacityError (more
  // prompt tokens than the context or the whole pool can hold), naming the value and the limit.
  RequestId submit(GenerationRequest request, RequestSink& sink);

  // One answer a sink to one prompt, whose pages they share: it is computed once, then each answer branches. Answer i
  // draws with seed + i; the first alone reports the prompt's log-probabilities. Throws as
  // submit(), and std::invalid_argument for no sink; then nothing is queued.
  std::vector<RequestId> submit(GenerationRequest request, std::span<RequestSink* const> sinks);

  // The two halves of submit(). Any thread may prepare, also while the engine steps; what was prepared must be queued, or
  // go, before the engine does.
  PreparedRequest prepare(GenerationRequest request, std::span<RequestSink* const> sinks);
  void queue(PreparedRequest prepared);

  // Ends a request: its pages are free or cached when this returns, and its sink hears kCancelled. Unknown or finished
  // ids are ignored. Between steps, not from within a sink.
  void cancel(RequestId id);
  void cancel_all();
  // The same with kError: something went wrong that is no request's own fault.
  void fail_all(std::exception_ptr error);

  // One iteration. False when no request is left. Without one it still looks after the pool, so that idle memory goes back.
  bool step();

  int64_t context() const noexcept;  // tokens a sequence may hold
  EngineStats stats() const noexcept;
  PrefixIndex& prefix_index() noexcept { return prefix_; }  // for pins, explanations and events
  const PagePool& pool() const noexcept { return pool_; }
  // What its requests share pages under, with this salt.
  PrefixScope scope(std::string salt) const;
  std::vector<RequestState> requests() const;  // by rank
  size_t num_requests() const noexcept;
  int64_t num_running() const noexcept;  // requests that have started and are not preempted
  int64_t num_waiting() const noexcept;  // the others
  int max_seqs() const noexcept { return options_.max_seqs; }

 private:
  friend class PreparedRequest;
  struct Running;
  struct Work;
  struct Plan;

  Running make_request(GenerationRequest request, RequestSink& sink);
  void check(const GenerationRequest& request) const;
  void check_pool_holds(int64_t num_prompt) const;
  void branch_from(const Running& request);
  void release_branches(const Running& request);
  bool uses_cache(const Running& request) const noexcept;
  int64_t in_full_pages(int64_t num_tokens) const noexcept;
  bool is_being_computed(Running& request) const;
  int64_t pages_needed(const Running& request, int group) const noexcept;
  bool has_room(const Running& request, Plan& plan) const;
  bool start(Running& request);
  bool try_start(Running& request, Plan& plan);
  bool try_append(Running& request, int64_t num_tokens, Plan& plan);
  bool preempt_below(const Running& request, Plan& plan);
  void preempt(Running& request, Plan& plan);
  void add_work(Running& request, Plan& plan);
  int64_t tokens_that_fit() const noexcept;
  void tell_start(Running& request);
  void tell_token(Running& request);
  void make_known(Running& request, bool tail);
  std::vector<Work> schedule();
  void run(std::vector<Work>& work);
  void take_outputs(const Work& work, std::span<const float> logits);
  void take_token(Running& request, std::span<const float> logits);
  void finish(Running& request, FinishReason reason, std::exception_ptr error = nullptr);
  void end_all(FinishReason reason, std::exception_ptr error);
  void fail_blocked();

  Model& model_;
  const Tokenizer& tokenizer_;
  PagePool& pool_;
  SamplerFactory make_sampler_;
  EngineOptions options_;
  PrefixIndex prefix_;
  PrefixScope scope_;  // of all requests, but for their salts
  std::vector<int32_t> end_tokens_;
  std::list<Running> requests_;  // by rank, the highest first
  std::atomic<RequestId> next_id_ = 1;
  EngineStats stats_;
};

}  // namespace pagedkv
