#include "models/ggml/ggml_model.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "models/ggml/arithmetic.h"
#include "models/ggml/family.h"
#include "models/ggml/ggml_log.h"
#include "models/ggml/gguf_file.h"
#include "models/ggml/hyperparameters.h"
#include "models/ggml/paged_attention.h"
#include "models/ggml/step_graph.h"
#include "models/ggml/weights.h"

namespace pagedkv {
namespace {

constexpr int kMostStepTokens = 65536;

std::string with_unit(double value, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text, value < 9.95 ? "%.2f %s" : "%.0f %s", value, unit);
  return text;
}

std::string show_count(int64_t n) {
  const auto v = static_cast<double>(n);
  return v < 1e9 ? with_unit(v / 1e6, "M") : with_unit(v / 1e9, "G");
}

// Types of the matrices, the one with most bytes first: "q4_1 + q8_0".
std::string weight_types(const std::vector<ggml_tensor*>& matrices) {
  std::map<std::string, size_t> bytes;
  for (const ggml_tensor* t : matrices) bytes[ggml_type_name(t->type)] += ggml_nbytes(t);
  std::vector<std::pair<size_t, std::string>> sorted;
  for (const auto& [name, size] : bytes) sorted.emplace_back(size, name);
  std::ranges::sort(sorted, std::greater());
  std::string out;
  for (const auto& [size, name] : sorted) out += (out.empty() ? "" : " + ") + name;
  return out;
}

void check(const GgmlModelOptions& o) {
  if (o.num_threads < 1 || o.num_threads > GGML_MAX_N_THREADS) {
    throw std::invalid_argument("num_threads " + std::to_string(o.num_threads) +
                                ": must be in 1.." + std::to_string(GGML_MAX_N_THREADS));
  }
  if (o.max_step_tokens < 1 || o.max_step_tokens > kMostStepTokens) {
    throw std::invalid_argument("max_step_tokens " + std::to_string(o.max_step_tokens) +
                                ": must be in 1.." + std::to_string(kMostStepTokens));
  }
}

class GgmlModel final : public Model {
 public:
  GgmlModel(const std::string& path, const GgmlModelOptions& options)
      : file_(path),
        family_(find_family(file_)),
        hp_(read_hyperparameters(file_, family_)),
        weights_(bind_weights(file_, family_, hp_)),
        max_step_tokens_(options.max_step_tokens) {
    file_.populate(options.progress);
    arithmetic_ = choose(options.exact);
    attention_ = std::make_unique<PagedAttention>(hp_, options.num_threads);
    describe();
    graphs_ = std::make_unique<StepGraphs>(hp_, weights_, *attention_, options.num_threads,
                                           arithmetic_.use_reference);
  }

  const ModelInfo& info() const noexcept override { return info_; }
  int max_step_tokens() const noexcept override { return max_step_tokens_; }

  std::span<const float> step(const StepBatch& batch, PagePool& pool) override {
    const Counts counts = check_batch(batch);
    if (counts.tokens == 0) return {};
    // Graphs of every number of rows are built as they come: a graph costs less than the rows that padding to
    // common sizes would add (SmolLM2: 0.3 ms against 3 ms and more a row).
    const int outputs = counts.outputs == 0 ? 0 : std::max(counts.outputs, arithmetic_.min_rows);
    StepGraph& graph = graphs_->get(std::max(counts.tokens, arithmetic_.min_rows), outputs);
    fill(graph, batch);
    attention_->prepare(batch, pool);
    graphs_->run(graph);
    attention_->check();
    if (counts.outputs == 0) return {};
    return {static_cast<const float*>(graph.logits->data),
            static_cast<size_t>(counts.outputs * hp_.vocab_size)};
  }

 private:
  struct Counts {
    int tokens = 0;
    int outputs = 0;
  };

