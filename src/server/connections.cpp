#include "server/connections.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "pagedkv/base/log.h"

namespace pagedkv {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kStackBytes = size_t{256} << 10;
// What a client that is refused, or whose connection ends, may still send before the socket is closed: with unread bytes
// the kernel would reset the connection, and the answer might never be read.
constexpr milliseconds kLinger{200};
constexpr size_t kMostGuests = 256;

// A new connection's first request is on its way for so long.
constexpr milliseconds kFirstRequest{1000};
// A connection keeps its thread so long for a next request.
constexpr milliseconds kGrace{50};

int poll_one(int socket, short events, milliseconds timeout) {
  pollfd p{socket, events, 0};
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    const int n = poll(&p, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (n >= 0 || errno != EINTR) return n;
  }
}

class ConnectionStream final : public httplib::Stream {
 public:
  ConnectionStream(int socket, const ConnectionLimits& limits) : socket_(socket), limits_(limits) {}

  // The clock of a request starts.
  void begin_request() {
    deadline_ = Clock::now() + limits_.receive;
    answered_ = false;
  }
  // Whether the answer said that the connection ends: what follows a broken request is no request.
  bool said_close() const { return said_close_; }

  bool is_readable() const override { return first_ < last_; }
  bool wait_readable() const override {
    return is_readable() || poll_one(socket_, POLLIN, time_left()) > 0;
  }
  bool wait_writable() const override { return poll_one(socket_, POLLOUT, limits_.send) > 0; }
  bool is_peer_alive() const override {
    char c;
    const ssize_t n = recv(socket_, &c, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
  }
  ssize_t read(char* data, size_t size) override {
    if (!is_readable()) {
      if (!wait_readable()) {
        error_ = httplib::Error::Timeout;
        return -1;
      }
      ssize_t n;
      do n = recv(socket_, buffer_.data(), buffer_.size(), 0);
      while (n < 0 && errno == EINTR);
      if (n <= 0) {
        error_ = n == 0 ? httplib::Error::ConnectionClosed : httplib::Error::Read;
        return n;
      }
      first_ = 0;
      last_ = static_cast<size_t>(n);
    }
    size = std::min(size, last_ - first_);
    std::memcpy(data, buffer_.data() + first_, size);
    first_ += size;
    return static_cast<ssize_t>(size);
  }
  ssize_t write(const char* data, size_t size) override {
    const std::string_view head(data, size);
    // cpp-httplib writes all headers at once; a 100 Continue is no answer.
    if (!answered_ && head.starts_with("HTTP/1.1 ") && !head.starts_with("HTTP/1.1 100")) {
      answered_ = true;
      said_close_ = head.substr(0, head.find("\r\n\r\n") + 2).find("\r\nConnection: close\r\n") !=
                    std::string_view::npos;
    }
    if (!wait_writable()) {
      error_ = httplib::Error::Timeout;
      return -1;
    }
    ssize_t n;
    do n = send(socket_, data, size, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n;
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return socket_; }
  time_t duration() const override { return 0; }
  const char* buffered_data(size_t& size) const override {
    size = last_ - first_;
    return size == 0 ? nullptr : buffer_.data() + first_;  // who asks takes null alone for nothing
  }
  void consume_buffered(size_t size) override { first_ += size; }

 private:
  milliseconds time_left() const {
    return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(deadline_ - Clock::now()));
  }

  int socket_;
  const ConnectionLimits& limits_;
  Clock::time_point deadline_{};
  std::array<char, 4096> buffer_;
  size_t first_ = 0, last_ = 0;
  bool answered_ = false, said_close_ = false;
};

void linger_and_close(int socket) {
  shutdown(socket, SHUT_WR);
  const auto deadline = Clock::now() + kLinger;
  char rest[4096];
  for (size_t total = 0; total < size_t{1} << 20;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0 || poll_one(socket, POLLIN, left) <= 0) break;
    const ssize_t n = recv(socket, rest, sizeof rest, MSG_DONTWAIT);
    if (n <= 0) break;
    total += static_cast<size_t>(n);
  }
  close(socket);
}

}  // namespace

