// The bits of a row of logits depend on the sequence and the page format only.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>

#include "llama.h"
#include "models/ggml/test_models.h"

namespace pagedkv::test {
namespace {

constexpr int kTokens = 40;

struct Case {
  const char* name;
  RunOptions options;
  int num_threads = 1;
};

const Case kCases[] = {
    {"chunks of 1", {.chunk = 1}},
    {"chunks of 2", {.chunk = 2}},
    {"chunks of 7", {.chunk = 7}},
    {"chunks of 39, the last a lone row", {.chunk = 39}},
    {"two threads", {}, 2},
    {"two threads, chunks of 9", {.chunk = 9}, 2},
    {"page size 1", {.page_size = 1}},
    {"page size 64", {.page_size = 64}},
    {"page size 7, chunks of 5, shuffled", {.chunk = 5, .page_size = 7, .shuffle_seed = 3}},
    {"shuffled pages", {.shuffle_seed = 9}},
};

void expect_one_arithmetic(const std::string& path, ExactMode mode, PageFormat format) {
  const auto one = load(path, 1, mode);
  const auto two = load(path, 2, mode);
  ASSERT_TRUE(one->info().exact) << one->info().exact_reason;
  EXPECT_EQ(one->info().arithmetic_id, two->info().arithmetic_id);
  const auto tokens = random_tokens(kTokens, 2);
  RunOptions whole;
  whole.key_format = whole.value_format = format;
  const auto expected = all_logits(*one, tokens, whole);
  for (const float logit : expected) ASSERT_TRUE(std::isfinite(logit));
  for (const Case& c : kCases) {
    RunOptions options = c.options;
    options.key_format = options.value_format = format;
    EXPECT_TRUE(all_logits(c.num_threads == 1 ? *one : *two, tokens, options) == expected)
        << path << ", " << page_format_name(format) << " pages: " << c.name;
  }
}

class OneArithmetic : public testing::TestWithParam<const char*> {};

TEST_P(OneArithmetic, HoldsInEveryPageFormat) {
  const std::string path = model_path(std::string("model-variants/") + GetParam() + ".gguf");
  for (const PageFormat format : {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16,
                                  PageFormat::kQ8, PageFormat::kQ6, PageFormat::kQ4}) {
    expect_one_arithmetic(path, ExactMode::kAuto, format);
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, OneArithmetic,
                         testing::Values("untied", "gqa3_dim64", "gqa7_dim36", "short_values",
                                         "window", "qwen2", "qwen3", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

// What a sequence gets in a mixed batch, beside others in prefill and decode, is what it gets alone.
TEST(OneArithmetic, HoldsInMixedBatches) {
  const auto model = load(model_path("model-variants/gqa3_dim64.gguf"), 2);
  const size_t vocab = static_cast<size_t>(model->info().vocab_size);
  std::vector<std::vector<int32_t>> texts = {random_tokens(50, 5), random_tokens(33, 6),
                                             random_tokens(17, 7)};
  std::vector<std::vector<float>> expected, found(texts.size());
  for (const auto& text : texts) expected.push_back(all_logits(*model, text));
  PagePool pool(pool_options(model->info(), {.shuffle_seed = 4}));
  std::vector<BlockTable> tables;
  for (size_t i = 0; i < texts.size(); ++i) tables.emplace_back(pool);
  const int chunks[] = {1, 9, 4};
  for (int step = 0; step < 60; ++step) {
    StepBatch batch;
    std::vector<size_t> members;
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto done = static_cast<size_t>(tables[i].length());
      const auto n = std::min<size_t>(
          static_cast<size_t>(chunks[(i + static_cast<size_t>(step)) % 3]), texts[i].size() - done);
      if (n == 0 || (step + static_cast<int>(i)) % 4 == 0) continue;
      tables[i].append(static_cast<int64_t>(n));
      batch.sequences.push_back(
          {&tables[i], std::span(texts[i]).subspan(done, n), static_cast<int32_t>(n)});
      members.push_back(i);
    }
    auto logits = model->step(batch, pool);
    for (size_t m = 0; m < members.size(); ++m) {
      const size_t count = batch.sequences[m].tokens.size() * vocab;
      found[members[m]].insert(found[members[m]].end(), logits.begin(),
                               logits.begin() + static_cast<int64_t>(count));
      logits = logits.subspan(count);
    }
    EXPECT_TRUE(logits.empty());
  }
  for (size_t i = 0; i < texts.size(); ++i)
    EXPECT_TRUE(found[i] == expected[i]) << "sequence " << i;
}

// Rows without logits, and logits of some rows only, change nothing in the rest.
TEST(OneArithmetic, DoesNotDependOnWhichLogitsAreWanted) {
  const auto model = load(model_path("model-variants/untied.gguf"));
  const size_t vocab = static_cast<size_t>(model->info().vocab_size);
  const auto tokens = random_tokens(40, 8);
  const auto expected = all_logits(*model, tokens);
  PagePool pool(pool_options(model->info(), {}));
  BlockTable table(pool);
  const auto feed = [&](int first, int count, int outputs) {
    table.append(count);
    StepBatch batch;
    batch.sequences.push_back(
        {&table, std::span(tokens).subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
         outputs});
    const auto logits = model->step(batch, pool);
    const auto want = std::span(expected).subspan(
        static_cast<size_t>(first + count - outputs) * vocab, static_cast<size_t>(outputs) * vocab);
    EXPECT_TRUE(std::equal(logits.begin(), logits.end(), want.begin(), want.end()))
        << "from token " << first;
  };
  feed(0, 13, 0);
  feed(13, 1, 0);
  feed(14, 10, 3);
  feed(24, 15, 1);
  feed(39, 1, 1);
}

// Layers of one group may store in different formats; the last layer's format shows in the bits, too.
TEST(OneArithmetic, HoldsWhereLayersDifferInFormat) {
  const auto model = load(model_path("model-variants/untied.gguf"), 2);
  const auto tokens = random_tokens(kTokens, 2);
  const auto run = [&](PageFormat first, PageFormat second, size_t chunk) {
    PagePoolOptions options = pool_options(model->info(), {});
    auto& layers = options.groups[0].layers;
    layers[0].key_format = layers[0].value_format = first;
    layers[1].key_format = layers[1].value_format = second;
    PagePool pool(options);
    BlockTable table(pool);
    std::vector<float> out;
    for (size_t done = 0; done < tokens.size(); done += chunk) {
      const auto part = std::span(tokens).subspan(done, std::min(chunk, tokens.size() - done));
      table.append(static_cast<int64_t>(part.size()));
      StepBatch batch;
      batch.sequences.push_back({&table, part, static_cast<int32_t>(part.size())});
      const auto logits = model->step(batch, pool);
      out.insert(out.end(), logits.begin(), logits.end());
    }
    return out;
  };
  const auto mixed = run(PageFormat::kF32, PageFormat::kQ8, kTokens);
  EXPECT_TRUE(run(PageFormat::kF32, PageFormat::kQ8, 7) == mixed);
  EXPECT_FALSE(run(PageFormat::kF32, PageFormat::kF32, kTokens) == mixed);
  EXPECT_FALSE(run(PageFormat::kQ8, PageFormat::kQ8, kTokens) == mixed);
}

std::string quantize(const std::string& source, llama_ftype type, const char* name) {
  const std::string target =
      (std::filesystem::temp_directory_path() /
       (std::string("pagedkv_") + name + "_" + std::to_string(getpid()) + ".gguf"))
          .string();
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = type;
  params.nthread = 1;
  params.pure =
      type !=
      LLAMA_FTYPE_MOSTLY_Q4_K_M;  // one type for all matrices; else the output would be Q6_K
  if (llama_model_quantize(source.c_str(), target.c_str(), &params) != 0)
    throw std::runtime_error("cannot quantise " + source);
  return target;
}

struct Quantized {
  Quantized(llama_ftype type, const char* name)
      : path(quantize(model_path("model-variants/k_quants.gguf"), type, name)) {}
  ~Quantized() { std::filesystem::remove(path); }
  std::string path;
};

TEST(OneArithmetic, HoldsForLegacyQuantisationInAuto) {
  for (const auto& [type, name] : {std::pair{LLAMA_FTYPE_MOSTLY_Q4_1, "q4_1"},
                                   {LLAMA_FTYPE_MOSTLY_Q8_0, "q8_0"},
                                   {LLAMA_FTYPE_MOSTLY_F16, "f16"}}) {
    const Quantized file(type, name);
    expect_one_arithmetic(file.path, ExactMode::kAuto, PageFormat::kF16);
  }
}

TEST(OneArithmetic, HoldsForKQuantsWhenAskedFor) {
  const Quantized file(LLAMA_FTYPE_MOSTLY_Q4_K_M, "q4_k_m");
  expect_one_arithmetic(file.path, ExactMode::kOn, PageFormat::kF16);
}

// `auto` says that K-quants are not exact; and were it wrong, this would show it.
TEST(OneArithmetic, IsNotClaimedForKQuantsInAuto) {
  const Quantized file(LLAMA_FTYPE_MOSTLY_Q4_K_M, "q4_k_m_auto");
  const auto model = load(file.path);
  EXPECT_FALSE(model->info().exact);
  EXPECT_NE(model->info().exact_reason.find("_K"), std::string::npos) << model->info().exact_reason;
  const auto tokens = random_tokens(kTokens, 2);
  EXPECT_FALSE(all_logits(*model, tokens, {.chunk = 1}) == all_logits(*model, tokens))
      << "exact after all: tell it";
}

TEST(OneArithmetic, IsNotClaimedWhenSwitchedOff) {
  const auto model = load(model_path("model-variants/untied.gguf"), 1, ExactMode::kOff);
  EXPECT_FALSE(model->info().exact);
  EXPECT_EQ(model->info().exact_reason, "--exact off");
}

}  // namespace
}  // namespace pagedkv::test
