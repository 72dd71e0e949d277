#include "server/generation_routes.h"

#include <cpp-httplib/httplib.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "engine/text_stream.h"
#include "server/answer.h"
#include "server/connections.h"
#include "server/generation_body.h"
#include "server/random_bits.h"
#include "server/token_text.h"

namespace pagedkv {
namespace {

using httplib::Request;
using httplib::Response;
using Clock = Answer::Clock;

// How soon a client that is gone is noticed while nothing comes.
constexpr std::chrono::milliseconds kLookPeriod{250};
// A request that waits longer gives back the stack that reading it took.
constexpr std::chrono::milliseconds kSoon{20};

double ms_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::milli>(b - a).count();
}

double per_second(int64_t count, double ms) {
  return ms > 0 ? 1e3 * static_cast<double>(count) / ms : 0;
}

// One HTTP request that generates, from its body to the last byte of its answer.
class Generation {
 public:
  Generation(Served& served, GenerationBody body)
      : served_(served),
        body_(std::move(body)),
        answers_(served.loop, served.context, body_.stream),
        id_(random_name(body_.chat ? "chatcmpl-" : "cmpl-")),
        created_(static_cast<int64_t>(std::time(nullptr))) {
    const bool keep_tokens = body_.logprobs || body_.return_token_ids;
    for (GenerationRequest& request : body_.requests) {
      prompts_.push_back({static_cast<int64_t>(request.prompt.size()), request.cache_prompt, {}});
      if (body_.return_token_ids || (body_.echo && body_.logprobs))
        prompts_.back().tokens = request.prompt;
    }
    for (GenerationRequest& request : body_.requests)
      answers_.add(std::move(request), body_.n, keep_tokens);
    for (size_t i = 0; i < answers_.size(); ++i) choices_.emplace_back(served.tokenizer);
  }

  // False: the client is gone.
  bool answer_whole(const Request& request, Response& response);
  void stream(EventWriter& writer);

 private:
  struct Prompt {
    int64_t length;
    bool cached;
    std::vector<int32_t> tokens;  // where the answer shows them
  };
  struct Choice {
    explicit Choice(const Tokenizer& tokenizer) : shown(tokenizer) {}
    ShownTokens shown;
    bool begun = false, finished = false;
    FinishReason reason = FinishReason::kError;
    int64_t text_offset = 0;
    // Of a whole answer.
    std::string text;
    std::vector<AnsweredToken> tokens;
    std::vector<int32_t> token_ids;
  };

  size_t prompt_of(size_t i) const { return i / static_cast<size_t>(body_.n); }
  std::vector<AnsweredToken> prompt_tokens(size_t i);
  Json logprobs(Choice& choice, const std::vector<AnsweredToken>& tokens);
  Json head(const char* object) const;
  Json choice(size_t i, const char* key, Json content, Json logprobs, Json reason) const;
  Json usage();
  Json timings();
  bool send(EventWriter& writer, Json choice, Json timings = {});
  bool send_begin(EventWriter& writer, size_t i);
  bool send_part(EventWriter& writer, size_t i, AnswerPart part, size_t& num_open);
  [[noreturn]] static void fail(const AnswerPart& part);