  Arithmetic choose(ExactMode mode) const {
    try {
      return choose_arithmetic(weights_.matrices(), mode);
    } catch (const std::runtime_error& error) {
      file_.fail(error.what());
    }
  }

  void describe() {
    info_.family = family_.name;
    info_.name = file_.text("general.name").value_or("");
    info_.vocab_size = static_cast<int32_t>(hp_.vocab_size);
    info_.context_length = static_cast<int32_t>(hp_.context_length);
    info_.num_layers = hp_.num_layers;
    info_.num_q_heads = hp_.num_q_heads;
    for (const ggml_tensor* t : file_.tensors()) info_.num_params += ggml_nelements(t);
    info_.weight_bytes = file_.tensor_bytes();
    info_.description = info_.family + " " + show_count(info_.num_params) + " parameters, " +
                        weight_types(weights_.matrices());
    info_.groups = attention_->groups();
    info_.exact = arithmetic_.exact;
    info_.exact_reason = arithmetic_.reason;
    info_.arithmetic_id = arithmetic_.id;
  }

  Counts check_batch(const StepBatch& batch) const {
    Counts counts;
    for (const auto& s : batch.sequences) {
      const auto n = static_cast<int64_t>(s.tokens.size());
      if (n == 0 || n > s.table->length()) {
        throw std::invalid_argument("step: " + std::to_string(n) + " new tokens in a sequence of " +
                                    std::to_string(s.table->length()));
      }
      if (s.num_outputs < 0 || s.num_outputs > n) {
        throw std::invalid_argument("step: " + std::to_string(s.num_outputs) + " outputs of " +
                                    std::to_string(n) + " tokens");
      }
      for (const int32_t token : s.tokens) check_token(token);
      counts.tokens = static_cast<int>(std::min<int64_t>(counts.tokens + n, kMostStepTokens + 1));
      counts.outputs += s.num_outputs;
    }
    if (counts.tokens > max_step_tokens_) {
      throw std::invalid_argument("step: more than " + std::to_string(max_step_tokens_) +
                                  " tokens");
    }
    return counts;
  }

  void check_token(int32_t token) const {
    if (token >= 0 && token < info_.vocab_size) return;
    throw std::invalid_argument("step: token " + std::to_string(token) + ", the vocabulary has " +
                                std::to_string(info_.vocab_size));
  }

  // Rows of padding are token 0 at position 0; padding outputs repeat the first row.
  static void fill(StepGraph& graph, const StepBatch& batch) {
    auto* tokens = static_cast<int32_t*>(graph.tokens->data);
    auto* positions = static_cast<int32_t*>(graph.positions->data);
    auto* out_rows = graph.out_rows ? static_cast<int32_t*>(graph.out_rows->data) : nullptr;
    int32_t row = 0, output = 0;
    for (const auto& s : batch.sequences) {
      const auto n = static_cast<int32_t>(s.tokens.size());
      const auto first = static_cast<int32_t>(s.table->length()) - n;
      for (int32_t i = 0; i < n; ++i, ++row) {
        tokens[row] = s.tokens[static_cast<size_t>(i)];
        positions[row] = first + i;
        if (i >= n - s.num_outputs) out_rows[output++] = row;
      }
    }
    for (; row < graph.num_rows; ++row) tokens[row] = positions[row] = 0;
    for (; output < graph.num_outputs; ++output) out_rows[output] = 0;
  }

  GgufFile file_;
  const Family& family_;
  Hyperparameters hp_;
  Weights weights_;
  int max_step_tokens_;
  Arithmetic arithmetic_;
  ModelInfo info_;
  std::unique_ptr<PagedAttention> attention_;
  std::unique_ptr<StepGraphs> graphs_;
};

}  // namespace

std::unique_ptr<Model> load_ggml_model(const std::string& path, const GgmlModelOptions& options) {
  check(options);
  route_ggml_log();
  return std::make_unique<GgmlModel>(path, options);
}

}  // namespace pagedkv
