#include "server/answer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "engine/kv_settings.h"
#include "models/toy/toy_model.h"
#include "server/api_error.h"
#include "server/token_text.h"

namespace pagedkv {
namespace {

using std::chrono::milliseconds;

struct Fixture {
  explicit Fixture(EngineOptions options = {}, ToyOptions toy = {})
      : model(make_toy_model(toy)),
        pool(pool_options(model->info(), {})),
        engine(*model, *tokenizer, pool, make_toy_sampler, options),
        loop(engine) {}
  GenerationRequest request(const std::string& prompt, int64_t max_new_tokens) const {
    GenerationRequest r;
    r.prompt = tokenizer->tokenize(prompt, true, true);
    r.max_new_tokens = max_new_tokens;
    return r;
  }
  std::unique_ptr<Model> model;
  std::unique_ptr<Tokenizer> tokenizer = make_toy_tokenizer();
  PagePool pool;
  Engine engine;
  EngineLoop loop;
};

// Takes an answer's parts until its end, waiting `pause` before each; all that came, in one part.
AnswerPart read_all(Answers& answers, Answer& answer, milliseconds pause = milliseconds(0)) {
  AnswerPart out;
  while (!out.finished) {
    answers.wait(milliseconds(100));
    std::this_thread::sleep_for(pause);
    AnswerPart part = answer.take();
    out.text += part.text;
    out.tokens.insert(out.tokens.end(), part.tokens.begin(), part.tokens.end());
    out.finished = part.finished;
    out.reason = part.reason;
    out.error = part.error;
  }
  return out;
}

TEST(Answers, SlowAndFastReadersReadTheSame) {
  Fixture f;
  Answers fast(f.loop, 4096, true), slow(f.loop, 4096, true), whole(f.loop, 4096, false);
  for (Answers* each : {&fast, &slow, &whole}) each->add(f.request("hello", 100), 2, true);
  for (size_t i : {0, 1}) {
    const AnswerPart a = read_all(fast, fast[i]), b = read_all(slow, slow[i], milliseconds(5)),
                     c = read_all(whole, whole[i]);
    EXPECT_EQ(a.text.size(), 100u);
    EXPECT_EQ(a.text, b.text);
    EXPECT_EQ(a.text, c.text);
    EXPECT_EQ(a.tokens.size(), 100u);
    EXPECT_EQ(a.reason, FinishReason::kLength);
    EXPECT_EQ(fast[i].counts().generated, 100);
  }
}

TEST(Answers, GoingEndsWhatRuns) {
  Fixture f({.max_seqs = 1});
  for (int i = 0; i < 20; ++i) {
    Answers answers(f.loop, 4096, true);
    answers.add(f.request("abc", -1), 2, false);
    answers.add(f.request("def", -1), 1, false);
    if (i % 2) answers.wait(milliseconds(5));
  }
  EXPECT_TRUE(f.loop.wait_idle(std::chrono::seconds(60)));
  EXPECT_EQ(f.loop.call([&](Engine&) { return f.pool.stats().pages_held; }), 0);
}

TEST(Answers, AnAnswerThatWasRefusedNeverWas) {
  Fixture f;
  Answers answers(f.loop, f.engine.context(), true);
  try {
    answers.add(f.request(std::string(5000, 'a'), 1), 2, false);
    FAIL() << "a prompt longer than the context";
  } catch (const ApiError& error) {
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.code, "context_length_exceeded");
    EXPECT_EQ(error.members["n_prompt_tokens"], 5000);
    EXPECT_EQ(error.members["n_ctx"], 4096);
  }
  EXPECT_THROW(answers.add(f.request("", 1), 1, false), std::invalid_argument);
}

TEST(TokenText, BytesThatAreNoTextKeepTheirDifference) {
  EXPECT_EQ(token_text("abc"), "abc");
  EXPECT_EQ(token_text("\xf0\x9f"), "bytes:\\xf0\\x9f");
  EXPECT_EQ(shown_logprob(-INFINITY), -9999.0);
  EXPECT_EQ(shown_logprob(NAN), -9999.0);
  EXPECT_EQ(shown_logprob(-0.5), -0.5);
}

TEST(TokenText, TokensWaitForTheirText) {
  const auto tokenizer = make_toy_tokenizer();
  const auto part = [](const std::string& text, const std::string& tokens, bool finished,
                       FinishReason reason) {
    AnswerPart out;
    out.text = text;
    for (const char c : tokens) out.tokens.push_back({static_cast<uint8_t>(c), -1.0, {}});
    out.finished = finished;
    out.reason = reason;
    return out;
  };
  const auto ids = [](const std::vector<AnsweredToken>& tokens) {
    std::string out;
    for (const AnsweredToken& token : tokens) out += static_cast<char>(token.id);
    return out;
  };
  ShownTokens stopped(*tokenizer);
  EXPECT_EQ(ids(stopped.take(part("D", "DG", false, FinishReason::kStop))), "D");
  EXPECT_EQ(ids(stopped.take(part("", "H", false, FinishReason::kStop))), "");
  EXPECT_EQ(ids(stopped.take(part("GH", "G", false, FinishReason::kStop))), "GH");
  EXPECT_EQ(ids(stopped.take(part("", "HI", true, FinishReason::kStop))), "");
  ShownTokens cut(*tokenizer);
  EXPECT_EQ(ids(cut.take(part("A", "A\xf0", true, FinishReason::kLength))), "A\xf0");
}

TEST(TokenText, CompletionOffsetsCountCharacters) {
  const auto tokenizer = make_toy_tokenizer();
  int64_t offset = 0;
  const Json first = completion_logprobs(
      *tokenizer, {{'a', std::nullopt, {}}, {0xc3, -1.0, {}}, {0xa4, -2.0, {}}}, offset);
  EXPECT_EQ(first["text_offset"].dump(), "[0,1,2]");
  EXPECT_TRUE(first["token_logprobs"][0].is_null());
  EXPECT_EQ(first["top_logprobs"][2].dump(), "{\"bytes:\\\\xa4\":-2.0}");
  EXPECT_EQ(offset, 2);
}

}  // namespace
}  // namespace pagedkv
