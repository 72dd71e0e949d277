#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <new>
#include <stdexcept>
#include <utility>

#include "engine/text_stream.h"

namespace pagedkv {

struct Engine::Running {
  RequestId id;
  GenerationRequest request;
  RequestSink* sink;
  BlockTable table;
  std::unique_ptr<Sampler> sampler;
  TextStream text;
  std::vector<int32_t> tokens;     // prompt, then generated
  std::vector<int32_t> ends = {};  // tokens that end it, ascending
  RequestProgress progress = {};
  bool done = false;
  PrefixScope scope = {};
  bool started = false;
  bool is_suspect = false;   // what it computed may be why it failed
  bool was_started = false;  // its sink has heard on_start: it was preempted if it waits
  int64_t num_known = 0;     // tokens in pages that the prefix index was told of
  int64_t num_seen = 0;      // tokens that were computed or found, before it was preempted too
  int64_t num_reported = 0;  // prompt tokens whose log-probability the sink has heard
  PrefixIndex::Position position = {};
  RequestId branch_of = 0;  // not 0: waits until that request has computed the prompt
  RequestId waits_for = 0;  // not 0: to compute the first num_awaited tokens for both
  int64_t num_awaited = 0;

  int64_t num_computed() const { return table.length(); }
  int64_t num_prompt() const { return static_cast<int64_t>(request.prompt.size()); }
  int64_t num_left() const { return static_cast<int64_t>(tokens.size()) - num_computed(); }
  // After a preemption, what had been generated is computed in chunks too.
  bool prefilling() const { return num_computed() < num_prompt() || num_left() > 1; }
};

// A sequence's share of one step.
struct Engine::Work {
  Running* request;
  int64_t first;  // position of its first new token
  int64_t num_tokens;
  int32_t num_outputs;  // of them, the last ones

