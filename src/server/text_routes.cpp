#include "server/text_routes.h"

#include <cpp-httplib/httplib.h>

#include "engine/text_stream.h"
#include "server/generation_body.h"
#include "server/token_text.h"

namespace pagedkv {
namespace {

using httplib::Request;
using httplib::Response;

// vLLM's body has `prompt` or `messages`, llama.cpp's has `content`; the answer has the fields of both.
Json tokenize(Served& served, const BodyJson& body) {
  Fields fields(body);
  read_model(fields, served);
  std::vector<int32_t> tokens;
  const bool strings = fields.boolean("return_token_strs").value_or(false);
  const bool pieces = fields.boolean("with_pieces").value_or(false);
  const bool special = fields.boolean("parse_special").value_or(true);
  const auto add = fields.boolean("add_special_tokens");
  const auto llama_add = fields.boolean("add_special");
  if (fields.has("messages")) {
    tokens = read_messages(fields, served).tokens;
  } else {
    const bool llama = !fields.has("prompt") && fields.has("content");
    const auto text = fields.text(llama ? "content" : "prompt");
    if (!text) fields.missing("prompt");
    const bool first = llama ? llama_add.value_or(false) : add.value_or(llama_add.value_or(true));
    tokens = served.text.run([&] { return served.tokenizer.tokenize(*text, first, special); });
  }
  fields.log_unknown();
  Json out{{"count", tokens.size()}, {"max_model_len", served.context}};
  if (pieces) {
    Json list = Json::array();
    for (const int32_t token : tokens)
      list.push_back({{"id", token}, {"piece", token_text(served.tokenizer.piece(token, true))}});
    out["tokens"] = std::move(list);
  } else {
    out["tokens"] = tokens;
  }
  out["token_strs"] = Json();
  if (strings) {
    Json list = Json::array();
    for (const int32_t token : tokens)
      list.push_back(token_text(served.tokenizer.piece(token, true)));
    out["token_strs"] = std::move(list);
  }
  return out;
}

Json detokenize(Served& served, const BodyJson& body) {
  Fields fields(body);
  read_model(fields, served);
  const BodyJson* tokens = fields.array("tokens");
  if (tokens == nullptr) fields.missing("tokens");
  fields.log_unknown();
  const std::string text =
      valid_utf8(text_of(served.tokenizer, read_tokens(*tokens, "tokens", served)));
  return {{"prompt", text}, {"content", text}};
}

}  // namespace

void add_text_routes(HttpServer& http, Served& served) {
  http.post("/tokenize", [&](const Request& request, Response& response) {
    send_json(response, tokenize(served, parse_body(request.body)));
  });
  http.post("/detokenize", [&](const Request& request, Response& response) {
    send_json(response, detokenize(served, parse_body(request.body)));
  });
  http.post("/apply-template", [&](const Request& request, Response& response) {
    const BodyJson body = parse_body(request.body);
    Fields fields(body);
    read_model(fields, served);
    send_json(response, {{"prompt", read_messages(fields, served).text}});
  });
  http.post("/v1/chat/completions/input_tokens", [&](const Request& request, Response& response) {
    const BodyJson body = parse_body(request.body);
    Fields fields(body);
    read_model(fields, served);
    const size_t count = read_messages(fields, served).tokens.size();
    send_json(response, {{"object", "response.input_tokens"}, {"input_tokens", count}});
  });
}

}  // namespace pagedkv
