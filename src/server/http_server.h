// The HTTP side of the server: who may ask, for what, and how answers and errors look. What is asked for are routes, which
// other files add:
//
//   http.get("/v1/models/:id", [&](const httplib::Request& request, httplib::Response& response) {...});
//
// A handler runs on its connection's thread (256 KiB of stack) and answers, or throws: ApiError, or what to_api_error() knows.
// Every answer has an x-request-id, every error OpenAI's body.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/sha256.h"
#include "server/api_error.h"

namespace httplib {
struct Request;
struct Response;
}  // namespace httplib

namespace pagedkv {

class ConnectionServer;

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8000;             // 0: any that is free
  int max_connections = 1024;  // that have a thread; more are refused
  int64_t max_body_bytes = int64_t{32} << 20;
  std::chrono::seconds idle{60};           // a connection may wait for its next request
  std::chrono::seconds receive{60};        // a request may take to arrive
  std::chrono::seconds send{30};           // a client may take nothing of its answer
  std::vector<std::string> api_keys = {};  // none: everybody may ask
  bool share_between_keys = false;         // else each of several keys has a cache salt of its own
  std::vector<std::string> cors_origins = {};  // pages of these may ask; "*": all
};

// The address cannot be used: taken, or not this machine's.
struct AddressError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class HttpServer {
 public:
  using Handler = std::function<void(const httplib::Request&, httplib::Response&)>;
  enum class Access { kKey, kPublic };  // where there are keys: whether one is needed

  // Throws std::invalid_argument for options outside their limits.
  explicit HttpServer(HttpOptions options);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  // Before run(). ":name" matches one part of a path. HEAD is answered where GET is. A public path has no such part.
  void get(const std::string& path, Handler handler, Access access = Access::kKey);
  void post(const std::string& path, Handler handler, Access access = Access::kKey);
  void remove(const std::string& path, Handler handler, Access access = Access::kKey);  // DELETE

  // Before run(): what GET /health tells beyond its status, to those who may ask for more. It must not wait for a step.
  void set_health_details(std::function<Json()> details);

  // Returns the port; throws AddressError. Until run() all requests are refused (503, model_loading).
  int bind();
  void run();  // answers until stop()
  // From now on requests are refused (503), /health's too; those that run go on.
  void drain();
  bool draining() const noexcept;
  // Ends run(), once the handlers have returned. Streams are cut.
  void stop();

  const HttpOptions& options() const noexcept;

 private:
  struct Impl;
  void add(const char* method, const std::string& path, Handler handler, Access access);
  std::unique_ptr<Impl> impl_;
};

// What the key of a request adds to cache salts, so that tenants with different keys share no pages; empty where keys share.
// It tells nothing of the key. No salt of a request's body can look like it: those have no '@'.
std::string key_salt(const httplib::Response& response);

void send_json(httplib::Response& response, const Json& body, int status = 200);

// Server-sent events.
class EventWriter {
 public:
  virtual ~EventWriter() = default;
  // Each sends at once. False: the client is gone.
  [[nodiscard]] virtual bool write(std::string_view frame) = 0;
  [[nodiscard]] bool data(const Json& json);
  [[nodiscard]] bool comment(std::string_view text);  // one line
  virtual bool client_is_there() = 0;
};

// Answers with a stream: the headers are sent at once, then `stream` runs, once, on the connection's thread, and returns at the
// stream's end. What it throws is sent as an error event.
void send_events(httplib::Response& response, std::function<void(EventWriter&)> stream);

}  // namespace pagedkv
