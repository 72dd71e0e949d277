#include "server/web_routes.h"

#include <cpp-httplib/httplib.h>

#include "server/web_content.h"

namespace pagedkv {
namespace {

void send_text(httplib::Response& response, std::string_view text, const char* type) {
  response.set_header("Cache-Control", "no-cache");
  response.set_header("X-Content-Type-Options", "nosniff");
  response.set_content(text.data(), text.size(), type);
}

}  // namespace

void add_web_routes(HttpServer& http) {
  http.get(
      "/",
      [](const httplib::Request&, httplib::Response& response) {
        response.set_header("Content-Security-Policy", std::string(kChatPagePolicy));
        response.set_header("Referrer-Policy", "no-referrer");
        send_text(response, kChatPage, "text/html; charset=utf-8");
      },
      HttpServer::Access::kPublic);
  http.get("/openapi.json", [](const httplib::Request&, httplib::Response& response) {
    send_text(response, kOpenApi, "application/json");
  });
}

}  // namespace pagedkv
