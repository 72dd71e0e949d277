#include "server/http_server.h"

#include <atomic>
#include <cstdio>
#include <optional>
#include <utility>

#include "engine/text_stream.h"
#include "pagedkv/base/log.h"
#include "pagedkv/core/page_name.h"
#include "server/connections.h"
#include "server/random_bits.h"

namespace pagedkv {
namespace {

using httplib::Request;
using httplib::Response;

constexpr const char* kRequestId = "x-request-id";
constexpr size_t kMostQuotedUrl = 200;
constexpr const char* kSaltKey = "key_salt";

// A client's own id is used where it cannot confuse a log or a header.
std::string id_of(const Request& request) {
  const std::string id = request.get_header_value("X-Request-Id");
  const auto plain = [](unsigned char c) { return c > 0x20 && c < 0x7f; };
  return !id.empty() && id.size() <= 128 && std::ranges::all_of(id, plain) ? id
                                                                           : random_name("req-");
}

std::string whole_answer(const char* status, const std::string& type, const std::string& body) {
  return std::string("HTTP/1.1 ") + status + "\r\nContent-Type: " + type +
         "\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\nConnection: close\r\nretry-after: 1\r\n\r\n" + body;
}

DeskAnswers desk_answers(const ApiError& refusal, bool healthy) {
  const std::string text =
      whole_answer("503 Service Unavailable", "application/json", error_body(refusal).dump());
  return {healthy ? whole_answer("200 OK", "application/json", R"({"status":"ok"})") : text, text};
}

// Whether a path fits a route's, whose parts that begin with ':' fit anything.
bool fits(std::string_view route, std::string_view path) {
  for (;;) {
    const size_t a = route.find('/'), b = path.find('/');
    const auto own = route.substr(0, a), part = path.substr(0, b);
    if (own.starts_with(':') ? part.empty() : own != part) return false;
    if (a == std::string_view::npos || b == std::string_view::npos) return a == b;  // both end here
    route.remove_prefix(a + 1);
    path.remove_prefix(b + 1);
  }
}

std::string media_type(const Request& request) {
  std::string type = request.get_header_value("Content-Type");
  type.resize(std::min(type.size(), type.find(';')));
  while (!type.empty() && type.back() == ' ') type.pop_back();
  std::ranges::transform(type, type.begin(), [](unsigned char c) { return std::tolower(c); });
  return type;
}

// Letters of a method that HTTP could have, but that no route here does.
bool is_method(const std::string& text) {
  constexpr std::string_view kKnown[] = {"GET",     "HEAD",    "POST",  "PUT",  "DELETE",
                                         "CONNECT", "OPTIONS", "TRACE", "PATCH"};
  return !text.empty() && text.size() <= 32 &&
         std::ranges::all_of(text, [](unsigned char c) { return c >= 'A' && c <= 'Z'; }) &&
         std::ranges::find(kKnown, text) == std::end(kKnown);
}

bool has_body(const Request& request) {
  return request.has_header("Transfer-Encoding") ||
         (request.has_header("Content-Length") &&
          request.get_header_value("Content-Length") != "0");
}

}  // namespace

struct HttpServer::Impl {
  struct Route {
    std::string method, path;
    Access access;
  };
  struct Key {
    Sha256 hash;
    std::string salt;
  };

  explicit Impl(HttpOptions o)
      : options(std::move(o)),
        server({options.max_connections, options.idle, options.receive, options.send},
               desk_answers({503, "the model is being loaded", "model_loading"}, false),
               desk_answers({503,
                             std::to_string(options.max_connections) +
                                 " connections are open, which is the limit",
                             "too_many_connections"},
                            true)) {}

  void check_origin(const Request& request) const;
  std::string given_key(const Request& request) const;
  const Key* find_key(const std::string& key) const;
  void check_key(const Request& request, Response& response) const;
  void tell_health(const Request& request, Response& response) const;
  void check(const Request& request, Response& response) const;
  bool allows(const std::string& origin) const;
  void fail(const ApiError& error, Response& response) const;
  void describe_error(const Request& request, Response& response) const;
  std::string methods_of(const std::string& path) const;
  const Route* find(const std::string& method, const std::string& path) const;

