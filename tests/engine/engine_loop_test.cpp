#include "engine/engine_loop.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>

#include "engine/kv_settings.h"
#include "models/toy/toy_model.h"

namespace pagedkv {
namespace {

// What the caller's thread waits for.
struct Answer final : RequestSink {
  void on_token(const TokenEvent& e) override {
    const std::lock_guard lock(mutex);
    text += e.text;
    changed.notify_all();
  }
  void on_finish(FinishReason r, std::string_view rest, std::exception_ptr) override {
    const std::lock_guard lock(mutex);
    EXPECT_FALSE(finished) << "heard of the end twice";
    text += rest;
    reason = r;
    finished = true;
    changed.notify_all();
  }
  FinishReason wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return finished; });
    return reason;
  }
  void wait_for_text() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return finished || !text.empty(); });
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::string text;
  bool finished = false;
  FinishReason reason = FinishReason::kError;
};

struct Fixture {
  explicit Fixture(EngineOptions options = {}, EngineLoopOptions loop_options = {},
                   KvSettings kv = {})
      : pool(pool_options(model->info(), kv)),
        engine(*model, *tokenizer, pool, make_toy_sampler, options),
        loop(std::in_place, engine, loop_options) {}
  GenerationRequest request(const std::string& prompt, int64_t max_new_tokens) const {
    GenerationRequest r;
    r.prompt = tokenizer->tokenize(prompt, true, true);
    r.max_new_tokens = max_new_tokens;
    return r;
  }
  std::vector<RequestId> submit(const std::string& prompt, int64_t n, Answer& answer) {
    RequestSink* const sinks[] = {&answer};
    return loop->submit(request(prompt, n), sinks);
  }
  std::unique_ptr<Tokenizer> tokenizer = make_toy_tokenizer();
  std::unique_ptr<Model> model = make_toy_model();
  PagePool pool;
  Engine engine;
  std::optional<EngineLoop> loop;
};

std::string alone(const std::string& prompt, int64_t n) {
  Fixture f;
  Answer answer;
  f.submit(prompt, n, answer);
  answer.wait();
  return answer.text;
}

TEST(EngineLoop, ServesManyThreadsAtOnce) {
  Fixture f({.prefill_chunk = 16, .max_seqs = 5}, {.max_waiting = 100});
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c)
    clients.emplace_back([&f, c] {
      std::mt19937 random(static_cast<unsigned>(c));
      for (int i = 0; i < 20; ++i) {
        const std::string prompt(1 + random() % 60, static_cast<char>('a' + c));
        Answer answer;
        const auto ids = f.submit(prompt, 20, answer);
        if (random() % 4 == 0) {
          f.loop->cancel(ids);
          answer.wait();
          continue;
        }
        EXPECT_EQ(answer.wait(), FinishReason::kLength);
        EXPECT_EQ(answer.text, alone(prompt, 20));
      }
    });
  for (auto& client : clients) client.join();
  EXPECT_TRUE(f.loop->wait_idle(std::chrono::seconds(30)));
  EXPECT_EQ(f.loop->call([](Engine& e) { return e.num_requests(); }), 0u);
  EXPECT_EQ(f.loop->call([&](Engine&) { return f.pool.stats().pages_held; }), 0);
}

TEST(EngineLoop, RefusesAtOnceWhatIsTooMuchOrCanNeverRun) {
  Fixture f({.max_seqs = 2}, {.max_waiting = 3});
  std::vector<Answer> answers(6);
  for (int i = 0; i < 5; ++i) f.submit("endless", -1, answers[static_cast<size_t>(i)]);
  try {
    f.submit("one more", 1, answers[5]);
    FAIL() << "a sixth request was taken";
  } catch (const QueueFullError& e) {
    EXPECT_STREQ(e.what(), "5 requests run or wait; the limit is 5");
  }
  EXPECT_THROW(f.submit("", 1, answers[5]), std::invalid_argument);
  EXPECT_THROW(f.submit(std::string(5000, 'a'), 1, answers[5]), CapacityError);
  f.loop.reset();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(answers[static_cast<size_t>(i)].finished);
  EXPECT_FALSE(answers[5].finished);
}

TEST(EngineLoop, CancelsWhatRunsAndWhatWaits) {
  Fixture f({.max_seqs = 1});
  Answer running, waiting;
  const auto first = f.submit("running", -1, running), second = f.submit("waiting", -1, waiting);
  running.wait_for_text();
  f.loop->cancel(second);
  EXPECT_EQ(waiting.wait(), FinishReason::kCancelled);
  EXPECT_TRUE(waiting.text.empty());
  f.loop->cancel(first);
  EXPECT_EQ(running.wait(), FinishReason::kCancelled);
  f.loop->cancel(first);  // again: nothing
  EXPECT_TRUE(f.loop->wait_idle(std::chrono::seconds(30)));
  EXPECT_EQ(f.loop->call([&](Engine&) { return f.pool.stats().pages_held; }), 0);
}

TEST(EngineLoop, DrainsAndThenAnswersNobody) {
  Fixture f;
  Answer answer, late;
  f.submit("the last one", 300, answer);
  f.loop->drain();
  EXPECT_THROW(f.submit("too late", 1, late), DrainingError);
  EXPECT_EQ(answer.wait(), FinishReason::kLength);
  EXPECT_TRUE(f.loop->wait_idle(std::chrono::seconds(30)));
  EXPECT_EQ(f.loop->num_requests(), 0);
}

TEST(EngineLoop, CallsBetweenStepsAndPassesErrorsOn) {
  Fixture f;
  Answer answer;
  const auto ids = f.submit("something", -1, answer);
  answer.wait_for_text();
  EXPECT_EQ(f.loop->call([](Engine& e) { return e.num_running(); }), 1);
  EXPECT_THROW(f.loop->call([](Engine&) -> int { throw std::runtime_error("no"); }),
               std::runtime_error);
  f.loop->call([](Engine& e) { e.prefix_index().clear(); });
  f.loop->cancel(ids);
  EXPECT_EQ(answer.wait(), FinishReason::kCancelled);
}

// Idle memory goes back while nobody asks for anything.
TEST(EngineLoop, LooksAfterThePoolWithoutRequests) {
  KvSettings kv;
  const auto model = make_toy_model();
  const auto tokenizer = make_toy_tokenizer();
  PagePoolOptions options = pool_options(model->info(), kv);
  options.num_pages = 16;
  options.idle_seconds = 0.2;
  PagePool pool(options);
  Engine engine(*model, *tokenizer, pool, make_toy_sampler, {.prefix_cache = false});
  EngineLoop loop(engine);
  Answer answer;
  RequestSink* const sinks[] = {&answer};
  GenerationRequest request;
  request.prompt = tokenizer->tokenize(std::string(3000, 'a'), true, true);
  request.max_new_tokens = 2;
  loop.submit(request, sinks);
  answer.wait();
  const auto committed = [&] {
    return loop.call([&](Engine&) { return pool.stats().pages_committed; });
  };
  for (int i = 0; i < 300 && committed() > 16; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_LE(committed(), 16);
}

}  // namespace
}  // namespace pagedkv
