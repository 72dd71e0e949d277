// Connections of the HTTP server. One that waits for a request costs a descriptor: one thread, the lobby, watches all of
// those. While a request is read and answered the connection has a thread of its own, with 256 KiB of stack.
//
// At the limit the connection that has waited longest since an answer makes room. Where all are busy, one thread, the desk, answers
// GET /health, refuses everything else with 503, and closes. So neither idle clients nor long answers keep anybody from
// learning that the server lives.
#pragma once

#include <cpp-httplib/httplib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pagedkv {

struct ConnectionLimits {
  int max_connections = 1024;                 // waiting ones included
  std::chrono::milliseconds idle{60'000};     // between two requests
  std::chrono::milliseconds receive{60'000};  // a whole request, head and body
  std::chrono::milliseconds send{30'000};     // without the client taking a byte
};

// Whole answers: to GET /health, and to everything else.
struct DeskAnswers {
  std::string health, refusal;
};

// Answers connections that get no thread, and closes them.
class OverflowDesk {
 public:
  // Throws std::system_error where there are no descriptors or threads left.
  explicit OverflowDesk(DeskAnswers answers);
  ~OverflowDesk();
  void set(DeskAnswers answers);
  void take(int socket);  // owns it from now on

 private:
  struct Guest {
    int socket;
    std::chrono::steady_clock::time_point deadline;
    bool answered = false;
    std::string head = {};
  };
  void run();
  bool serve(Guest& guest);

  std::mutex mutex_;
  DeskAnswers coming_answers_;
  std::vector<int> coming_;
  bool ending_ = false;
  int wake_[2];          // a pipe
  DeskAnswers answers_;  // the thread's
  std::thread thread_;
};

class ConnectionServer : public httplib::Server {
 public:
  ConnectionServer(ConnectionLimits limits, DeskAnswers loading, DeskAnswers busy);
  ~ConnectionServer() override;

  // Between binding and listening: the desk answers everybody.
  void begin_loading();
  void end_loading();

  // Once it is bound: as many may come at once as may be served.
  void widen_backlog() noexcept;

 private:
  struct Connection {
    int socket;
    bool waits;             // in the lobby
    bool answered = false;  // a request
    std::chrono::steady_clock::time_point since;
  };
  using Handle = std::list<Connection>::iterator;
  class Adopter;

  bool process_and_close_socket(socket_t socket) override;
  bool make_room();
  void start_thread(Handle connection);
  void serve(Handle connection);
  bool enter_lobby(Handle connection);
  void leave(Handle connection);
  void run_lobby();
  void look_at(Connection& connection);
  void end_overdue();
  void wake_lobby() const;

  const ConnectionLimits limits_;
  const DeskAnswers busy_;
  OverflowDesk desk_;
  std::atomic<bool> loading_ = false;
  std::mutex loader_mutex_;
  std::thread loader_;

  mutable std::mutex mutex_;
  std::condition_variable gone_;
  std::list<Connection> connections_;
  int num_threads_ = 0;
  bool closing_ = false;  // nobody waits any more
  bool ending_ = false;   // the lobby too
  int lobby_ = -1;        // epoll
  int wake_ = -1;         // an eventfd
  std::thread lobby_thread_;
};

// Before a long wait: gives back the memory of this thread's stack that holds nothing. Does nothing on a thread with more than
// 1 MiB.
void give_back_unused_stack() noexcept;

}  // namespace pagedkv