  HttpOptions options;
  std::vector<Key> keys;
  std::function<Json()> health_details;
  std::vector<Route> routes;
  std::atomic<bool> draining = false;
  ConnectionServer server;
};

HttpServer::HttpServer(HttpOptions options) {
  if (options.max_connections < 1)
    throw std::invalid_argument("max_connections " + std::to_string(options.max_connections) +
                                ": must be at least 1");
  impl_ = std::make_unique<Impl>(std::move(options));
  const HttpOptions& o = impl_->options;
  for (const std::string& key : o.api_keys) {
    if (key.empty()) throw std::invalid_argument("an API key is empty");
    const bool own = o.api_keys.size() > 1 && !o.share_between_keys;
    impl_->keys.push_back(
        {sha256(key),
         own ? "key@" + hex(sha256("pagedkv cache salt of " + key)).substr(0, 32) : std::string()});
  }
  auto& server = impl_->server;
  server.set_payload_max_length(static_cast<size_t>(o.max_body_bytes));
  server.set_keep_alive_timeout(o.idle.count());
  server.set_pre_routing_handler([impl = impl_.get()](const Request& request, Response& response) {
    try {
      response.set_header(kRequestId, id_of(request));
      impl->check(request, response);
    } catch (...) {
      impl->fail(to_api_error(std::current_exception()), response);
    }
    return response.status == -1 ? httplib::Server::HandlerResponse::Unhandled
                                 : httplib::Server::HandlerResponse::Handled;
  });
  server.set_error_handler([impl = impl_.get()](const Request& request, Response& response) {
    impl->describe_error(request, response);
  });
  server.set_exception_handler(
      [impl = impl_.get()](const Request&, Response& response, std::exception_ptr error) {
        impl->fail(to_api_error(error), response);
      });
  server.set_post_routing_handler([impl = impl_.get()](const Request& request, Response& response) {
    const std::string origin = request.get_header_value("Origin");
    if (origin.empty() || !impl->allows(origin)) return;
    response.set_header("Access-Control-Allow-Origin", origin);
    response.set_header("Access-Control-Expose-Headers", kRequestId);
    response.set_header("Vary", "Origin");
  });
  get(
      "/health",
      [impl = impl_.get()](const Request& request, Response& response) {
        impl->tell_health(request, response);
      },
      Access::kPublic);
}

HttpServer::~HttpServer() { stop(); }

bool HttpServer::Impl::allows(const std::string& origin) const {
  return std::ranges::any_of(options.cors_origins,
                             [&](const std::string& o) { return o == "*" || o == origin; });
}

void HttpServer::Impl::fail(const ApiError& error, Response& response) const {
  for (const auto& [name, value] : error.headers) response.set_header(name, value);
  send_json(response, error_body(error), error.status);
}

// A browser says for which page it asks. One of another server may ask nothing here, unless it is allowed to: else any web
// page could use a server on its reader's machine.
void HttpServer::Impl::check_origin(const Request& request) const {
  const std::string origin = request.get_header_value("Origin");
  if (origin.empty() || allows(origin)) return;
  const size_t scheme = origin.find("://");
  if (scheme != std::string::npos && origin.substr(scheme + 3) == request.get_header_value("Host"))
    return;
  throw ApiError(403, "pages of " + in_quotes(origin) +
                          " may not ask this server; --cors-origins says which may");
}

std::string HttpServer::Impl::given_key(const Request& request) const {
  const std::string given = request.get_header_value("Authorization");
  if (given.size() > 7 && httplib::detail::case_ignore::equal(given.substr(0, 7), "Bearer "))
    return given.substr(7);
  return request.get_header_value("x-api-key");
}

// Null: it is none of ours.
const HttpServer::Impl::Key* HttpServer::Impl::find_key(const std::string& key) const {
  const Sha256 hash = sha256(key);
  const Key* found = nullptr;
  for (const Key& each : keys) {  // all of them, all bytes of each: time tells nothing
    unsigned differ = 0;
    for (size_t i = 0; i < hash.size(); ++i) differ |= hash[i] ^ each.hash[i];
    if (differ == 0) found = &each;
  }
  return found;
}

void HttpServer::Impl::check_key(const Request& request, Response& response) const {
  if (keys.empty()) return;
  const std::string key = given_key(request);
  const Key* found = find_key(key);
  if (found == nullptr) {
    ApiError error(401,
                   key.empty() ? "an API key is needed: send it as \"Authorization: Bearer KEY\""
                               : "the API key is not one of this server's",
                   "invalid_api_key");
    error.headers["WWW-Authenticate"] = "Bearer";
    throw error;
  }
  response.user_data.set(kSaltKey, std::string(found->salt));
}

// Public: who has no key hears that the server lives, and no more.
void HttpServer::Impl::tell_health(const Request& request, Response& response) const {
  Json body = {{"status", "ok"}};
  if (health_details && (keys.empty() || find_key(given_key(request)) != nullptr))
    body.update(health_details());
  send_json(response, body);
}

const HttpServer::Impl::Route* HttpServer::Impl::find(const std::string& method,
                                                      const std::string& path) const {
  for (const Route& route : routes)
    if (route.method == (method == "HEAD" ? "GET" : method) && fits(route.path, path))
      return &route;
  return nullptr;
}

std::string HttpServer::Impl::methods_of(const std::string& path) const {
  std::string out;
  for (const char* method : {"GET", "HEAD", "POST", "DELETE"})
    if (find(method, path)) out += (out.empty() ? "" : ", ") + std::string(method);
  return out;
}

// Before the body is read. Throws ApiError, or answers, where the request goes no further.
void HttpServer::Impl::check(const Request& request, Response& response) const {
  check_origin(request);
  const std::string methods = methods_of(request.path);
  if (request.method == "OPTIONS" && !methods.empty()) {
    response.set_header("Allow", methods + ", OPTIONS");
    if (request.has_header("Origin")) {
      response.set_header("Access-Control-Allow-Methods", methods);
      response.set_header("Access-Control-Allow-Headers",
                          "Authorization, Content-Type, X-Request-Id, X-Api-Key");
      response.set_header("Access-Control-Max-Age", "600");
    }
    response.status = 204;
    return;
  }
  const Route* route = find(request.method, request.path);
  if (route == nullptr || route->access != Access::kPublic) check_key(request, response);
  if (draining) {
    ApiError error(503, "the server is shutting down and takes no new requests", "shutting_down");
    error.headers["retry-after"] = "5";
    throw error;
  }
  if (route == nullptr) {
    std::string what = request.method + " " + request.path;
    if (what.size() > kMostQuotedUrl) what = what.substr(0, kMostQuotedUrl) + "...";
    if (methods.empty()) throw ApiError(404, "Invalid URL (" + what + ")");
    ApiError error(405, "Method not allowed (" + what + "); this URL takes " + methods);
    error.headers["Allow"] = methods;
    throw error;
  }
  if (request.method != "POST" || !has_body(request)) return;
  const std::string type = media_type(request);
  if (type != "application/json" && !type.ends_with("+json"))
    throw ApiError(415, "Content-Type " + in_quotes(type) + ": must be application/json");
}

// Gives a body to errors that have none: those of cpp-httplib itself.
void HttpServer::Impl::describe_error(const Request& request, Response& response) const {
  if (!response.has_header(kRequestId)) response.set_header(kRequestId, id_of(request));
  if (!response.body.empty()) return;
  if (response.status == 404 && find(request.method, request.path)) response.status = 400;
  // A method that cpp-httplib does not know ends its reading of the request: there is no path yet.
  const std::string path = request.target.substr(0, request.target.find('?'));
  if (response.status == 400 && request.path.empty() && is_method(request.method) &&
      request.version.starts_with("HTTP/1."))
    if (const std::string methods = methods_of(path); !methods.empty()) {
      response.status = 405;
      response.set_header("Allow", methods);
    }
  const auto text = [&]() -> std::string {
    switch (response.status) {
      case 405:
        return "Method not allowed (" + request.method + " " + path + "); this URL takes " +
               methods_of(path);
      case 413:
        return "the body is larger than " + std::to_string(options.max_body_bytes) + " bytes";
      case 414:
        return "the URL is too long";
      case 415:
        return "the body's encoding is not supported";
      case 400:
        return "the request is not HTTP/1.1 as this server reads it, or did not arrive whole";
      default:
        return std::string("the request cannot be answered: ") +
               httplib::status_message(response.status);
    }
  };
  response.set_content(error_body({response.status, text()}).dump(), "application/json");
}

void HttpServer::add(const char* method, const std::string& path, Handler handler, Access access) {
  impl_->routes.push_back({method, path, access});
  auto guarded = [impl = impl_.get(), handler = std::move(handler)](const Request& request,
                                                                    Response& response) {
    try {
      handler(request, response);
    } catch (...) {
      impl->fail(to_api_error(std::current_exception()), response);
    }
  };
  const std::string_view m = method;
  if (m == "GET") impl_->server.Get(path, std::move(guarded));
  if (m == "POST") impl_->server.Post(path, std::move(guarded));
  if (m == "DELETE") impl_->server.Delete(path, std::move(guarded));
}

void HttpServer::get(const std::string& path, Handler handler, Access access) {
  add("GET", path, std::move(handler), access);
}
void HttpServer::post(const std::string& path, Handler handler, Access access) {
  add("POST", path, std::move(handler), access);
}
void HttpServer::remove(const std::string& path, Handler handler, Access access) {
  add("DELETE", path, std::move(handler), access);
}

void HttpServer::set_health_details(std::function<Json()> details) {
  impl_->health_details = std::move(details);
}

int HttpServer::bind() {
  const HttpOptions& o = impl_->options;
  // Two servers must not share a port, so SO_REUSEPORT, cpp-httplib's default, is off.
  impl_->server.set_socket_options([](socket_t socket) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  });
  errno = 0;
  const int port = o.port == 0 ? impl_->server.bind_to_any_port(o.host)
                               : (impl_->server.bind_to_port(o.host, o.port) ? o.port : -1);
  if (port < 0)
    throw AddressError(o.host + " port " + std::to_string(o.port) + ": cannot be listened on (" +
                       (errno ? std::strerror(errno) : "no such address") +
                       "); choose another with --host and --port (0: any free one)");
  impl_->server.widen_backlog();
  impl_->server.begin_loading();
  return port;
}