  Served& served_;
  GenerationBody body_;
  std::vector<Prompt> prompts_;
  std::vector<Choice> choices_;
  Answers answers_;
  const std::string id_;
  const int64_t created_;
};

void Generation::fail(const AnswerPart& part) {
  if (part.error) std::rethrow_exception(part.error);
  throw DrainingError("the server ended the request");
}

// The tokens of the prompt with their log-probabilities, which the first of its answers has.
std::vector<AnsweredToken> Generation::prompt_tokens(size_t i) {
  const Prompt& prompt = prompts_[prompt_of(i)];
  auto out = answers_[prompt_of(i) * static_cast<size_t>(body_.n)].prompt_tokens();
  out.insert(out.begin(), AnsweredToken{});
  out.resize(prompt.tokens.size());
  for (size_t t = 0; t < out.size(); ++t) out[t].id = prompt.tokens[t];
  return out;
}

Json Generation::logprobs(Choice& choice, const std::vector<AnsweredToken>& tokens) {
  if (!body_.logprobs) return {};
  if (!body_.chat) return completion_logprobs(served_.tokenizer, tokens, choice.text_offset);
  Json content = Json::array();
  for (const AnsweredToken& token : tokens)
    content.push_back(chat_logprob(served_.tokenizer, token));
  return {{"content", std::move(content)}, {"refusal", Json()}};
}

Json Generation::head(const char* object) const {
  return {{"id", id_},
          {"object", object},
          {"created", created_},
          {"model", body_.model},
          {"system_fingerprint", served_.fingerprint}};
}

Json Generation::choice(size_t i, const char* key, Json content, Json logprobs, Json reason) const {
  return {{"index", i},
          {key, std::move(content)},
          {"logprobs", std::move(logprobs)},
          {"finish_reason", std::move(reason)}};
}

Json Generation::usage() {
  int64_t prompt = 0, cached = 0, written = 0, generated = 0;
  for (size_t p = 0; p < prompts_.size(); ++p) {
    const auto first = answers_[p * static_cast<size_t>(body_.n)].counts();
    prompt += prompts_[p].length;
    cached += first.cached;
    if (served_.prefix_cache && prompts_[p].cached) written += prompts_[p].length - first.cached;
  }
  for (size_t i = 0; i < answers_.size(); ++i) generated += answers_[i].counts().generated;
  return {{"prompt_tokens", prompt},
          {"completion_tokens", generated},
          {"total_tokens", prompt + generated},
          {"prompt_tokens_details", {{"cached_tokens", cached}, {"cache_write_tokens", written}}},
          {"completion_tokens_details", {{"reasoning_tokens", 0}}}};
}

// As llama.cpp's server says it; of several answers, from the first start to the last token.
Json Generation::timings() {
  int64_t cached = 0, prompt = 0, generated = 0, later = 0;
  std::optional<Clock::time_point> start, first, last;
  for (size_t i = 0; i < answers_.size(); ++i) {
    const auto c = answers_[i].counts();
    if (i % static_cast<size_t>(body_.n) == 0) {
      cached += c.cached;
      prompt += prompts_[prompt_of(i)].length - c.cached;
    }
    generated += c.generated;
    later += std::max<int64_t>(0, c.generated - 1);
    if (c.started) start = start ? std::min(*start, *c.started) : *c.started;
    if (c.first_token) first = first ? std::min(*first, *c.first_token) : *c.first_token;
    if (c.last_token) last = last ? std::max(*last, *c.last_token) : *c.last_token;
  }
  const double prompt_ms = start && first ? ms_between(*start, *first) : 0;
  const double predicted_ms = first && last ? ms_between(*first, *last) : 0;
  const auto each = [](double ms, int64_t n) { return n > 0 ? ms / static_cast<double>(n) : 0; };
  return {{"cache_n", cached},
          {"prompt_n", prompt},
          {"prompt_ms", prompt_ms},
          {"prompt_per_token_ms", each(prompt_ms, prompt)},
          {"prompt_per_second", per_second(prompt, prompt_ms)},
          {"predicted_n", generated},
          {"predicted_ms", predicted_ms},
          {"predicted_per_token_ms", each(predicted_ms, later)},
          {"predicted_per_second", per_second(later, predicted_ms)}};
}

bool Generation::answer_whole(const Request& request, Response& response) {
  bool waits_long = false;
  for (size_t num_open = answers_.size(); num_open > 0;) {
    answers_.wait(waits_long ? kLookPeriod : kSoon);
    if (request.is_connection_closed()) return false;
    if (!std::exchange(waits_long, true)) give_back_unused_stack();
    for (size_t i = 0; i < answers_.size(); ++i) {
      Choice& c = choices_[i];
      if (c.finished) continue;
      AnswerPart part = answers_[i].take();
      if (part.finished &&
          (part.reason == FinishReason::kError || part.reason == FinishReason::kCancelled))
        fail(part);
      c.text += part.text;
      if (body_.return_token_ids)
        for (const AnsweredToken& token : part.tokens) c.token_ids.push_back(token.id);
      if (body_.logprobs) std::ranges::move(c.shown.take(part), std::back_inserter(c.tokens));
      if (!part.finished) continue;
      c.finished = true;
      c.reason = part.reason;
      --num_open;
    }
  }
  Json choices = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    Choice& c = choices_[i];
    Json reason(finish_reason_name(c.reason));
    if (body_.chat) {
      Json message{{"role", "assistant"}, {"content", std::move(c.text)}, {"refusal", Json()}};
      choices.push_back(choice(i, "message", std::move(message), logprobs(c, c.tokens), reason));
    } else {
      if (body_.echo) {
        c.text.insert(0, body_.prompt_texts[prompt_of(i)]);
        if (body_.logprobs) {
          auto tokens = prompt_tokens(i);
          std::ranges::move(c.tokens, std::back_inserter(tokens));
          c.tokens = std::move(tokens);
        }
      }
      choices.push_back(choice(i, "text", valid_utf8(c.text), logprobs(c, c.tokens), reason));
    }
    if (body_.return_token_ids) {
      choices.back()["token_ids"] = std::move(c.token_ids);
      if (!body_.chat) choices.back()["prompt_token_ids"] = prompts_[prompt_of(i)].tokens;
    }
  }
  Json out = head(body_.chat ? "chat.completion" : "text_completion");
  out["choices"] = std::move(choices);
  out["usage"] = usage();
  out["timings"] = timings();
  if (body_.return_token_ids && body_.chat) out["prompt_token_ids"] = prompts_[0].tokens;
  send_json(response, out);
  return true;
}

