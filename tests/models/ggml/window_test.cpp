// Models with sliding windows: giving back the pages that a window has passed changes no logit and holds fewer pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "models/ggml/test_models.h"
#include "pagedkv/core/block_table.h"

namespace pagedkv::test {
namespace {

struct Result {
  std::vector<float> logits;  // after each step
  int64_t pages_held = 0;     // after the last one
  int64_t pages_peak = 0;
};

// A prompt in chunks, then the rest token by token.
Result run(Model& model, std::span<const int32_t> tokens, size_t prompt, const RunOptions& options,
           bool gives_back) {
  PagePool pool(pool_options(model.info(), options));
  BlockTable table(pool);
  Result out;
  for (size_t first = 0; first < tokens.size();) {
    const size_t n =
        first < prompt ? std::min(prompt - first, static_cast<size_t>(options.chunk)) : 1;
    table.append(static_cast<int64_t>(n));
    StepBatch batch;
    batch.sequences.push_back({&table, tokens.subspan(first, n), 1});
    const auto logits = model.step(batch, pool);
    out.logits.insert(out.logits.end(), logits.begin(), logits.end());
    if (gives_back) table.release_passed();
    first += n;
  }
  out.pages_held = pool.stats().pages_held;
  out.pages_peak = pool.stats().pages_peak;
  pool.verify();
  return out;
}

// Most pages that a sequence holds in all groups.
int64_t most_pages(const ModelInfo& info, int64_t length, int64_t step, int page_size) {
  int64_t pages = 0;
  for (const LayerGroupSpec& group : info.groups)
    pages += most_pages_held(length, step, page_size, group.sliding_window);
  return pages;
}

void expect_same_logits_from_fewer_pages(const std::string& file, int num_tokens, size_t prompt,
                                         const RunOptions& options) {
  const auto model = load(model_path(file), 2);
  const auto tokens = random_tokens(num_tokens, 3);
  const Result keeps = run(*model, tokens, prompt, options, false),
               gives = run(*model, tokens, prompt, options, true);
  ASSERT_EQ(gives.logits.size(), keeps.logits.size());
  EXPECT_EQ(
      std::memcmp(gives.logits.data(), keeps.logits.data(), gives.logits.size() * sizeof(float)), 0)
      << file;
  EXPECT_LE(gives.pages_held, most_pages(model->info(), num_tokens, 1, options.page_size)) << file;
  EXPECT_LE(gives.pages_peak,
            most_pages(model->info(), num_tokens, options.chunk, options.page_size))
      << file;
  EXPECT_LT(gives.pages_held, keeps.pages_held) << file;
}

TEST(ModelWindow, GivesItsPagesBackWithoutATrace) {
  for (const char* name : {"gemma3", "gemma3_all_windows", "window"})
    for (const PageFormat format : {PageFormat::kF16, PageFormat::kQ8})
      for (const int page_size : {5, 16})
        expect_same_logits_from_fewer_pages(std::string("model-variants/") + name + ".gguf", 330,
                                            300,
                                            {.chunk = page_size == 5 ? 33 : 64,
                                             .page_size = page_size,
                                             .key_format = format,
                                             .value_format = format});
}

// The real one: a window of 512 tokens in 15 of its 18 layers.
TEST(ModelWindow, OfGemma3GivesItsPagesBackWithoutATrace) {
  expect_same_logits_from_fewer_pages(
      "gemma-3-270m.Q4_K_M.gguf", 1300, 1290,
      {.chunk = 256, .key_format = PageFormat::kF16, .value_format = PageFormat::kF16});
}

}  // namespace
}  // namespace pagedkv::test
