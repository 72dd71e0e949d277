#include "models/ggml/ggml_text.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"
#include "models/ggml/test_models.h"
#include "models/model.h"

namespace pagedkv::test {
namespace {

TEST(GgmlText, TurnsBytesIntoTokensAndBack) {
  const auto tokenizer = load_tokenizer(model_path("chain.gguf"));
  const auto tokens = tokenizer->tokenize("ABC \xF0\x9F\xA6\x99", true, false);
  EXPECT_EQ(tokens, (std::vector<int32_t>{'A', 'B', 'C', ' ', 0xF0, 0x9F, 0xA6, 0x99}));
  std::string back;
  for (const int32_t token : tokens) back += tokenizer->piece(token, false);
  EXPECT_EQ(back, "ABC \xF0\x9F\xA6\x99");
  EXPECT_EQ(tokenizer->vocab_size(), 288);
  EXPECT_TRUE(tokenizer->tokenize("", true, true).empty());
}

TEST(GgmlText, ReadsControlTokensWhenAskedTo) {
  const auto tokenizer = load_tokenizer(model_path("chain.gguf"));
  EXPECT_EQ(tokenizer->tokenize("A<|end|>", true, true), (std::vector<int32_t>{'A', 256}));
  EXPECT_EQ(tokenizer->tokenize("A<|end|>", true, false).size(), 8u);
  EXPECT_EQ(tokenizer->piece(256, false), "");
  EXPECT_EQ(tokenizer->piece(256, true), "<|end|>");
  EXPECT_TRUE(tokenizer->is_end_of_generation(256));
  EXPECT_FALSE(tokenizer->is_end_of_generation('A'));
  EXPECT_FALSE(tokenizer->is_end_of_generation(-1));
  EXPECT_THROW(tokenizer->piece(288, false), std::invalid_argument);
}

TEST(GgmlText, KnowsTheTokenThatTextsBeginWith) {
  EXPECT_EQ(load_tokenizer(model_path("chain.gguf"))->begin_token(), std::nullopt);
  const auto path = std::filesystem::temp_directory_path() /
                    ("pagedkv_begin_token_" + std::to_string(getpid()) + ".gguf");
  rewrite_gguf(model_path("chain.gguf"), path.string(), [](gguf_context* meta, ggml_context*) {
    gguf_set_val_bool(meta, "tokenizer.ggml.add_bos_token", true);
    gguf_set_val_u32(meta, "tokenizer.ggml.bos_token_id", 257);
  });
  const auto tokenizer = load_tokenizer(path.string());
  std::filesystem::remove(path);
  EXPECT_EQ(tokenizer->begin_token(), 257);
  EXPECT_EQ(tokenizer->tokenize("A", true, false), (std::vector<int32_t>{257, 'A'}));
}

TEST(GgmlText, RendersTheFilesTemplate) {
  const auto tokenizer = load_tokenizer(model_path("model-variants/untied.gguf"));
  const ChatMessage messages[] = {{"system", "Be brief."}, {"user", "Hi"}};
  EXPECT_EQ(make_chat_template(*tokenizer)->render(messages),
            "system: Be brief.\nuser: Hi\nassistant:");
  EXPECT_THROW(make_chat_template(*tokenizer)->render({}), std::invalid_argument);
}

// A small file that has the chat template of a family's model.
std::string with_template(const std::string& name) {
  const std::string path = std::string(PAGEDKV_LLAMA_TEMPLATES) + "/" + name + ".jinja";
  std::ifstream in(path);
  if (!in.is_open()) throw std::runtime_error(path + ": cannot be read");
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const std::string target = testing::TempDir() + "template_" + name + ".gguf";
  rewrite_gguf(model_path("model-variants/untied.gguf"), target,
               [&](gguf_context* meta, ggml_context*) {
                 gguf_set_val_str(meta, "tokenizer.chat_template", text.c_str());
               });
  return target;
}

std::string rendered(const std::string& template_name, std::span<const ChatMessage> messages,
                     const TemplateKwargs& kwargs = {}) {
  const std::string path = with_template(template_name);
  const auto tokenizer = load_tokenizer(path);
  std::filesystem::remove(path);
  return make_chat_template(*tokenizer)->render(messages, kwargs);
}

// What llama.cpp writes by its own code for the format, without jinja.
std::string llama_cpp_rendered(const char* format, std::span<const ChatMessage> messages) {
  std::vector<llama_chat_message> list;
  for (const auto& m : messages) list.push_back({m.role.c_str(), m.content.c_str()});
  std::string out(4096, '\0');
  const int32_t n = llama_chat_apply_template(format, list.data(), list.size(), true, out.data(),
                                              static_cast<int32_t>(out.size()));
  EXPECT_GT(n, 0) << format;
  return out.substr(0, static_cast<size_t>(std::max(0, n)));
}

// Without the text of the file's first token, which some templates write and the tokenizer adds in any case.
std::string without_begin(std::string text) {
  const std::string begin = "<|end|>";
  return text.starts_with(begin) ? text.substr(begin.size()) : text;
}

TEST(GgmlText, RendersTheFamiliesTemplatesAsLlamaCppDoes) {
  const std::vector<ChatMessage> turns{{"system", "Be brief."},
                                       {"user", "Hi, who are you?"},
                                       {"assistant", "A model.\nNothing more."},
                                       {"user", "  Sure?  "}};
  const auto without_system = std::span(turns).subspan(1);
  const auto one = std::span(turns).first(2);
  for (const char* name : {"Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"}) {
    EXPECT_EQ(rendered(name, turns), llama_cpp_rendered("chatml", turns)) << name;
    EXPECT_EQ(rendered(name, one), llama_cpp_rendered("chatml", one)) << name;
  }
  EXPECT_EQ(without_begin(rendered("google-gemma-2-2b-it", without_system)),
            llama_cpp_rendered("gemma", without_system));
  // The end of a turn is the vocabulary's end token, "<|end|>" here.
  std::string mistral = llama_cpp_rendered("mistral-v3-tekken", without_system);
  mistral.replace(mistral.find("</s>"), 4, "<|end|>");
  EXPECT_EQ(without_begin(rendered("mistralai-Mistral-Nemo-Instruct-2407", without_system)),
            mistral);
  // llama.cpp's own format for Llama 3 has no dates: they are put before the system message here.
  const std::string dates = "Cutting Knowledge Date: December 2023\nToday Date: 1 May 2025\n\n";
  std::vector<ChatMessage> dated = turns;
  dated[0].content = dates + dated[0].content;
  EXPECT_EQ(without_begin(rendered("meta-llama-Llama-3.2-3B-Instruct", turns,
                                   {{"date_string", "\"1 May 2025\""}})),
            llama_cpp_rendered("llama3", dated));
}

TEST(GgmlText, PassesVariablesToTheTemplate) {
  const ChatMessage messages[] = {{"user", "Hi"}};
  const std::string think = rendered("Qwen-Qwen3-0.6B", messages);
  const std::string plain = rendered("Qwen-Qwen3-0.6B", messages, {{"enable_thinking", "false"}});
  EXPECT_EQ(plain, think + "<think>\n\n</think>\n\n");
  EXPECT_EQ(rendered("Qwen-Qwen3-0.6B", messages, {{"enable_thinking", "true"}}), think);
  EXPECT_THROW(rendered("Qwen-Qwen3-0.6B", messages, {{"enable_thinking", "3"}}),
               std::invalid_argument);
}

TEST(GgmlText, WritesTheChainsText) {
  const auto model = load(model_path("chain.gguf"));
  const auto tokenizer = load_tokenizer(model_path("chain.gguf"));
  const auto sampler = make_sampler({}, model->info().vocab_size);
  const auto write = [&](const char* prompt, int most) {
    PagePool pool(pool_options(model->info(), {}));
    BlockTable table(pool);
    std::vector<int32_t> next = tokenizer->tokenize(prompt, true, true);
    std::string out;
    for (int i = 0; i < most; ++i) {
      table.append(static_cast<int64_t>(next.size()));
      StepBatch batch;
      batch.sequences.push_back({&table, next, 1});
      const int32_t token = sampler->sample(model->step(batch, pool));
      if (tokenizer->is_end_of_generation(token)) return out + "$";
      out += tokenizer->piece(token, false);
      next = {token};
    }
    return out;
  };
  EXPECT_EQ(write("ABC", 26), "DEFGHIJKLMNOPQRSTUVWXYZABC");
  EXPECT_EQ(write("x", 9), "yz.$");
  EXPECT_EQ(write("\xF0\x9F\xA6\x99", 8), "\xF0\x9F\xA6\x99\xF0\x9F\xA6\x99");
}

TEST(GgmlText, KnowsTheChainsProbabilities) {
  const auto model = load(model_path("chain.gguf"));
  const size_t vocab = static_cast<size_t>(model->info().vocab_size);
  const std::vector<int32_t> tokens = {'A', 'p', 'x'};
  const auto logits = all_logits(*model, tokens);
  const auto row = [&](size_t i) { return std::span(logits).subspan(i * vocab, vocab); };
  EXPECT_NEAR(log_probability(row(0), 'B'), -1.25e-5, 1e-6);
  for (const char c : {'p', 'q', 'r', 's'}) EXPECT_NEAR(log_probability(row(1), c), -1.3863, 1e-4);
  EXPECT_NEAR(log_probability(row(2), 'y'), -1.25e-5, 1e-6);
}

std::string refusal(const SamplerOptions& options) {
  try {
    make_sampler(options, 8);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(GgmlSampler, NamesTheOptionOutsideItsLimits) {
  EXPECT_NE(refusal({.temperature = -1}).find("temperature"), std::string::npos);
  EXPECT_NE(refusal({.temperature = NAN}).find("temperature"), std::string::npos);
  EXPECT_NE(refusal({.top_k = -1}).find("top_k"), std::string::npos);
  EXPECT_NE(refusal({.top_p = 0}).find("top_p"), std::string::npos);
  EXPECT_NE(refusal({.min_p = 1.5f}).find("min_p"), std::string::npos);
  EXPECT_NE(refusal({.repetition_penalty = 0}).find("repetition_penalty"), std::string::npos);
  EXPECT_NE(refusal({.penalty_last_n = -1}).find("penalty_last_n"), std::string::npos);
  EXPECT_EQ(refusal({}), "");
}

TEST(GgmlSampler, TakesTheLowestOfEqualLogitsWhenGreedy) {
  const std::vector<float> logits = {0, 2, 1, 2, -5, 2, 0, 0};
  EXPECT_EQ(make_sampler({}, 8)->sample(logits), 1);
}

TEST(GgmlSampler, TakesTheFirstOfTheLargestOfAnyNumberOfLogits) {
  std::mt19937 random(1);
  for (const int size : {1, 2, 15, 1023, 1024, 1025, 5000})
    for (int round = 0; round < 20; ++round) {
      std::vector<float> logits(static_cast<size_t>(size));
      // Few different values, both zeros among them, of one sign or both: the largest stands in many places.
      const int shift = static_cast<int>(random() % 9) - 4;
      for (float& x : logits) {
        x = static_cast<float>(static_cast<int>(random() % 5) - 2 + shift);
        if (x == 0 && random() % 2) x = -0.0f;
      }
      EXPECT_EQ(make_sampler({}, size)->sample(logits),
                std::max_element(logits.begin(), logits.end()) - logits.begin())
          << size;
    }
}

TEST(GgmlSampler, NamesTheLogitThatIsNotFinite) {
  for (const float bad :
       {NAN, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> logits(8, 1.0f);
    logits[5] = bad;
    for (const float temperature : {0.0f, 0.8f}) {
      const auto sampler = make_sampler({.temperature = temperature}, 8);
      try {
        sampler->sample(logits);
        ADD_FAILURE() << "not refused";
      } catch (const std::runtime_error& error) {
        EXPECT_NE(std::string(error.what()).find("logit 5 of 8"), std::string::npos)
            << error.what();
      }
    }
  }
  EXPECT_THROW(make_sampler({}, 8)->sample(std::vector<float>(7)), std::invalid_argument);
}

TEST(GgmlSampler, RepeatsItsDrawsForASeed) {
  const std::vector<float> logits = {1, 2, 3, 2, 1, 0, 2, 3};
  const auto draw = [&](uint64_t seed) {
    const auto sampler = make_sampler({.temperature = 1.0f, .seed = seed}, 8);
    std::vector<int32_t> out;
    for (int i = 0; i < 50; ++i) out.push_back(sampler->sample(logits));
    return out;
  };
  EXPECT_EQ(draw(7), draw(7));
  EXPECT_NE(draw(7), draw(8));
  EXPECT_EQ(draw(0xFFFFFFFFu), draw(0xFFFFFFFFu));  // libllama's word for "any seed"
}

std::map<int32_t, int> histogram(const SamplerOptions& options, const std::vector<float>& logits,
                                 int draws) {
  const auto sampler = make_sampler(options, static_cast<int32_t>(logits.size()));
  std::map<int32_t, int> out;
  for (int i = 0; i < draws; ++i) ++out[sampler->sample(logits)];
  return out;
}

TEST(GgmlSampler, DrawsByProbability) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f)};  // 1/8, 2/8, 5/8
  auto counts = histogram({.temperature = 1.0f, .seed = 1}, logits, 8000);
  EXPECT_NEAR(counts[0], 1000, 150);
  EXPECT_NEAR(counts[1], 2000, 200);
  EXPECT_NEAR(counts[2], 5000, 250);
}

TEST(GgmlSampler, CutsByTopKTopPAndMinP) {
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f), -3};
  EXPECT_EQ(histogram({.temperature = 1.0f, .top_k = 1}, logits, 200).size(), 1u);
  EXPECT_EQ(histogram({.temperature = 1.0f, .top_k = 2}, logits, 400).size(), 2u);
  EXPECT_EQ(histogram({.temperature = 1.0f, .top_p = 0.5f}, logits, 200).size(), 1u);
  EXPECT_EQ(histogram({.temperature = 1.0f, .min_p = 0.3f}, logits, 400).size(), 2u);
}

