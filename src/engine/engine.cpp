#include "engine/engine.h"

#include <algorithm>
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
  std::vector<int32_t> tokens;  // prompt, then generated
  int64_t num_generated = 0;
  bool done = false;
  PrefixScope scope = {};
  bool started = false;
  bool is_suspect = false;  // what it computed may be why it failed
  int64_t num_cached = 0;   // tokens that were there when it started
  int64_t num_known = 0;    // tokens in pages that the prefix index was told of
  PrefixIndex::Position position = {};
  RequestId branch_of = 0;  // not 0: waits until that request has computed the prompt

  int64_t num_computed() const { return table.length(); }
  int64_t num_prompt() const { return static_cast<int64_t>(request.prompt.size()); }
  int64_t num_left() const { return static_cast<int64_t>(tokens.size()) - num_computed(); }
  bool prefilling() const { return num_computed() < num_prompt(); }
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
  options_.prefill_chunk = std::min(options_.prefill_chunk, model.max_step_tokens());
  if (options_.max_seqs < 1)
    throw std::invalid_argument("max_seqs " + std::to_string(options_.max_seqs) +
                                ": must be at least 1");
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

RequestId Engine::submit(GenerationRequest request, RequestSink& sink) {
  requests_.push_back(make_request(std::move(request), sink));
  return requests_.back().id;
}

std::vector<RequestId> Engine::submit(GenerationRequest request,
                                      std::span<RequestSink* const> sinks) {
  if (sinks.empty()) throw std::invalid_argument("a request needs at least one sink");
  GenerationRequest branch = request;
  branch.prompt_logprobs = false;
  std::list<Running> all;
  std::vector<RequestId> ids;
  for (RequestSink* sink : sinks.subspan(1)) {  // first what has nothing to lose when it is refused
    ++branch.sampler.seed;
    all.push_back(make_request(branch, *sink));
  }
  all.push_front(make_request(std::move(request), *sinks[0]));
  for (Running& r : all) {
    if (&r != &all.front()) r.branch_of = all.front().id;
    ids.push_back(r.id);
  }
  requests_.splice(requests_.end(), all);
  return ids;
}

