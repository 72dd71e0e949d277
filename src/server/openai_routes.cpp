#include "server/openai_routes.h"

#include <cpp-httplib/httplib.h>

#include "server/generation_body.h"
#include "server/generation_routes.h"
#include "server/text_routes.h"

namespace pagedkv {
namespace {

using httplib::Request;
using httplib::Response;

Json model_json(const Served& served, const std::string& name) {
  return {{"id", name},
          {"object", "model"},
          {"created", served.created},
          {"owned_by", "pagedkv"},
          {"root", served.names.front()},
          {"max_model_len", served.context},
          {"meta",
           {{"n_vocab", served.info.vocab_size},
            {"n_ctx", served.context},
            {"n_ctx_train", served.info.context_length},
            {"n_params", served.info.num_params},
            {"size", served.info.weight_bytes}}}};
}

[[noreturn]] void not_here(const std::string& what) {
  throw ApiError(404, what + " This server answers /v1/chat/completions and /v1/completions.");
}

// A client with a key of its own forgets what is its own; else all is forgotten. A body may name one salt.
void reset_prefix_cache(Served& served, const Request& request, Response& response) {
  const std::string tenant = key_salt(response);
  std::string salt = tenant;
  if (!request.body.empty()) {
    const BodyJson body = parse_body(request.body);
    Fields fields(body);
    salt = read_salt(fields, salt);
    fields.log_unknown();
  }
  served.loop.call([&](Engine& engine) {
    PrefixIndex& index = engine.prefix_index();
    if (salt.empty()) return index.clear();
    if (salt == tenant) return index.clear_salts(tenant);  // read_salt() puts it before the body's
    index.clear_salt(salt);
  });
  send_json(response, {{"success", true}});
}

}  // namespace

void add_openai_routes(HttpServer& http, Served& served) {
  add_generation_routes(http, served);
  add_text_routes(http, served);
  http.get("/v1/models", [&](const Request&, Response& response) {
    Json data = Json::array();
    for (const std::string& name : served.names) data.push_back(model_json(served, name));
    send_json(response, {{"object", "list"}, {"data", std::move(data)}});
  });
  const auto one_model = [&](const std::string& name, Response& response) {
    check_model(served, name);
    send_json(response, model_json(served, name));
  };
  http.get("/v1/models/:id", [=](const Request& request, Response& response) {
    one_model(request.path_params.at("id"), response);
  });
  // Names like "owner/model".
  http.get("/v1/models/:owner/:id", [=](const Request& request, Response& response) {
    one_model(request.path_params.at("owner") + "/" + request.path_params.at("id"), response);
  });
  http.post("/v1/embeddings",
            [](const Request&, Response&) { not_here("There is no embedding model."); });
  http.post("/v1/responses",
            [](const Request&, Response&) { not_here("There is no /v1/responses."); });
  http.post("/reset_prefix_cache", [&](const Request& request, Response& response) {
    reset_prefix_cache(served, request, response);
  });
}

}  // namespace pagedkv
