#include "server/answer.h"

#include <algorithm>
#include <utility>

#include "pagedkv/base/error.h"
#include "server/api_error.h"

namespace pagedkv {

void Answer::on_start(int64_t num_cached) {
  const std::lock_guard lock(all_.mutex_);
  if (counts_.started) return;  // preempted: what it computes again was no hit
  counts_.started = Clock::now();
  counts_.cached = num_cached;
}

void Answer::on_prompt_logprob(int64_t, double logprob, std::span<const TokenLogprob> top) {
  const std::lock_guard lock(all_.mutex_);
  prompt_.push_back({0, logprob, {top.begin(), top.end()}});
}

void Answer::on_token(const TokenEvent& event) {
  {
    const std::lock_guard lock(all_.mutex_);
    const auto now = Clock::now();
    if (!counts_.first_token) counts_.first_token = now;
    counts_.last_token = now;
    ++counts_.generated;
    part_.text += event.text;
    if (keep_tokens_)
      part_.tokens.push_back({event.id, event.logprob, {event.top.begin(), event.top.end()}});
    if (!all_.streams_ || (event.text.empty() && !keep_tokens_)) return;
    all_.news_ = true;
  }
  all_.changed_.notify_one();
}

void Answer::on_finish(FinishReason reason, std::string_view text, std::exception_ptr error) {
  const std::lock_guard lock(
      all_.mutex_);  // also while notifying: after it, all of this may be gone
  part_.text += text;
  part_.finished = ended_ = true;
  part_.reason = reason;
  part_.error = std::move(error);
  all_.news_ = true;
  --all_.num_open_;
  all_.changed_.notify_all();
}

AnswerPart Answer::take() {
  const std::lock_guard lock(all_.mutex_);
  return std::exchange(part_, {});
}

std::vector<AnsweredToken> Answer::prompt_tokens() const {
  const std::lock_guard lock(all_.mutex_);
  return prompt_;
}

Answer::Counts Answer::counts() const {
  const std::lock_guard lock(all_.mutex_);
  return counts_;
}

Answers::~Answers() {
  cancel();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_open_ == 0; });
}

void Answers::add(GenerationRequest request, int n, bool keep_tokens) {
  std::vector<RequestSink*> sinks;
  for (int i = 0; i < n; ++i)
    sinks.push_back(answers_.emplace_back(std::make_unique<Answer>(*this, keep_tokens)).get());
  {
    const std::lock_guard lock(mutex_);
    num_open_ += sinks.size();
  }
  const auto num_prompt = static_cast<int64_t>(request.prompt.size());
  try {
    const auto ids = loop_.submit(std::move(request), sinks);
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    return;
  } catch (const CapacityError& e) {
    // Nothing has been queued: these answers never were.
    const std::lock_guard lock(mutex_);
    num_open_ -= sinks.size();
    ApiError error(400, e.what(), "context_length_exceeded");
    error.members = {{"n_prompt_tokens", num_prompt}, {"n_ctx", context_}};
    throw error;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    num_open_ -= sinks.size();
    throw;
  }
}

void Answers::cancel() {
  {
    const std::lock_guard lock(mutex_);
    if (num_open_ == 0) return;
  }
  loop_.cancel(ids_);
}

void Answers::wait(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, most, [&] { return news_; });
  news_ = false;
}

}  // namespace pagedkv
