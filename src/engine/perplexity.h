// How well a model predicts a text, and what each page format costs it: perplexity, and the Kullback-Leibler divergence
// of the next token's distribution from the one that other pages give.
//
// The text is cut into chunks of `context` tokens, each computed by itself and begun with the vocabulary's first token
// where there is one. Of a chunk's tokens the second half is scored: those after position context / 2, which have at
// least that many before them. Source: llama.cpp's tools/perplexity, whose numbers these are, but with every exponential
// in double.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "models/model.h"

namespace pagedkv {

struct PerplexityOptions {
  int64_t context = 512;                        // tokens in a chunk, 3 to the model's limit
  int64_t max_chunks = -1;                      // -1: all that the text fills
  std::optional<int32_t> begin = std::nullopt;  // takes the place of each chunk's first token
  int num_threads = 1;  // that read the logits; any number gives the same bits
  std::function<void(double done)> progress = nullptr;  // 0..1
};

// Of one page format, over all scored tokens. The errors are standard errors.
struct PerplexityResult {
  double perplexity = 0, perplexity_error = 0;
  // The divergence KL(first format || this one), in nats, and how often both have the same most likely token.
  double kl_mean = 0, kl_mean_error = 0, kl_p99 = 0, kl_max = 0;
  double same_top = 0;  // 0..1
};

struct PerplexityReport {
  int64_t chunks = 0;
  int64_t scored = 0;                     // tokens
  std::vector<PerplexityResult> results;  // one for each pool
};

// Scores `tokens` with the pages of each pool in turn, which must be of this model and at least one. All pools go through
// the text side by side, a step at a time: no more logits are held than one step's of the first pool and of the model.
// Throws std::invalid_argument (options outside their limits; fewer tokens than one chunk), std::runtime_error where a
// logit is not a number, and what BlockTable::append and Model::step throw.
PerplexityReport measure_perplexity(Model& model, std::span<const int32_t> tokens,
                                    std::span<PagePool* const> pools,
                                    const PerplexityOptions& options);

}  // namespace pagedkv