Engine::Running Engine::make_request(GenerationRequest request, RequestSink& sink) {
  const auto n = static_cast<int64_t>(request.prompt.size());
  if (n == 0) throw std::invalid_argument("the prompt has no tokens");
  for (int32_t t : request.prompt)
    if (t < 0 || t >= model_.info().vocab_size)
      throw std::invalid_argument("prompt token " + std::to_string(t) + ": the vocabulary has " +
                                  std::to_string(model_.info().vocab_size));
  if (n > options_.context)
    throw CapacityError("the prompt has " + std::to_string(n) + " tokens, the context holds " +
                        std::to_string(options_.context));
  check_pool_holds(n);
  check_retention(request.retention);
  TextStream text(request.stop);
  auto sampler = make_sampler_(request.sampler);
  for (int32_t t : request.prompt) sampler->accept(t);
  auto tokens = request.prompt;
  PrefixScope scope = scope_;
  scope.salt = request.cache_salt;
  Running r{next_id_++,
            std::move(request),
            &sink,
            BlockTable(pool_, options_.context),
            std::move(sampler),
            std::move(text),
            std::move(tokens)};
  r.scope = std::move(scope);
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
      branch.started = true;
      branch.position = r.position;
      branch.num_known = r.num_known;
      branch.table = r.table.fork();
      branch.table.trim_to(r.num_prompt() - 1);
      branch.num_cached = branch.num_computed();
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
bool Engine::is_being_computed(const Running& r) const {
  const auto prompt = std::span(r.request.prompt).first(static_cast<size_t>(r.num_prompt() - 1));
  for (const Running& other : requests_) {
    if (!other.started || other.done || !uses_cache(other) || other.scope != r.scope) continue;
    const auto end = std::ranges::mismatch(prompt, other.request.prompt).in1;
    const int64_t common = in_full_pages(end - prompt.begin());
    if (other.num_known < common && prefix_.match(r.scope, prompt) < common) return true;
  }
  return false;
}

// False: it waits. The last token of a prompt is always computed, for its logits.
bool Engine::start(Running& r) {
  if (uses_cache(r) && !r.request.prompt_logprobs) {
    if (is_being_computed(r)) return false;
    const auto prompt = std::span(r.request.prompt).first(static_cast<size_t>(r.num_prompt() - 1));
    r.table = prefix_.acquire(r.scope, prompt, options_.context, &r.position);
    r.num_known = in_full_pages(r.num_computed());
  }
  if (r.request.zero_freed_pages) r.table.zero_when_freed();
  r.started = true;
  r.num_cached = r.num_computed();
  stats_.cached_tokens += r.num_cached;
  r.sink->on_start(r.num_cached);
  return true;
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

bool Engine::step() {
  if (requests_.empty()) return false;
  auto work = schedule();
  if (work.empty())
    fail_newest_blocked();
  else
    run(work);
  ++stats_.steps;
  pool_.give_back_idle();
  std::erase_if(requests_, [](const Running& r) { return r.done; });
  return !requests_.empty();
}

// Decodes first, so that a long prompt slows running answers by no more than its chunk; then prompts by arrival.
// A sequence that gets no pages waits for others to give some back.
std::vector<Engine::Work> Engine::schedule() {
  std::vector<Work> work;
  int64_t budget = model_.max_step_tokens();
  int running = 0;
  for (const bool prefill : {false, true}) {
    for (auto& r : requests_) {
      if (r.prefilling() != prefill || r.branch_of != 0 || budget == 0) continue;
      if (!r.started && (running >= options_.max_seqs || !start(r))) continue;
      const int64_t n =
          std::min({r.num_left(), budget, prefill ? int64_t{options_.prefill_chunk} : budget});
      const int64_t first = r.num_computed();
      ++running;
      if (!r.table.try_append(n)) continue;
      budget -= n;
      const bool complete = r.num_computed() == static_cast<int64_t>(r.tokens.size());
      const bool all = r.request.prompt_logprobs && first < r.num_prompt();
      work.push_back({&r, first, n, static_cast<int32_t>(all ? n : complete ? 1 : 0)});
    }
  }
  return work;
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
  if (work.first < r.num_prompt()) {
    stats_.prompt_tokens += std::min(end, r.num_prompt()) - work.first;
    if (end >= r.num_prompt()) branch_from(r);
    r.sink->on_prompt(std::min(end, r.num_prompt()), r.num_prompt());
  }
  try {
    if (r.request.prompt_logprobs)
      for (int32_t i = 0; i < work.num_outputs; ++i) {
        const int64_t next = end - work.num_outputs + i + 1;  // the token this row predicts
        if (next < r.num_prompt())
          r.sink->on_prompt_logprob(
              next, log_probability(logits.subspan(i * vocab, vocab), r.tokens[next]));
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
  const int32_t token = r.sampler->sample(logits);
  r.sampler->accept(token);
  r.tokens.push_back(token);
  ++r.num_generated;
  ++stats_.generated_tokens;
  TokenEvent event;
  event.id = token;
  if (r.request.logprobs) event.logprob = log_probability(logits, token);
  const bool end = tokenizer_.is_end_of_generation(token) && !r.request.ignore_end;
  const std::string text = end ? std::string() : r.text.push(tokenizer_.piece(token, false));
  event.text = text;
  r.sink->on_token(event);
  if (end || r.text.stopped()) return finish(r, FinishReason::kStop);
  if (r.num_generated == r.request.max_new_tokens || full())
    return finish(r, FinishReason::kLength);
}

void Engine::finish(Running& r, FinishReason reason, std::exception_ptr error) {
  r.done = true;
  release_branches(r);
  try {
    if (!r.is_suspect)
      make_known(r, true);
    else if (uses_cache(r))
      prefix_.forget(r.scope, r.tokens, r.num_cached);
  } catch (const std::bad_alloc&) {  // others will compute it again
  }
  r.table.trim_to(0);
  r.sink->on_finish(reason, r.text.finish(), error);
}

// Nobody could be given pages and nobody will give any back: the newest that holds some, or else the newest, must go.
void Engine::fail_newest_blocked() {
  Running* victim = nullptr;
  for (auto& r : requests_)
    if (r.branch_of == 0 &&
        (victim == nullptr || r.num_computed() > 0 || victim->num_computed() == 0))
      victim = &r;
  const std::string text = victim->table.refusal_text();
  finish(*victim, FinishReason::kError,
         pool_.refusal() == PagePool::Refusal::kBudget
             ? std::make_exception_ptr(MemoryError(text))
             : std::make_exception_ptr(CapacityError(text)));
}

}  // namespace pagedkv
