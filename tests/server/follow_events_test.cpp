#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/kv_routes.h"

namespace pagedkv {
namespace {

// Keeps what is written, up to so many frames; then the client is gone.
struct Client final : EventWriter {
  explicit Client(size_t most) : most(most) {}
  bool write(std::string_view frame) override {
    text += frame;
    if (on_write) on_write();
    return ++writes < most;
  }
  bool client_is_there() override { return writes < most; }
  std::string text;
  size_t writes = 0, most;
  std::function<void()> on_write = nullptr;
};

std::shared_ptr<const PageEvent> cleared() {
  return std::make_shared<PageEvent>(AllPagesCleared());
}

bool never() { return false; }

TEST(FollowEvents, TellsNumbersAndGoesOnWhereItWasLeft) {
  PageEventQueue queue(8);
  for (int i = 0; i < 5; ++i) queue.push(cleared());
  Client client(1);
  follow_events(queue, 3, 60, never, client);
  EXPECT_EQ(client.text,
            "id: 3\ndata: {\"type\":\"AllBlocksCleared\",\"sequence\":3}\n\n"
            "id: 4\ndata: {\"type\":\"AllBlocksCleared\",\"sequence\":4}\n\n");
}

TEST(FollowEvents, TellsWhatWasLost) {
  PageEventQueue queue(2);
  for (int i = 0; i < 5; ++i) queue.push(cleared());
  Client client(1);
  follow_events(queue, 0, 60, never, client);
  EXPECT_TRUE(client.text.starts_with(
      "event: lost\ndata: {\"type\":\"lost\",\"from\":0,\"next\":3,\"count\":3}\n\nid: 3\n"))
      << client.text;
}

TEST(FollowEvents, TellsWhoIsAheadWhereItStands) {
  PageEventQueue queue(2);
  queue.push(cleared());
  Client client(2);
  client.on_write = [&] { queue.push(cleared()); };
  follow_events(queue, 100, 60, never, client);
  EXPECT_TRUE(client.text.starts_with(
      "event: lost\ndata: {\"type\":\"lost\",\"from\":100,\"next\":1,\"count\":null}\n\nid: 1\n"))
      << client.text;
}

TEST(FollowEvents, EndsWhenItIsToldTo) {
  PageEventQueue queue(2);
  Client client(1000);
  std::atomic<bool> over = false;
  std::thread follower([&] { follow_events(queue, 0, 60, [&] { return over.load(); }, client); });
  over = true;
  follower.join();
  EXPECT_EQ(client.text, "");
}

TEST(FollowEvents, IsNeverSilentForLong) {
  PageEventQueue queue(2);
  Client client(1);
  follow_events(queue, 0, 1, never, client);
  EXPECT_EQ(client.text, ": ping\n\n");
}

}  // namespace
}  // namespace pagedkv