TEST(GgmlSampler, PenalisesWhatItWasTold) {
  const std::vector<float> logits = {1.0f, 1.2f, 0.5f};
  const auto sampler = make_sampler({.repetition_penalty = 1.5f, .penalty_last_n = 2}, 3);
  EXPECT_EQ(sampler->sample(logits), 1);
  sampler->accept(1, false);
  EXPECT_EQ(sampler->sample(logits), 0);
  sampler->accept(0, false);
  sampler->accept(2, false);  // token 1 falls out of the last two
  EXPECT_EQ(sampler->sample(logits), 1);
  EXPECT_THROW(sampler->accept(3, false), std::invalid_argument);
}

// Presence once, frequency for each time, of generated tokens alone; unlike repetition, which is of the prompt too.
TEST(GgmlSampler, PenalisesWhatWasGenerated) {
  const std::vector<float> logits = {2.0f, 1.5f, 1.2f};
  const auto presence = make_sampler({.presence_penalty = 0.6f}, 3);
  presence->accept(0, false);
  EXPECT_EQ(presence->sample(logits), 0);
  presence->accept(0, true);
  EXPECT_EQ(presence->sample(logits), 1);
  presence->accept(0, true);
  presence->accept(1, true);
  EXPECT_EQ(presence->sample(logits), 0);  // 1.4, 0.9, 1.2
  const auto frequency = make_sampler({.frequency_penalty = 0.3f}, 3);
  for (int i = 0; i < 2; ++i) frequency->accept(0, true);
  EXPECT_EQ(frequency->sample(logits), 1);  // 1.4, 1.5, 1.2
  for (int i = 0; i < 2; ++i) frequency->accept(1, true);
  EXPECT_EQ(frequency->sample(logits), 0);  // 1.4, 0.9, 1.2
  const auto rewards = make_sampler({.presence_penalty = -2.0f}, 3);
  rewards->accept(2, true);
  EXPECT_EQ(rewards->sample(logits), 2);
}

