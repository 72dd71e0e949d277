#include "server/http_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cpp-httplib/httplib.h>

#include <atomic>
#include <future>
#include <thread>
#include <vector>

namespace pagedkv {
namespace {

int connect_to(int port) {
  const int s = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(s, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const timeval limit{60, 0};
  setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  return s;
}

void send_text(int s, const std::string& text) {
  EXPECT_EQ(send(s, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
}

// What comes until the server closes.
std::string read_to_end(int s) {
  std::string out;
  char part[4096];
  for (ssize_t n; (n = recv(s, part, sizeof part, 0)) > 0;)
    out.append(part, static_cast<size_t>(n));
  close(s);
  return out;
}

std::string ask(int port, const std::string& head, const std::string& body = "") {
  const int s = connect_to(port);
  send_text(s, head + "\r\nHost: x\r\nConnection: close\r\n" +
                   (body.empty() ? "" : "Content-Length: " + std::to_string(body.size()) + "\r\n") +
                   "\r\n" + body);
  return read_to_end(s);
}

struct Running {
  explicit Running(
      HttpOptions options, const std::function<void(HttpServer&)>& routes = [](HttpServer&) {}) {
    options.port = 0;
    server = std::make_unique<HttpServer>(std::move(options));
    routes(*server);
    port = server->bind();
    thread = std::thread([this] { server->run(); });
    while (ask(port, "GET /health HTTP/1.1").find("200 OK") == std::string::npos)
      std::this_thread::yield();
  }
  ~Running() {
    server->stop();
    thread.join();
  }
  std::unique_ptr<HttpServer> server;
  int port = 0;
  std::thread thread;
};

TEST(HttpServer, HealthIsAnsweredWhenAllThreadsAreBusy) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> busy = 0;
  Running running({.max_connections = 3}, [&](HttpServer& server) {
    server.get("/wait", [&](const httplib::Request&, httplib::Response& response) {
      ++busy;
      released.wait();
      send_json(response, {{"waited", true}});
    });
  });
  std::vector<std::future<std::string>> waiting;
  for (int i = 0; i < 3; ++i)
    waiting.push_back(
        std::async(std::launch::async, [&] { return ask(running.port, "GET /wait HTTP/1.1"); }));
  while (busy < 3) std::this_thread::yield();
  EXPECT_NE(ask(running.port, "GET /health HTTP/1.1").find("200 OK"), std::string::npos);
  const std::string refused = ask(running.port, "GET /wait HTTP/1.1");
  EXPECT_NE(refused.find("503"), std::string::npos);
  EXPECT_NE(refused.find("too_many_connections"), std::string::npos);
  release.set_value();
  for (auto& each : waiting) EXPECT_NE(each.get().find("waited"), std::string::npos);
}

TEST(HttpServer, IdleConnectionsMakeRoom) {
  Running running({.max_connections = 3});
  std::vector<int> idle;
  for (int i = 0; i < 10; ++i) idle.push_back(connect_to(running.port));
  std::string answer;
  do answer = ask(running.port, "GET /nothing HTTP/1.1");
  while (answer.find("503") != std::string::npos);
  EXPECT_NE(answer.find("404"), std::string::npos) << answer;
  for (const int s : idle) close(s);
}

TEST(HttpServer, SlowRequestsEnd) {
  Running running({.receive = std::chrono::seconds(1)});
  const int s = connect_to(running.port);
  send_text(s, "GET /health HTTP/1.1\r\n");
  const std::string answer = read_to_end(s);  // the server closes
  EXPECT_EQ(answer.find("200 OK"), std::string::npos);
}

TEST(HttpServer, NothingFollowsABrokenRequest) {
  Running running({});
  const int s = connect_to(running.port);
  send_text(s, "BROKEN\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n");
  const std::string answer = read_to_end(s);
  EXPECT_NE(answer.find(" 400 "), std::string::npos);
  EXPECT_EQ(answer.find("200 OK"), std::string::npos) << answer;
}

TEST(HttpServer, RequestsInOnePacketAreAllAnswered) {
  Running running({});
  const int s = connect_to(running.port);
  send_text(s,
            "GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\nConnection: "
            "close\r\n\r\n");
  const std::string answer = read_to_end(s);
  const size_t first = answer.find("200 OK");
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(answer.find("200 OK", first + 1), std::string::npos);
}

TEST(HttpServer, BrokenRequestsGetErrors) {
  Running running({.max_body_bytes = 2048}, [](HttpServer& server) {
    server.post("/echo", [](const httplib::Request& request, httplib::Response& response) {
      send_json(response, {{"size", request.body.size()}});
    });
  });
  const std::string json = "\r\nContent-Type: application/json";
  EXPECT_NE(ask(running.port, "POST /echo HTTP/1.1" + json, "{}").find("\"size\":2"),
            std::string::npos);
  EXPECT_NE(ask(running.port, "POST /echo HTTP/1.1", "{}").find(" 415 "), std::string::npos);
  EXPECT_NE(ask(running.port, "POST /echo HTTP/1.1" + json, std::string(4096, 'a')).find(" 413 "),
            std::string::npos);
  for (const char* head : {"GET /health HTTP/9", "GET  /health", "\x01\x02"}) {
    const std::string answer = ask(running.port, head);
    EXPECT_NE(answer.find(" 400 "), std::string::npos) << head << ": " << answer;
    EXPECT_NE(answer.find("\"error\""), std::string::npos) << head;
  }
  const std::string both =
      ask(running.port, "POST /echo HTTP/1.1" + json + "\r\nTransfer-Encoding: chunked", "{}");
  EXPECT_NE(both.find(" 400 "), std::string::npos) << both;
}

TEST(HttpServer, KeysOpenRoutes) {
  Running running({.api_keys = {"one", "two"}}, [](HttpServer& server) {
    server.get("/salt", [](const httplib::Request&, httplib::Response& response) {
      send_json(response, {{"salt", key_salt(response)}});
    });
  });
  const auto salt = [&](const std::string& key) {
    const std::string answer =
        ask(running.port, "GET /salt HTTP/1.1\r\nAuthorization: Bearer " + key);
    const size_t place = answer.find("\"salt\"");
    return place == std::string::npos ? "" : answer.substr(place);
  };
  EXPECT_EQ(salt("three"), "");
  EXPECT_NE(salt("one"), "");
  EXPECT_NE(salt("one"), salt("two"));
  EXPECT_EQ(salt("one"), salt("one"));
  EXPECT_NE(salt("one").find('@'), std::string::npos);
  EXPECT_NE(ask(running.port, "GET /health HTTP/1.1").find("200 OK"), std::string::npos);
  EXPECT_NE(ask(running.port, "GET /salt HTTP/1.1\r\nx-api-key: two").find("200 OK"),
            std::string::npos);
}

TEST(HttpServer, AHandlerMayThrowAnything) {
  Running running({}, [](HttpServer& server) {
    server.get("/throw", [](const httplib::Request&, httplib::Response&) { throw 7; });
    server.get("/stream", [](const httplib::Request&, httplib::Response& response) {
      send_events(response, [](EventWriter& writer) {
        if (writer.data({{"a", 1}})) throw std::runtime_error("a secret");
      });
    });
  });
  EXPECT_NE(ask(running.port, "GET /throw HTTP/1.1").find(" 500 "), std::string::npos);
  const std::string stream = ask(running.port, "GET /stream HTTP/1.1");
  EXPECT_NE(stream.find("data: {\"a\":1}"), std::string::npos);
  EXPECT_NE(stream.find("data: {\"error\""), std::string::npos);
  EXPECT_EQ(stream.find("secret"), std::string::npos);
}

TEST(HttpServer, UntilItRunsItIsLoading) {
  HttpServer server({.port = 0});
  const int port = server.bind();
  for (const char* head : {"GET /health HTTP/1.1", "GET /v1/models HTTP/1.1"}) {
    const std::string answer = ask(port, head);
    EXPECT_NE(answer.find(" 503 "), std::string::npos) << answer;
    EXPECT_NE(answer.find("model_loading"), std::string::npos);
    EXPECT_NE(answer.find("retry-after"), std::string::npos);
  }
}

TEST(HttpServer, APortIsUsedOnce) {
  Running running({});
  HttpServer second({.port = running.port});
  EXPECT_THROW(second.bind(), AddressError);
  EXPECT_THROW(HttpServer({.host = "256.1.1.1", .port = 0}).bind(), AddressError);
  EXPECT_THROW(HttpServer({.max_connections = 0}), std::invalid_argument);
}

}  // namespace
}  // namespace pagedkv
