#include "models/toy/toy_model.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>

#include "base/page_codec.h"
#include "pagedkv/base/executor.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv {
namespace {

constexpr int kHeadDim = 16;
constexpr std::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyz     ";

uint64_t mix(uint64_t z) {  // splitmix64's finaliser
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// The stored first element of a key row, as the format gives it back. Every format holds rows of one
// number up to 256 to well under one half, so rounding restores it.
int32_t stored_token(const PageArray& keys, int64_t slot) {
  const std::byte* row = keys.data + slot * row_bytes(keys.format, kHeadDim);
  return with_page_format(keys.format, [&](auto format) {
    using Format = decltype(format);
    const float x = Format::load(row, 0) * (Format::kHasScales ? keys.scales[slot] : 1.0f);
    return static_cast<int32_t>(std::lround(x)) - 1;
  });
}

class ToyModel final : public Model {
 public:
  explicit ToyModel(const ToyOptions& options) : options_(options) {
    info_.family = "toy";
    info_.name = "toy";
    info_.description = "toy: the next token is a hash of all before it";
    info_.vocab_size = kToyVocabSize;
    info_.context_length = options.context_length;
    info_.num_q_heads = 1;
    const LayerSpec layer{.num_kv_heads = 1, .key_head_dim = kHeadDim, .value_head_dim = kHeadDim};
    info_.groups.push_back({.sliding_window = 0, .layers = {layer}});
    if (options.sliding_window > 0) info_.groups.push_back({options.sliding_window, {layer}});
    info_.num_layers = static_cast<int>(info_.groups.size());
    info_.exact = true;
    info_.exact_reason = "integers only";
    info_.arithmetic_id = "toy";
  }

  const ModelInfo& info() const noexcept override { return info_; }
  int max_step_tokens() const noexcept override { return options_.max_step_tokens; }

  std::span<const float> step(const StepBatch& batch, PagePool& pool) override {
    logits_.clear();
    for (const auto& s : batch.sequences) store_tokens(s, pool);
    for (const auto& s : batch.sequences) {
      for (int32_t i = s.num_outputs; i > 0; --i)
        append_logits(*s.table, s.table->length() - i + 1, pool);
    }
    return logits_;
  }

 private:
  void store_tokens(const StepBatch::Sequence& s, PagePool& pool) {
    const auto n = static_cast<int64_t>(s.tokens.size());
    std::vector<float> rows(n * kHeadDim);
    for (int64_t t = 0; t < n; ++t)
      std::fill_n(rows.begin() + t * kHeadDim, kHeadDim, static_cast<float>(s.tokens[t] + 1));
    std::vector<int64_t> slots(n);
    for (int layer = 0; layer < pool.num_layers(); ++layer) {
      s.table->slot_mapping(pool.group_of_layer(layer), s.table->length() - n, slots);
      StoreArgs args;
      args.keys = args.values = rows.data();
      args.pages = pool.layer_pages(layer);
      args.slot_mapping = slots.data();
      args.num_tokens = static_cast<int>(n);
      if (!store(args, threads_)) throw std::runtime_error("toy: a row could not be stored");
    }
  }

  // Logits after the first `length` tokens.
  void append_logits(const BlockTable& table, int64_t length, const PagePool& pool) {
    uint64_t hash = 0x9e3779b97f4a7c15ull;
    int32_t last = -1;
    for (int layer = 0; layer < pool.num_layers(); ++layer) {
      const int group = pool.group_of_layer(layer), window = pool.sliding_window(group);
      const LayerPages pages = pool.layer_pages(layer);
      const auto ids = table.pages(group);
      for (int64_t t = window > 0 ? std::max<int64_t>(0, length - window) : 0; t < length; ++t) {
        last = stored_token(
            pages.keys, int64_t{ids[t / pages.page_size]} * pages.page_size + t % pages.page_size);
        hash = mix(hash ^ static_cast<uint64_t>(last + 1));
      }
    }
    const size_t first = logits_.size();
    logits_.resize(first + kToyVocabSize, 0.0f);
    float* row = logits_.data() + first;
    for (size_t i = 0; i < 4; ++i)
      row[static_cast<uint8_t>(kAlphabet[(hash >> (8 * i)) % kAlphabet.size()])] =
          12.0f - static_cast<float>(i);
    if (options_.end_after > 0 && length >= options_.end_after) row[kToyEnd] = 20.0f;
    if (last >= 0 && last == options_.poison_token) row[1] = NAN;
  }

  ToyOptions options_;
  ModelInfo info_;
  ThreadPool threads_{1};
  std::vector<float> logits_;
};

class ToyTokenizer final : public Tokenizer {
 public:
  int32_t vocab_size() const noexcept override { return kToyVocabSize; }
  std::vector<int32_t> tokenize(std::string_view text, bool, bool) const override {
    std::vector<int32_t> out;
    for (char c : text) out.push_back(static_cast<uint8_t>(c));
    return out;
  }
  std::string piece(int32_t token, bool special) const override {
    if (token < 0 || token > 255) return special ? "<end>" : "";
    return std::string(1, static_cast<char>(token));
  }
  bool is_end_of_generation(int32_t token) const noexcept override { return token == kToyEnd; }
  std::optional<int32_t> begin_token() const noexcept override { return std::nullopt; }
};

class ToyChatTemplate final : public ChatTemplate {
 public:
  std::string render(std::span<const ChatMessage> messages, const TemplateKwargs&,
                     PromptEnd) const override {
    if (messages.empty()) throw std::invalid_argument("messages: at least one is needed");
    return messages.back().content;
  }
};

class ToySampler final : public Sampler {
 public:
  explicit ToySampler(const SamplerOptions& options) : options_(options), random_(options.seed) {}
  using Sampler::sample;
  int32_t sample(std::span<const float> given, std::span<const int32_t> without) override {
    std::vector<float> logits(given.begin(), given.end());
    for (size_t i = 0; i < logits.size(); ++i)
      if (!std::isfinite(logits[i]))
        throw std::runtime_error("logit " + std::to_string(i) + " is not finite");
    for (const int32_t token : without) logits.at(static_cast<size_t>(token)) = -INFINITY;
    const auto best = std::max_element(logits.begin(), logits.end());
    if (options_.temperature <= 0) return static_cast<int32_t>(best - logits.begin());
    std::vector<double> p;
    for (float x : logits)
      p.push_back(std::exp((static_cast<double>(x) - *best) / options_.temperature));
    return static_cast<int32_t>(std::discrete_distribution<int>(p.begin(), p.end())(random_));
  }
  void accept(int32_t, bool) override {}

 private:
  SamplerOptions options_;
  std::mt19937_64 random_;
};

}  // namespace

std::unique_ptr<Model> make_toy_model(const ToyOptions& options) {
  return std::make_unique<ToyModel>(options);
}
std::unique_ptr<Tokenizer> make_toy_tokenizer() { return std::make_unique<ToyTokenizer>(); }
std::unique_ptr<ChatTemplate> make_toy_chat_template() {
  return std::make_unique<ToyChatTemplate>();
}
std::unique_ptr<Sampler> make_toy_sampler(const SamplerOptions& options) {
  return std::make_unique<ToySampler>(options);
}

}  // namespace pagedkv
