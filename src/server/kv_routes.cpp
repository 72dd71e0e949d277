#include "server/kv_routes.h"

#include <cpp-httplib/httplib.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <thread>

#include "server/generation_body.h"
#include "server/kv_json.h"

namespace pagedkv {
namespace {

using httplib::Request;
using httplib::Response;

constexpr int64_t kMostPrefixes = 1000;
constexpr int64_t kMostPins = 256;  // all of them are looked at when they are listed
constexpr double kMostPinSeconds = 365.0 * 86400;
constexpr auto kPollPeriod = std::chrono::milliseconds(100);

// A whole number of a query or a path.
int64_t number_of(const std::string& name, const std::string& text, int64_t least, int64_t most) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw invalid_value(name, name + " " + in_quotes(std::string_view(text)) +
                                  ": must be a whole number in " + std::to_string(least) + ".." +
                                  std::to_string(most));
  return value;
}

void need_operator(const Response& response, const std::string& what) {
  if (is_tenant(response))
    throw ApiError(
        403, what + " shows what others have stored; with several API keys no key may see it");
}

void need_cache(const Served& served) {
  if (!served.prefix_cache)
    throw ApiError(400, "prompts share no pages here: the server runs without its prefix cache");
}

// A prompt as requests have it, for calls that ask about one.
struct Prompt {
  std::vector<int32_t> tokens;
  std::string salt;
};

Prompt read_prompt(Served& served, Fields& fields, const Response& response) {
  Prompt prompt;
  read_model(fields, served);
  prompt.salt = read_salt(fields, key_salt(response));
  const BodyJson *tokens = fields.array("tokens"), *messages = fields.array("messages"),
                 *text = fields.any("prompt");
  if ((tokens != nullptr) + (messages != nullptr) + (text != nullptr) != 1)
    throw ApiError(400, "give exactly one of tokens, prompt and messages",
                   tokens || messages || text ? "invalid_value" : "missing_required_parameter",
                   "prompt");
  if (tokens != nullptr) {
    prompt.tokens = read_tokens(*tokens, "tokens", served);
  } else if (messages != nullptr) {
    prompt.tokens = read_messages(fields, served).tokens;
  } else if (text->is_array()) {
    prompt.tokens = read_tokens(*text, "prompt", served);
  } else {
    const std::string words = fields.text("prompt").value_or("");
    prompt.tokens = served.text.run([&] { return served.tokenizer.tokenize(words, true, true); });
  }
  if (prompt.tokens.empty()) throw invalid_value("prompt", "the prompt has no tokens");
  if (std::ssize(prompt.tokens) > served.context)
    throw ApiError(400,
                   "the prompt has " + std::to_string(prompt.tokens.size()) +
                       " tokens, the context holds " + std::to_string(served.context),
                   "context_length_exceeded", "prompt");
  return prompt;
}

void show_pages(Served& served, Response& response) {
  const auto maps = served.loop.call([](Engine& engine) {
    std::vector<std::vector<int32_t>> out;
    for (int g = 0; g < engine.pool().num_groups(); ++g) out.push_back(engine.pool().page_map(g));
    return out;
  });
  Json groups = Json::array();
  for (size_t g = 0; g < maps.size(); ++g)
    groups.push_back({{"id", g}, {"num_pages", maps[g].size()}, {"map", page_runs(maps[g])}});
  send_json(response, {{"object", "kv.pages"}, {"groups", groups}});
}

// The pins of salts that begin so.
std::vector<PinnedPrefix> pins_of(Served& served, const std::string& salt) {
  auto pins = served.loop.call([](Engine& engine) { return engine.prefix_index().pins(); });
  std::erase_if(pins, [&](const PinnedPrefix& pin) { return !pin.scope.salt.starts_with(salt); });
  return pins;
}

Json pins_json(Served& served, const std::string& salt) {
  Json out = Json::array();
  for (const PinnedPrefix& pin : pins_of(served, salt))
    out.push_back(pin_json(pin, served.tokenizer));
  return out;
}

void show_prefixes(Served& served, const Request& request, Response& response) {
  int64_t most = 100;
  if (request.has_param("limit"))
    most = number_of("limit", request.get_param_value("limit"), 1, kMostPrefixes);
  const std::string salt = key_salt(response);
  const KnownPrefixes known =
      served.loop.call([&](Engine& engine) { return engine.prefix_index().prefixes(most, salt); });
  Json data = Json::array();
  for (const KnownPrefix& prefix : known.prefixes)
    data.push_back(prefix_json(prefix, served.tokenizer));
  send_json(response, {{"object", "list"},
                       {"data", data},
                       {"complete", known.is_all},
                       {"pins", pins_json(served, salt)}});
}

// As a request with this prompt would find it: the last token is always computed.
void explain(Served& served, const Request& request, Response& response) {
  need_cache(served);
  const BodyJson body = parse_body(request.body);
  Fields fields(body);
  const Prompt prompt = read_prompt(served, fields, response);
  fields.log_unknown();
  const Asker asker = is_tenant(response) ? Asker::kTenant : Asker::kOperator;
  const auto tokens = std::span(prompt.tokens).first(prompt.tokens.size() - 1);
  Json out = explanation_json(served.loop.call([&](Engine& engine) {
    return engine.prefix_index().explain(engine.scope(prompt.salt), tokens, asker);
  }));
  out["prompt_tokens"] = prompt.tokens.size();
  send_json(response, out);
}

void pin(Served& served, const Request& request, Response& response) {
  need_cache(served);
  const BodyJson body = parse_body(request.body);
  Fields fields(body);
  const Prompt prompt = read_prompt(served, fields, response);
  const double seconds = fields.number("ttl_seconds", 0, kMostPinSeconds).value_or(0);
  fields.log_unknown();
  const PinResult result = served.loop.call([&](Engine& engine) {
    PrefixIndex& index = engine.prefix_index();
    if (index.stats().pins >= kMostPins)
      throw ApiError(400, "there are " + std::to_string(kMostPins) +
                              " pins, which is the limit; remove one with DELETE /v1/kv/pins/{id}");
    return index.pin(engine.scope(prompt.salt), prompt.tokens, static_cast<int64_t>(seconds * 1e9));
  });
  Json id, left, refusal;
  if (result.id) id = *result.id;
  if (result.id && seconds > 0) left = seconds;
  if (!result.refusal.empty()) refusal = result.refusal;
  send_json(response, {{"object", "kv.pin"},
                       {"id", id},
                       {"prompt_tokens", prompt.tokens.size()},
                       {"tokens", result.num_tokens},
                       {"seconds_left", left},
                       {"refusal", refusal}});
}

void unpin(Served& served, const Request& request, Response& response) {
  const std::string& text = request.path_params.at("id");
  const PinId id = number_of("id", text, 1, INT64_MAX);
  const std::string salt = key_salt(response);
  const bool is_gone = served.loop.call([&](Engine& engine) {
    PrefixIndex& index = engine.prefix_index();
    const auto is_own = [&](const PinnedPrefix& pin) {
      return pin.id == id && pin.scope.salt.starts_with(salt);
    };
    if (!salt.empty() && std::ranges::none_of(index.pins(), is_own)) return false;
    return index.unpin(id);
  });
  if (!is_gone) throw ApiError(404, "there is no pin " + text, "pin_not_found", "id");
  send_json(response, {{"object", "kv.pin"}, {"id", id}, {"deleted", true}});
}

void send_page_events(HttpServer& http, Served& served, const Request& request,
                      Response& response) {
  need_operator(response, "/v1/kv/events");
  uint64_t next = served.events.next_sequence();
  if (request.has_header("Last-Event-ID"))
    next = 1 + static_cast<uint64_t>(number_of(
                   "Last-Event-ID", request.get_header_value("Last-Event-ID"), 0, INT64_MAX - 1));
  else if (request.has_param("from"))
    next = static_cast<uint64_t>(number_of("from", request.get_param_value("from"), 0, INT64_MAX));
  send_events(response, [&http, &served, next](EventWriter& out) {
    follow_events(
        served.events, next, served.ping_seconds, [&http] { return http.draining(); }, out);
  });
}

}  // namespace