  StepBatch::Sequence sequence() const {
    return {&request->table, std::span(request->tokens).subspan(first, num_tokens), num_outputs};
  }
};

// A step in the making.
struct Engine::Plan {
  std::vector<Work> work = {};
  int64_t budget;   // tokens
  int num_running;  // that have started
  // [group] pages. Of those that have started and rank above whoever is looked at now: what their prompts are yet to take;
  // below: what they hold.
  std::vector<int64_t> promised = {}, below = {};
};

std::string_view finish_reason_name(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

Engine::Engine(Model& model, const Tokenizer& tokenizer, PagePool& pool,
               SamplerFactory make_sampler, EngineOptions options)
    : model_(model),
      tokenizer_(tokenizer),
      pool_(pool),
      make_sampler_(std::move(make_sampler)),
      options_(std::move(options)),
      prefix_(pool, options_.prefix) {
  const auto& info = model.info();
  if (options_.context == 0) options_.context = info.context_length;
  if (options_.context < 1 || options_.context > info.context_length)
    throw std::invalid_argument("context " + std::to_string(options_.context) + ": must be in 1.." +
                                std::to_string(info.context_length));
  if (options_.prefill_chunk < 0)
    throw std::invalid_argument("prefill_chunk " + std::to_string(options_.prefill_chunk) +
                                ": must not be negative");
  if (options_.prefill_chunk == 0) options_.prefill_chunk = model.max_step_tokens();
  if (options_.max_step_tokens < 0)
    throw std::invalid_argument("max_step_tokens " + std::to_string(options_.max_step_tokens) +
                                ": must not be negative");
  if (options_.max_step_tokens == 0) options_.max_step_tokens = model.max_step_tokens();
  options_.max_step_tokens = std::min(options_.max_step_tokens, model.max_step_tokens());
  options_.prefill_chunk = std::min(options_.prefill_chunk, options_.max_step_tokens);
  if (options_.within_pool) options_.context = std::min(options_.context, tokens_that_fit());
  if (options_.max_seqs < 1)
    throw std::invalid_argument("max_seqs " + std::to_string(options_.max_seqs) +
                                ": must be at least 1");
  for (int32_t token = 0; token < info.vocab_size; ++token)
    if (tokenizer.is_end_of_generation(token)) end_tokens_.push_back(token);
  const LayerPages pages = pool.layer_pages(0);
  scope_.model = info.name;
  scope_.kv_format = std::string(page_format_name(pages.keys.format)) + "," +
                     std::string(page_format_name(pages.values.format));
  scope_.arithmetic_id = info.arithmetic_id;
}

Engine::~Engine() = default;

int64_t Engine::context() const noexcept { return options_.context; }
EngineStats Engine::stats() const noexcept { return stats_; }
size_t Engine::num_requests() const noexcept { return requests_.size(); }
int64_t Engine::num_running() const noexcept {
  return std::ranges::count_if(requests_, [](const Running& r) { return r.started; });
}
int64_t Engine::num_waiting() const noexcept {
  return static_cast<int64_t>(requests_.size()) - num_running();
}

PrefixScope Engine::scope(std::string salt) const {
  PrefixScope scope = scope_;
  scope.salt = std::move(salt);
  return scope;
}

std::string_view request_phase_name(RequestPhase phase) noexcept {
  static constexpr std::array<std::string_view, 4> kNames = {"waiting", "preempted", "prefill",
                                                             "decode"};
  return kNames[static_cast<size_t>(phase)];
}

std::vector<RequestState> Engine::requests() const {
  std::vector<RequestState> out;
  for (const Running& r : requests_) {
    RequestState& state = out.emplace_back();
    state.id = r.id;
    state.phase = !r.started ? (r.was_started ? RequestPhase::kPreempted : RequestPhase::kWaiting)
                  : r.prefilling() ? RequestPhase::kPrefill
                                   : RequestPhase::kDecode;
    state.priority = r.request.priority;
    state.cache_salt = r.request.cache_salt;
    state.progress = r.progress;
    state.num_computed = r.num_computed();
    for (int g = 0; g < pool_.num_groups(); ++g)
      state.num_pages +=
          std::ranges::count_if(r.table.pages(g), [](PageId page) { return page != kNoPage; });
  }
  return out;
}

// The most tokens of one sequence for which the pool could have pages.
int64_t Engine::tokens_that_fit() const noexcept {
  int64_t most = options_.context;
  for (int g = 0; g < pool_.num_groups(); ++g)
    if (pool_.sliding_window(g) == 0) most = std::min(most, pool_.max_pages(g) * pool_.page_size());
  return most;
}

struct PreparedRequest::Impl {
  std::list<Engine::Running> answers;
};

PreparedRequest::PreparedRequest(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
PreparedRequest::PreparedRequest(PreparedRequest&&) noexcept = default;
PreparedRequest& PreparedRequest::operator=(PreparedRequest&&) noexcept = default;
PreparedRequest::~PreparedRequest() = default;

std::vector<RequestId> PreparedRequest::ids() const {
  std::vector<RequestId> out;
  for (const Engine::Running& r : impl_->answers) out.push_back(r.id);
  return out;
}

RequestId Engine::submit(GenerationRequest request, RequestSink& sink) {
  RequestSink* const sinks[] = {&sink};
  return submit(std::move(request), sinks)[0];
}

std::vector<RequestId> Engine::submit(GenerationRequest request,
                                      std::span<RequestSink* const> sinks) {
  PreparedRequest prepared = prepare(std::move(request), sinks);
  std::vector<RequestId> ids = prepared.ids();
  queue(std::move(prepared));
  return ids;
}

PreparedRequest Engine::prepare(GenerationRequest request, std::span<RequestSink* const> sinks) {
  if (sinks.empty()) throw std::invalid_argument("a request needs at least one sink");
  check(request);
  GenerationRequest branch = request;
  branch.prompt_logprobs = false;
  auto impl = std::make_unique<PreparedRequest::Impl>();
  std::list<Running>& all = impl->answers;
  for (RequestSink* sink : sinks.subspan(1)) {  // first what has nothing to lose when it is refused
    ++branch.sampler.seed;
    all.push_back(make_request(branch, *sink));
  }
  all.push_front(make_request(std::move(request), *sinks[0]));
  for (Running& r : all)
    if (&r != &all.front()) r.branch_of = all.front().id;
  return PreparedRequest(std::move(impl));
}

void Engine::queue(PreparedRequest prepared) {
  auto& answers = prepared.impl_->answers;
  auto place = requests_.end();
  while (place != requests_.begin() &&
         std::prev(place)->request.priority > answers.front().request.priority)
    --place;
  requests_.splice(place, answers);
}

void Engine::check(const GenerationRequest& request) const {
  const auto n = static_cast<int64_t>(request.prompt.size());
  if (n == 0) throw std::invalid_argument("the prompt has no tokens");
  const auto check_tokens = [&](const char* what, std::span<const int32_t> tokens) {
    const int32_t most = model_.info().vocab_size;
    for (const int32_t t : tokens)
      if (t < 0 || t >= most)
        throw std::invalid_argument(std::string(what) + " token " + std::to_string(t) +
                                    ": the vocabulary has " + std::to_string(most));
  };
  check_tokens("prompt", request.prompt);
  if (n > options_.context)
    throw CapacityError("the prompt has " + std::to_string(n) + " tokens, the context holds " +
                        std::to_string(options_.context));
  check_pool_holds(n);
  check_retention(request.retention);
  check_tokens("stop", request.stop_tokens);
  if (request.top_logprobs < 0 || request.top_logprobs > kMostTopLogprobs)
    throw std::invalid_argument("top_logprobs " + std::to_string(request.top_logprobs) +
                                ": must be in 0.." + std::to_string(kMostTopLogprobs));
}

Engine::Running Engine::make_request(GenerationRequest request, RequestSink& sink) {
  TextStream text(request.stop);
  auto sampler = make_sampler_(request.sampler);
  for (int32_t t : request.prompt) sampler->accept(t, false);
  auto tokens = request.prompt;
  Running r{next_id_++,
            std::move(request),
            &sink,
            BlockTable(pool_, options_.context),
            std::move(sampler),
            std::move(text),
            std::move(tokens)};
  r.scope = scope(r.request.cache_salt);
  r.progress.num_prompt = r.num_prompt();
  r.progress.queued = RequestProgress::Clock::now();
  if (!r.request.ignore_end) r.ends = end_tokens_;
  r.ends.insert(r.ends.end(), r.request.stop_tokens.begin(), r.request.stop_tokens.end());
  std::ranges::sort(r.ends);
  return r;
}

// That the pages which a prompt needs at once could be there.
void Engine::check_pool_holds(int64_t num_prompt) const {
  const int page_size = pool_.page_size();
  for (int g = 0; g < pool_.num_groups(); ++g) {
    const int window = pool_.sliding_window(g);
    const int64_t needed = most_pages_held(num_prompt, options_.prefill_chunk, page_size, window),
                  most = pool_.max_pages(g);
    if (needed <= most) continue;
    const std::string prompt = "the prompt has " + std::to_string(num_prompt) + " tokens, ";
    if (window == 0)
      throw CapacityError(prompt + "the pool can hold " + std::to_string(most * page_size));
    throw CapacityError(prompt + "of which a window of " + std::to_string(window) +
                        " and steps of " + std::to_string(options_.prefill_chunk) + " need " +
                        std::to_string(needed) + " pages at once; the pool can hold " +
                        std::to_string(most));
  }
}

// The prompt is there: its branches hold its pages, but for the last token, which each computes for its own logits.
void Engine::branch_from(const Running& r) {
  for (Running& branch : requests_)
    if (branch.branch_of == r.id) {
      branch.branch_of = 0;
      branch.started = branch.was_started = true;
      branch.position = r.position;
      branch.num_known = r.num_known;
      branch.table = r.table.fork();
      branch.table.trim_to(r.num_prompt() - 1);
      branch.progress.num_cached = branch.num_seen = branch.num_computed();
      tell_start(branch);
    }
}

// The prompt will not come: the first of the branches computes it for the others.
void Engine::release_branches(const Running& r) {
  RequestId next = 0;
  for (Running& branch : requests_)
    if (branch.branch_of == r.id) {
      branch.branch_of = next;
      if (next == 0) next = branch.id;
    }
}

bool Engine::uses_cache(const Running& r) const noexcept {
  return options_.prefix_cache && r.request.cache_prompt;
}

// How many of the first num_tokens tokens fill their pages.
int64_t Engine::in_full_pages(int64_t num_tokens) const noexcept {
  return num_tokens / pool_.page_size() * pool_.page_size();
}

// Whether a running request is yet to compute pages that this one could take from it, and that are not there.
bool Engine::is_being_computed(Running& r) const {
  const auto prompt = std::span(r.request.prompt).first(static_cast<size_t>(r.num_prompt() - 1));
  if (r.waits_for != 0)  // the usual case: it still waits, and no prompt need be compared
    for (const Running& other : requests_)
      if (other.id == r.waits_for && other.started && !other.done &&
          other.num_known < r.num_awaited)
        return true;
  r.waits_for = 0;
  for (const Running& other : requests_) {
    if (!other.started || other.done || !uses_cache(other) || other.scope != r.scope) continue;
    const auto end = std::ranges::mismatch(prompt, other.request.prompt).in1;
    const int64_t common = in_full_pages(end - prompt.begin());
    if (other.num_known >= common || prefix_.match(r.scope, prompt) >= common) continue;
    r.waits_for = other.id;
    r.num_awaited = common;
    return true;
  }
  return false;
}

// The most pages that its prompt and one token more hold at once, of what it has, the generated tokens included.
int64_t Engine::pages_needed(const Running& r, int group) const noexcept {
  return most_pages_held(static_cast<int64_t>(r.tokens.size()) + 1, options_.prefill_chunk,
                         pool_.page_size(), pool_.sliding_window(group));
}

// Whether the pages that it needs to start could be there, beside what those of higher rank hold and will take for their
// prompts, and a page for each sequence that goes on. A guess: what the machine can give shows only when it is asked.
bool Engine::has_room(const Running& r, Plan& plan) const {
  int64_t known = -1;
  for (int g = 0; g < pool_.num_groups(); ++g) {
    const int64_t free = pool_.max_pages(g) - pool_.pages_held(g) + plan.below[g] -
                         plan.promised[g] - plan.num_running;
    int64_t needed = pages_needed(r, g);
    if (needed > free && uses_cache(r) && pool_.sliding_window(g) == 0) {
      if (known < 0) known = prefix_.match(r.scope, r.tokens) / pool_.page_size();
      needed -= known;
    }
    if (needed > free) return false;
  }
  return true;
}

// False: it waits. The last token of a prompt is always computed, for its logits.
bool Engine::start(Running& r) {
  // Of a prompt whose log-probabilities are asked for, nothing is left out that was not reported before a preemption.
  const auto num_usable = r.request.prompt_logprobs && r.num_reported + 1 < r.num_prompt()
                              ? static_cast<size_t>(r.num_reported)
                              : r.tokens.size() - 1;
  if (uses_cache(r) && num_usable > 0) {
    if (!r.was_started && is_being_computed(r)) return false;
    r.table = prefix_.acquire(r.scope, std::span(r.tokens).first(num_usable), options_.context,
                              &r.position);
    r.num_known = in_full_pages(r.num_computed());
  }
  if (r.request.zero_freed_pages) r.table.zero_when_freed();
  r.started = true;
  if (r.was_started) return true;
  r.was_started = true;
  r.progress.num_cached = r.num_seen = r.num_computed();
  stats_.cached_tokens += r.progress.num_cached;
  if (uses_cache(r) && num_usable > 0) {
    stats_.looked_up_tokens += static_cast<int64_t>(num_usable);
    r.progress.asks_cache = true;
    if (options_.observer != nullptr && r.num_computed() < static_cast<int64_t>(num_usable))
      r.progress.miss =
          prefix_.explain(r.scope, std::span(r.tokens).first(num_usable), Asker::kTenant).reason;
  }
  tell_start(r);
  r.sink->on_start(r.progress.num_cached);
  return true;
}

void Engine::tell_start(Running& r) {
  r.progress.started = RequestProgress::Clock::now();
  if (options_.observer != nullptr) options_.observer->on_start(r.progress);
}

void Engine::tell_token(Running& r) {
  const auto now = RequestProgress::Clock::now();
  if (options_.observer != nullptr) options_.observer->on_token(r.progress, now);
  if (r.progress.num_generated++ == 0) r.progress.first_token = now;
  r.progress.last_token = now;
}

// Its pages serve other requests from now on: the full ones, and with `tail` the last one too.
void Engine::make_known(Running& r, bool tail) {
  const int64_t full = in_full_pages(r.num_computed());
  if (!uses_cache(r) || (full <= r.num_known && !tail)) return;
  prefix_.insert(r.table, r.scope, r.tokens, tail, &r.position, r.request.retention);
  r.num_known = full;
}

void Engine::cancel(RequestId id) {
  const auto it = std::find_if(requests_.begin(), requests_.end(),
                               [&](const Running& r) { return r.id == id; });
  if (it == requests_.end() || it->done) return;
  finish(*it, FinishReason::kCancelled);
  requests_.erase(it);
}

void Engine::cancel_all() { end_all(FinishReason::kCancelled, nullptr); }
void Engine::fail_all(std::exception_ptr error) { end_all(FinishReason::kError, error); }

void Engine::end_all(FinishReason reason, std::exception_ptr error) {
  for (Running& r : requests_)
    if (!r.done) finish(r, reason, error);
  requests_.clear();
}

bool Engine::step() {
  if (requests_.empty()) {
    prefix_.expire();
    pool_.give_back_idle();
    return false;
  }
  auto work = schedule();
  if (work.empty())
    fail_blocked();
  else
    run(work);
  ++stats_.steps;
  pool_.give_back_idle();
  std::erase_if(requests_, [](const Running& r) { return r.done; });
  return !requests_.empty();
}

// Whether it starts now. While it has no room, those of lower rank may start before it: their pages are its when those of
// higher rank leave it enough, so it does not starve.
bool Engine::try_start(Running& r, Plan& plan) {
  if (plan.num_running >= options_.max_seqs) return false;
  if (plan.num_running > 0 && !has_room(r, plan)) return false;
  try {
    if (!start(r)) return false;
  } catch (...) {  // no memory for it
    finish(r, FinishReason::kError, std::current_exception());
    return false;
  }
  ++plan.num_running;
  return true;
}

// Takes the pages of who ranks lower where there are none left.
bool Engine::try_append(Running& r, int64_t num_tokens, Plan& plan) {
  while (!r.table.try_append(num_tokens))
    if (!preempt_below(r, plan)) return false;
  return true;
}

// Preempts the lowest of those that rank below and hold pages. False: there is none.
bool Engine::preempt_below(const Running& r, Plan& plan) {
  for (auto it = requests_.rbegin(); it != requests_.rend() && &*it != &r; ++it) {
    if (!it->started || it->done || it->num_computed() == 0) continue;
    preempt(*it, plan);
    return true;
  }
  return false;
}

// Sampler, text and what was generated stay; the pages become cached, and are found when it starts again.
void Engine::preempt(Running& r, Plan& plan) {
  const auto work = std::ranges::find_if(plan.work, [&](const Work& w) { return w.request == &r; });
  if (work != plan.work.end()) {
    r.table.trim_to(work->first);
    plan.budget += work->num_tokens;
    plan.work.erase(work);
  }
  try {
    make_known(r, true);
  } catch (const std::bad_alloc&) {  // it will compute them again
  }
  r.table = BlockTable(pool_, options_.context);
  r.position = {};
  r.num_known = 0;
  r.started = false;
  --plan.num_running;
  ++stats_.preemptions;
}

void Engine::add_work(Running& r, Plan& plan) {
  const int64_t most = r.prefilling() ? int64_t{options_.prefill_chunk} : 1;
  const int64_t n = std::min({r.num_left(), plan.budget, most});
  const int64_t first = r.num_computed();
  if (!try_append(r, n, plan)) return;
  plan.budget -= n;
  const bool complete = r.num_left() == 0;
  const bool all = r.request.prompt_logprobs && r.num_reported + 1 < r.num_prompt();
  plan.work.push_back({&r, first, n, static_cast<int32_t>(all ? n : complete ? 1 : 0)});
}

// Decodes first, so that a long prompt slows running answers by no more than its chunk; then prompts; both by rank.
// A sequence that gets no pages waits for others to give some back.
std::vector<Engine::Work> Engine::schedule() {
  const auto groups = static_cast<size_t>(pool_.num_groups());
  Plan plan{.budget = options_.max_step_tokens,
            .num_running = static_cast<int>(num_running()),
            .promised = std::vector<int64_t>(groups),
            .below = std::vector<int64_t>(groups)};
  const auto pages = [](const Running& r, int g) { return std::ssize(r.table.pages(g)); };
  for (Running& r : requests_)
    if (plan.budget > 0 && r.started && !r.prefilling()) add_work(r, plan);
  for (int g = 0; g < pool_.num_groups(); ++g)
    for (const Running& r : requests_)
      if (r.started) plan.below[g] += pages(r, g);
  for (Running& r : requests_) {
    if (plan.budget == 0) break;
    if (r.branch_of != 0 || r.done) continue;
    const bool ran = r.started, decoded = ran && !r.prefilling();
    if (!ran && !try_start(r, plan)) continue;
    for (int g = 0; g < pool_.num_groups(); ++g) {
      if (ran) plan.below[g] -= pages(r, g);
      plan.promised[g] += std::max<int64_t>(0, pages_needed(r, g) - pages(r, g));
    }
    if (!decoded) add_work(r, plan);
  }
  return std::move(plan.work);
}

void Engine::run(std::vector<Work>& work) {
  StepBatch batch;
  for (const auto& w : work) batch.sequences.push_back(w.sequence());
  std::span<const float> logits;
  try {
    logits = model_.step(batch, pool_);
  } catch (...) {
    // Whose fault it was is not known: undo, and where several shared the step, give each a step of its own.
    for (auto& w : work) w.request->table.trim_to(w.first);
    if (work.size() == 1) {
      work[0].request->is_suspect = true;
      finish(*work[0].request, FinishReason::kError, std::current_exception());
      return;
    }
    for (auto& w : work) {
      std::vector<Work> alone{w};
      w.request->table.append(w.num_tokens);  // its pages have just been given back
      run(alone);
    }
    return;
  }
  for (const auto& w : work) {
    const auto size = static_cast<size_t>(w.num_outputs) * model_.info().vocab_size;
    take_outputs(w, logits.first(size));
    if (!w.request->done) w.request->table.release_passed();
    logits = logits.subspan(size);
  }
}

void Engine::take_outputs(const Work& work, std::span<const float> logits) {
  Running& r = *work.request;
  const size_t vocab = model_.info().vocab_size;
  const int64_t end = work.first + work.num_tokens;
  stats_.recomputed_tokens += std::max<int64_t>(0, std::min(end, r.num_seen) - work.first);
  if (const int64_t done = std::min(end, r.num_prompt()); done > r.num_seen) {
    stats_.prompt_tokens += done - std::max(work.first, r.num_seen);
    if (end >= r.num_prompt()) branch_from(r);
    r.sink->on_prompt(done, r.num_prompt());
  }
  r.num_seen = std::max(r.num_seen, end);
  try {
    if (r.request.prompt_logprobs)
      for (int32_t i = 0; i < work.num_outputs; ++i) {
        const int64_t next = end - work.num_outputs + i + 1;  // the token this row predicts
        if (next >= r.num_prompt() || next <= r.num_reported) continue;
        r.num_reported = next;
        const auto row = logits.subspan(i * vocab, vocab);
        const auto top = top_logprobs(row, r.request.top_logprobs);
        r.sink->on_prompt_logprob(next, log_probability(row, r.tokens[next]), top);
      }
    if (work.num_outputs > 0 && end == static_cast<int64_t>(r.tokens.size()))
      take_token(r, logits.last(vocab));
    if (!r.done) make_known(r, false);
  } catch (...) {
    r.is_suspect = true;
    finish(r, FinishReason::kError, std::current_exception());
  }
}

void Engine::take_token(Running& r, std::span<const float> logits) {
  const auto full = [&] { return static_cast<int64_t>(r.tokens.size()) >= options_.context; };
  if (r.request.max_new_tokens == 0 || full()) return finish(r, FinishReason::kLength);
  const bool may_end = r.progress.num_generated >= r.request.min_new_tokens;
  const int32_t token = r.sampler->sample(
      logits, may_end ? std::span<const int32_t>() : std::span<const int32_t>(r.ends));
  r.sampler->accept(token, true);
  r.tokens.push_back(token);
  tell_token(r);
  ++stats_.generated_tokens;
  TokenEvent event;
  event.id = token;
  std::vector<TokenLogprob> top;
  if (r.request.logprobs) {
    event.logprob = log_probability(logits, token);
    top = top_logprobs(logits, r.request.top_logprobs);
    event.top = top;
  }
  const bool end = std::ranges::binary_search(r.ends, token);
  const std::string text =
      end ? std::string() : r.text.push(tokenizer_.piece(token, false), may_end);
  event.text = text;
  r.sink->on_token(event);
  if (end || r.text.stopped()) return finish(r, FinishReason::kStop);
  if (r.progress.num_generated == r.request.max_new_tokens || full())
    return finish(r, FinishReason::kLength);
}

void Engine::finish(Running& r, FinishReason reason, std::exception_ptr error) {
  r.done = true;
  release_branches(r);
  try {
    if (!r.is_suspect)
      make_known(r, true);
    else if (uses_cache(r))
      prefix_.forget(r.scope, r.tokens, r.progress.num_cached);
  } catch (const std::bad_alloc&) {  // others will compute it again
  }
  r.table.trim_to(0);
  if (options_.observer != nullptr) options_.observer->on_finish(r.progress, reason);
  r.sink->on_finish(reason, r.text.finish(), error);
}

// Nobody could be given pages: who ranks highest of those that run has taken all there are, and they are not enough.
void Engine::fail_blocked() {
  const auto first =
      std::ranges::find_if(requests_, [](const Running& r) { return r.started && !r.done; });
  if (first == requests_.end()) return;
  const std::string text = first->table.refusal_text();
  finish(*first, FinishReason::kError,
         pool_.refusal() == PagePool::Refusal::kBudget
             ? std::make_exception_ptr(MemoryError(text))
             : std::make_exception_ptr(CapacityError(text)));
}

}  // namespace pagedkv