bool Generation::send(EventWriter& writer, Json choice, Json timings) {
  Json chunk = head(body_.chat ? "chat.completion.chunk" : "text_completion");
  chunk["choices"] = Json::array({std::move(choice)});
  if (body_.include_usage) chunk["usage"] = Json();
  if (!timings.is_null()) chunk["timings"] = std::move(timings);
  return writer.data(chunk);
}

// What a stream says of an answer before its first token.
bool Generation::send_begin(EventWriter& writer, size_t i) {
  Choice& c = choices_[i];
  c.begun = true;
  const auto add_prompt = [&](Json& out) {
    if (body_.return_token_ids) out["prompt_token_ids"] = prompts_[prompt_of(i)].tokens;
  };
  if (body_.chat) {
    Json out = choice(i, "delta", {{"role", "assistant"}, {"content", ""}}, {}, {});
    add_prompt(out);
    return send(writer, std::move(out));
  }
  if (!body_.echo) return true;
  Json out = choice(i, "text", valid_utf8(body_.prompt_texts[prompt_of(i)]),
                    body_.logprobs ? logprobs(c, prompt_tokens(i)) : Json(), {});
  add_prompt(out);
  return send(writer, std::move(out));
}

bool Generation::send_part(EventWriter& writer, size_t i, AnswerPart part, size_t& num_open) {
  Choice& c = choices_[i];
  if (part.finished &&
      (part.reason == FinishReason::kError || part.reason == FinishReason::kCancelled))
    fail(part);
  Json ids = Json::array();
  if (body_.return_token_ids)
    for (const AnsweredToken& token : part.tokens) ids.push_back(token.id);
  const auto tokens = body_.logprobs ? c.shown.take(part) : std::vector<AnsweredToken>();
  const bool nothing = part.text.empty() && tokens.empty() && ids.empty();
  if (nothing && !part.finished) return true;
  if (!c.begun && !send_begin(writer, i)) return false;
  const char* key = body_.chat ? "delta" : "text";
  if (!nothing) {
    Json text = body_.chat ? Json{{"content", std::move(part.text)}} : Json(std::move(part.text));
    Json out = choice(i, key, std::move(text), logprobs(c, tokens), {});
    if (body_.return_token_ids) out["token_ids"] = std::move(ids);
    if (!send(writer, std::move(out))) return false;
  }
  if (!part.finished) return true;
  c.finished = true;
  --num_open;
  return send(
      writer,
      choice(i, key, body_.chat ? Json::object() : Json(""), {}, finish_reason_name(part.reason)),
      num_open == 0 ? timings() : Json());
}

// Returns early where the client is gone; what still runs ends with this object.
void Generation::stream(EventWriter& writer) {
  auto last_sent = Clock::now();
  bool waits_long = false;
  const bool waits = body_.echo && body_.logprobs;  // for the prompt's log-probabilities
  for (size_t i = 0; !waits && i < choices_.size(); ++i)
    if (!send_begin(writer, i)) return;
  for (size_t num_open = answers_.size(); num_open > 0;) {
    answers_.wait(waits_long ? kLookPeriod : kSoon);
    bool sent = false;
    for (size_t i = 0; i < answers_.size(); ++i) {
      if (choices_[i].finished) continue;
      AnswerPart part = answers_[i].take();
      if (!part.finished && part.text.empty() && part.tokens.empty()) continue;
      if (!send_part(writer, i, std::move(part), num_open)) return;
      sent = true;
    }
    const auto now = Clock::now();
    if (sent) last_sent = now;
    // A little early: what is sent last must arrive in time.
    if (now - last_sent + kLookPeriod >= std::chrono::seconds(served_.ping_seconds)) {
      if (!writer.comment("ping")) return;
      last_sent = now;
    }
    if (!sent && !writer.client_is_there()) return;
    if (!sent && !std::exchange(waits_long, true)) give_back_unused_stack();
  }
  if (body_.include_usage) {
    Json chunk = head(body_.chat ? "chat.completion.chunk" : "text_completion");
    chunk["choices"] = Json::array();
    chunk["usage"] = usage();
    if (!writer.data(chunk)) return;
  }
  if (!writer.write("data: [DONE]\n\n")) return;
}

void generate(Served& served, GenerationBody body, const Request& request, Response& response) {
  const bool stream = body.stream;
  auto generation = std::make_shared<Generation>(served, std::move(body));
  if (stream)
    return send_events(response, [generation](EventWriter& writer) { generation->stream(writer); });
  if (!generation->answer_whole(request, response)) response.status = 499;  // nobody reads it
}

}  // namespace

void add_generation_routes(HttpServer& http, Served& served) {
  http.post("/v1/chat/completions", [&](const Request& request, Response& response) {
    generate(served, read_chat_body(parse_body(request.body), served, key_salt(response)), request,
             response);
  });
  http.post("/v1/completions", [&](const Request& request, Response& response) {
    generate(served, read_completion_body(parse_body(request.body), served, key_salt(response)),
             request, response);
  });
}

}  // namespace pagedkv