bool is_tenant(const Response& response) { return !key_salt(response).empty(); }

void follow_events(const PageEventQueue& queue, uint64_t next, int ping_seconds,
                   const std::function<bool()>& is_over, EventWriter& out) {
  using Clock = std::chrono::steady_clock;
  auto heard = Clock::now();
  while (!is_over()) {
    const PageEventBatch batch = queue.poll(next, 256);
    std::string frames;
    if (batch.first_sequence != next) {  // smaller: the client followed a server that is no more
      Json count;
      if (batch.first_sequence > next) count = batch.first_sequence - next;
      frames +=
          "event: lost\ndata: " +
          Json({{"type", "lost"}, {"from", next}, {"next", batch.first_sequence}, {"count", count}})
              .dump() +
          "\n\n";
    }
    for (size_t i = 0; i < batch.events.size(); ++i) {
      const uint64_t sequence = batch.first_sequence + i;
      frames += "id: " + std::to_string(sequence) +
                "\ndata: " + event_json(*batch.events[i], sequence).dump() + "\n\n";
    }
    next = batch.next_sequence();
    if (!frames.empty()) {
      if (!out.write(frames)) return;
      heard = Clock::now();
      continue;
    }
    if (Clock::now() - heard >= std::chrono::seconds(ping_seconds)) {
      if (!out.comment("ping")) return;
      heard = Clock::now();
    }
    std::this_thread::sleep_for(kPollPeriod);
    if (!out.client_is_there()) return;
  }
}

void add_kv_routes(HttpServer& http, Served& served) {
  http.get("/v1/kv/pool", [&](const Request&, Response& response) {
    send_json(response, pool_json(served.loop.call(engine_state), served.kv));
  });
  http.get("/v1/kv/pages", [&](const Request&, Response& response) {
    need_operator(response, "/v1/kv/pages");
    show_pages(served, response);
  });
  http.get("/v1/kv/prefixes", [&](const Request& request, Response& response) {
    show_prefixes(served, request, response);
  });
  http.post("/v1/kv/explain", [&](const Request& request, Response& response) {
    explain(served, request, response);
  });
  http.get("/v1/kv/pins", [&](const Request&, Response& response) {
    send_json(response, {{"object", "list"}, {"data", pins_json(served, key_salt(response))}});
  });
  http.post("/v1/kv/pins",
            [&](const Request& request, Response& response) { pin(served, request, response); });
  http.remove("/v1/kv/pins/:id", [&](const Request& request, Response& response) {
    unpin(served, request, response);
  });
  http.get("/v1/kv/events", [&](const Request& request, Response& response) {
    send_page_events(http, served, request, response);
  });
}

}  // namespace pagedkv
