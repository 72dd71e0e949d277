#include "server/operator_routes.h"

#include <cpp-httplib/httplib.h>

#include "engine/metrics.h"
#include "server/kv_json.h"
#include "server/kv_routes.h"

namespace pagedkv {
namespace {

using httplib::Request;
using httplib::Response;

// What does not change while the server runs, so that nobody waits for a step to end.
Json kv_cache_json(const Served& served) {
  return {{"mode", format_label(served.kv)},  // the seed's word
          {"format", format_label(served.kv)},
          {"page_size", served.pool.page_size()},
          {"bytes_per_token", served.pool.bytes_per_token()},
          {"capacity_tokens", served.pool_tokens},
          {"growth", served.kv.dynamic},
          {"prefix_cache", served.prefix_cache},
          {"arithmetic_id", served.info.arithmetic_id}};
}

// llama.cpp's members that we have, then ours.
Json props_json(const Served& served) {
  return {{"default_generation_settings", {{"n_ctx", served.context}}},
          {"total_slots", served.engine.max_seqs()},
          {"model_alias", served.names.front()},
          {"build_info", std::string("pagedkv ") + PAGEDKV_VERSION_TEXT},
          {"system_fingerprint", served.fingerprint},
          {"modalities", {{"vision", false}, {"audio", false}}},
          {"model",
           {{"name", served.info.name},
            {"family", served.info.family},
            {"description", served.info.description},
            {"n_ctx_train", served.info.context_length},
            {"n_vocab", served.info.vocab_size},
            {"n_params", served.info.num_params},
            {"size", served.info.weight_bytes}}},
          {"exact", served.info.exact},
          {"exact_reason", served.info.exact_reason},
          {"kv_cache", kv_cache_json(served)}};
}

void show_slots(Served& served, Response& response) {
  const auto requests = served.loop.call([](Engine& engine) { return engine.requests(); });
  const auto now = RequestProgress::Clock::now();
  const std::string salt = key_salt(response);
  Json out = Json::array();
  for (const RequestState& request : requests)
    if (request.cache_salt.starts_with(salt))
      out.push_back(request_json(request, served.context, now));
  send_json(response, out);
}

}  // namespace

void add_operator_routes(HttpServer& http, Served& served) {
  http.set_health_details([&] {
    return Json{{"exact", served.info.exact},
                {"exact_reason", served.info.exact_reason},
                {"kv_cache", kv_cache_json(served)}};
  });
  http.get(
      "/metrics",
      [&](const Request&, Response& response) {
        response.set_content(served.metrics.text(served.loop.call(engine_state)),
                             "text/plain; version=0.0.4; charset=utf-8");
      },
      served.metrics_public ? HttpServer::Access::kPublic : HttpServer::Access::kKey);
  http.get("/props",
           [&](const Request&, Response& response) { send_json(response, props_json(served)); });
  http.get("/slots", [&](const Request&, Response& response) { show_slots(served, response); });
  http.get("/version", [&](const Request&, Response& response) {
    send_json(response,
              {{"version", PAGEDKV_VERSION_TEXT}, {"system_fingerprint", served.fingerprint}});
  });
}

}  // namespace pagedkv