void HttpServer::run() {
  impl_->server.end_loading();
  if (!impl_->server.listen_after_bind()) throw std::runtime_error("the listening socket failed");
}

void HttpServer::drain() { impl_->draining = true; }
bool HttpServer::draining() const noexcept { return impl_->draining; }
void HttpServer::stop() {
  impl_->server.end_loading();
  impl_->server.stop();
}
const HttpOptions& HttpServer::options() const noexcept { return impl_->options; }

std::string key_salt(const Response& response) {
  const auto* salt = response.user_data.get<std::string>(kSaltKey);
  return salt ? *salt : std::string();
}

void send_json(Response& response, const Json& body, int status) {
  response.status = status;
  response.set_content(body.dump(-1, ' ', false, Json::error_handler_t::replace),
                       "application/json");
}

bool EventWriter::data(const Json& json) {
  return write("data: " + json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n\n");
}

bool EventWriter::comment(std::string_view text) {
  return write(": " + std::string(text) + "\n\n");
}

void send_events(Response& response, std::function<void(EventWriter&)> stream) {
  struct Writer final : EventWriter {
    explicit Writer(httplib::DataSink& s) : sink(s) {}
    bool write(std::string_view frame) override { return sink.write(frame.data(), frame.size()); }
    bool client_is_there() override { return sink.is_writable(); }
    httplib::DataSink& sink;
  };
  response.status = 200;
  response.set_header("Cache-Control", "no-cache");
  response.set_header("X-Accel-Buffering", "no");
  response.set_chunked_content_provider(
      "text/event-stream; charset=utf-8",
      [stream = std::move(stream)](size_t, httplib::DataSink& sink) {
        Writer writer(sink);
        try {
          stream(writer);
        } catch (...) {
          if (!writer.data(error_body(to_api_error(std::current_exception())))) return false;
        }
        sink.done();
        return true;
      });
}

}  // namespace pagedkv