TEST(GgmlSampler, AddsItsBiasAndTakesNoneOfTheForbidden) {
  const std::vector<float> logits = {2.0f, 1.5f, 1.2f};
  EXPECT_EQ(make_sampler({.logit_bias = {{0, -100.0f}}}, 3)->sample(logits), 1);
  EXPECT_EQ(make_sampler({.logit_bias = {{2, 1.0f}, {0, -0.1f}}}, 3)->sample(logits), 2);
  EXPECT_EQ(make_sampler({}, 3)->sample(logits, std::vector<int32_t>{0, 1}), 2);
  const auto draws = make_sampler({.temperature = 1.0f, .logit_bias = {{1, -100.0f}}}, 3);
  std::map<int32_t, int> seen;
  for (int i = 0; i < 300; ++i) ++seen[draws->sample(logits, std::vector<int32_t>{2})];
  EXPECT_EQ(seen, (std::map<int32_t, int>{{0, 300}}));
  EXPECT_THROW(make_sampler({.logit_bias = {{3, 1.0f}}}, 3), std::invalid_argument);
  EXPECT_THROW(make_sampler({.logit_bias = {{0, INFINITY}}}, 3), std::invalid_argument);
  EXPECT_THROW(make_sampler({.presence_penalty = NAN}, 3), std::invalid_argument);
}

}  // namespace
}  // namespace pagedkv::test