OverflowDesk::OverflowDesk(DeskAnswers answers) : coming_answers_(std::move(answers)) {
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) != 0)
    throw std::system_error(errno, std::generic_category(), "a pipe");
  thread_ = std::thread([this] { run(); });
}

OverflowDesk::~OverflowDesk() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  [[maybe_unused]] const ssize_t n = write(wake_[1], "", 1);
  thread_.join();
  close(wake_[0]);
  close(wake_[1]);
}

void OverflowDesk::set(DeskAnswers answers) {
  const std::lock_guard lock(mutex_);
  coming_answers_ = std::move(answers);
}

void OverflowDesk::take(int socket) {
  {
    const std::lock_guard lock(mutex_);
    coming_.push_back(socket);
  }
  [[maybe_unused]] const ssize_t n = write(wake_[1], "", 1);  // a full pipe wakes too
}

// False: it is done with.
bool OverflowDesk::serve(Guest& guest) {
  char part[4096];
  const ssize_t n = recv(guest.socket, part, sizeof part, MSG_DONTWAIT);
  if (n == 0) return false;
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (guest.answered) return true;  // what it still sends is read and dropped
  guest.head.append(part, static_cast<size_t>(n));
  if (guest.head.find('\n') == std::string::npos && guest.head.size() < sizeof part) return true;
  const bool health =
      guest.head.starts_with("GET /health ") || guest.head.starts_with("GET /health?");
  const std::string& answer = health ? answers_.health : answers_.refusal;
  // A fresh socket's buffer holds the answer, so nothing is left over.
  if (send(guest.socket, answer.data(), answer.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
    return false;
  shutdown(guest.socket, SHUT_WR);
  guest.answered = true;
  guest.head.clear();
  guest.deadline = Clock::now() + kLinger;
  return true;
}

void OverflowDesk::run() {
  std::list<Guest> guests;
  for (;;) {
    std::vector<pollfd> polled{{wake_[0], POLLIN, 0}};
    for (const Guest& guest : guests) polled.push_back({guest.socket, POLLIN, 0});
    poll(polled.data(), polled.size(), guests.empty() ? -1 : 50);
    char wakes[256];
    while (read(wake_[0], wakes, sizeof wakes) > 0) {
    }
    size_t i = 1;
    const auto now = Clock::now();
    for (auto it = guests.begin(); it != guests.end(); ++i) {
      const bool more = polled[i].revents == 0 || serve(*it);
      if (more && now < it->deadline) {
        ++it;
        continue;
      }
      if (!it->answered)
        send(it->socket, answers_.refusal.data(), answers_.refusal.size(),
             MSG_DONTWAIT | MSG_NOSIGNAL);
      close(it->socket);
      it = guests.erase(it);
    }
    const std::lock_guard lock(mutex_);
    answers_ = coming_answers_;
    for (const int socket : coming_) {
      if (guests.size() >= kMostGuests || ending_) {
        send(socket, answers_.refusal.data(), answers_.refusal.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        close(socket);
        continue;
      }
      guests.push_back({socket, now + std::chrono::seconds(1)});
    }
    coming_.clear();
    if (!ending_) continue;
    for (const Guest& guest : guests) close(guest.socket);
    return;
  }
}

// cpp-httplib's way to say that a connection has come; it goes to the lobby at once.
class ConnectionServer::Adopter final : public httplib::TaskQueue {
 public:
  explicit Adopter(ConnectionServer& server) : server_(server) {}

  bool enqueue(std::function<void()> connection) override {
    connection();
    return true;
  }
  void shutdown() override {
    std::unique_lock lock(server_.mutex_);
    server_.closing_ = true;
    server_.wake_lobby();
    server_.gone_.wait(lock,
                       [&] { return server_.connections_.empty() && server_.num_threads_ == 0; });
  }

 private:
  ConnectionServer& server_;
};

ConnectionServer::ConnectionServer(ConnectionLimits limits, DeskAnswers loading, DeskAnswers busy)
    : limits_(limits), busy_(std::move(busy)), desk_(std::move(loading)) {
  new_task_queue = [this] { return new Adopter(*this); };
  set_tcp_nodelay(true);
  lobby_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{EPOLLIN, {nullptr}};
  if (lobby_ < 0 || wake_ < 0 || epoll_ctl(lobby_, EPOLL_CTL_ADD, wake_, &event) != 0)
    throw std::system_error(errno, std::generic_category(), "epoll");
  lobby_thread_ = std::thread([this] { run_lobby(); });
}

ConnectionServer::~ConnectionServer() {
  end_loading();
  {
    const std::lock_guard lock(mutex_);
    closing_ = ending_ = true;
  }
  wake_lobby();
  lobby_thread_.join();
  close(lobby_);
  close(wake_);
}

void ConnectionServer::begin_loading() {
  const std::lock_guard lock(loader_mutex_);
  loading_ = true;
  loader_ = std::thread([this] {
    while (loading_) {
      if (poll_one(svr_sock_, POLLIN, milliseconds(20)) <= 0) continue;
      const int socket = accept4(svr_sock_, nullptr, nullptr, SOCK_CLOEXEC);
      if (socket >= 0) desk_.take(socket);
    }
  });
}

void ConnectionServer::end_loading() {
  const std::lock_guard lock(loader_mutex_);
  loading_ = false;
  if (loader_.joinable()) loader_.join();
  desk_.set(busy_);
}

void ConnectionServer::widen_backlog() noexcept {
  ::listen(svr_sock_, std::max(128, limits_.max_connections));  // the kernel has a limit of its own
}

void ConnectionServer::wake_lobby() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(wake_, &one, sizeof one);
}

// Called by the listener, for each connection that has come.
bool ConnectionServer::process_and_close_socket(socket_t socket) {
  {
    const std::lock_guard lock(mutex_);
    const auto count = static_cast<int>(connections_.size());
    if (!closing_ && (count < limits_.max_connections || make_room())) {
      const Handle c = connections_.insert(connections_.end(), {socket, {}, {}, Clock::now()});
      if (enter_lobby(c)) return true;
      connections_.erase(c);
    }
  }
  desk_.take(socket);
  return false;
}

// Ends the connection that has waited longest, if there is one on which nothing has come. One that is new has its request on
// the way.
bool ConnectionServer::make_room() {
  const auto new_since = Clock::now() - kFirstRequest;
  Handle longest = connections_.end();
  for (Handle c = connections_.begin(); c != connections_.end(); ++c)
    if (c->waits && (c->answered || c->since < new_since) &&
        (longest == connections_.end() || c->since < longest->since)) {
      char first;
      if (recv(c->socket, &first, 1, MSG_PEEK | MSG_DONTWAIT) <= 0) longest = c;
    }
  if (longest == connections_.end()) return false;
  close(longest->socket);  // which takes it out of the lobby
  leave(longest);
  return true;
}

bool ConnectionServer::enter_lobby(Handle connection) {
  if (closing_) return false;
  epoll_event event{EPOLLIN, {&*connection}};
  if (epoll_ctl(lobby_, EPOLL_CTL_ADD, connection->socket, &event) != 0) return false;
  connection->waits = true;
  connection->since = Clock::now();
  return true;
}

void ConnectionServer::leave(Handle connection) {
  connections_.erase(connection);
  gone_.notify_all();
}

void ConnectionServer::run_lobby() {
  std::array<epoll_event, 64> events;
  auto next_look = Clock::now();
  for (;;) {
    const int n = epoll_wait(lobby_, events.data(), static_cast<int>(events.size()), 1000);
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < n; ++i) {
      uint64_t wakes;
      if (events[i].data.ptr == nullptr)
        while (read(wake_, &wakes, sizeof wakes) > 0) {
        }
      else
        look_at(*static_cast<Connection*>(events[i].data.ptr));
    }
    if (closing_ || Clock::now() >= next_look) {
      end_overdue();
      next_look = Clock::now() + std::chrono::seconds(1);
    }
    if (ending_) return;
  }
}

// Something has come on a connection that waits: a request, or its end.
void ConnectionServer::look_at(Connection& connection) {
  const auto handle =
      std::ranges::find_if(connections_, [&](const Connection& c) { return &c == &connection; });
  if (handle == connections_.end() || !handle->waits) return;  // it has made room
  char c;
  const ssize_t n = recv(handle->socket, &c, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  epoll_ctl(lobby_, EPOLL_CTL_DEL, handle->socket, nullptr);
  handle->waits = false;
  if (n > 0) return start_thread(handle);
  close(handle->socket);
  leave(handle);
}

void ConnectionServer::end_overdue() {
  const auto overdue = Clock::now() - limits_.idle;
  for (Handle c = connections_.begin(); c != connections_.end();) {
    const Handle each = c++;
    if (!each->waits || (!closing_ && each->since > overdue)) continue;
    close(each->socket);  // which takes it out of the lobby
    leave(each);
  }
}

void ConnectionServer::start_thread(Handle connection) {
  struct Start {
    ConnectionServer& server;
    Handle connection;
  };
  auto start = std::make_unique<Start>(Start{*this, connection});
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  const auto run = [](void* p) -> void* {
    const std::unique_ptr<Start> own(static_cast<Start*>(p));
    ConnectionServer& server = own->server;
    server.serve(own->connection);
    const std::lock_guard lock(server.mutex_);
    --server.num_threads_;
    server.gone_.notify_all();
    return nullptr;
  };
  ++num_threads_;
  const int error = pthread_create(&thread, &attributes, run, start.get());
  pthread_attr_destroy(&attributes);
  if (error == 0) {
    start.release();
    return;
  }
  warn_once("connection threads", "no thread for a connection (" +
                                      std::generic_category().message(error) + "): it is refused");
  --num_threads_;
  desk_.take(connection->socket);
  leave(connection);
}

// Requests, until none follows at once.
void ConnectionServer::serve(Handle connection) {
  const int socket = connection->socket;
  bool waits = false;
  serve_guarded([&] {
    ConnectionStream stream(socket, limits_);
    bool ended = false;
    do {
      stream.begin_request();
      if (!process_request(stream, "", 0, "", 0, /*close_connection=*/false, ended, nullptr) ||
          stream.said_close())
        ended = true;
    } while (!ended && (stream.is_readable() || poll_one(socket, POLLIN, kGrace) > 0));
    const std::lock_guard lock(mutex_);
    connection->answered = true;
    waits = !ended && svr_sock_ != INVALID_SOCKET && enter_lobby(connection);
    return true;
  });
  if (waits) return;  // and may already have a new thread
  linger_and_close(socket);
  const std::lock_guard lock(mutex_);
  leave(connection);
}

namespace {

// Its own thread alone writes what is there, so a sanitizer has nothing to say.
__attribute__((no_sanitize_address, no_sanitize_thread)) bool is_zero(uintptr_t page, size_t size) {
  const auto* words = reinterpret_cast<const uint64_t*>(page);
  uint64_t any = 0;
  for (size_t i = 0; i < size / sizeof(uint64_t); ++i) any |= words[i];
  return any == 0;
}

}  // namespace

void give_back_unused_stack() noexcept {
  constexpr uintptr_t kPage = 4096, kCalls = 8192;  // what the calls from here to the kernel need
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
  void* lowest;
  size_t size;
  const int failed = pthread_attr_getstack(&attributes, &lowest, &size);
  pthread_attr_destroy(&attributes);
  if (failed != 0 || size > size_t{1} << 20) return;
  const auto begin = (reinterpret_cast<uintptr_t>(lowest) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(lowest) + size) / kPage * kPage;
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) / kPage * kPage;
  const auto give_back = [](uintptr_t from, uintptr_t to) {
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
  };
  give_back(begin, here - kCalls);
  // At its top lie the thread-local variables of all libraries, which the C library has set to zero: of what a thousand
  // waiting connections take, these pages are 12 MiB of 50. A page of zeros that is given back reads as zeros.
  for (uintptr_t page = here + kPage; page < end; page += kPage)
    if (is_zero(page, kPage)) give_back(page, page + kPage);
}

}  // namespace pagedkv
