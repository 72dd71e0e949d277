#include "models/ggml/ggml_model.h"

#include <ggml-backend.h>

#include <algorithm>
#include <map>
#include <stdexcept>

#include "models/ggml/arithmetic.h"
#include "models/ggml/describe.h"
#include "models/ggml/family.h"
#include "models/ggml/ggml_log.h"
#include "models/ggml/gguf_file.h"
#include "models/ggml/hyperparameters.h"
#include "models/ggml/paged_attention.h"
#include "models/ggml/step_graph.h"
#include "models/ggml/weights.h"

// Takes the place of ggml's own, which then is not linked, nor are the kernels behind it. Our graphs do not use them, and
// their tiles would be 74 KiB of zeroed thread-local memory in every thread of a server.
ggml_backend_buffer_type_t ggml_backend_amx_buffer_type();
ggml_backend_buffer_type_t ggml_backend_amx_buffer_type() { return nullptr; }

namespace pagedkv {
namespace {

constexpr int kMostStepTokens = 65536;

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

ModelInfo describe_file(const GgufFile& file, const Family& family, const Hyperparameters& hp,
                        const Weights& weights, int max_step_tokens) {
  int64_t num_params = 0;
  for (const ggml_tensor* t : file.tensors()) num_params += ggml_nelements(t);
  ModelInfo info =
      describe(family, hp, num_params, weight_types(weights.matrices()), max_step_tokens);
  info.name = file.text("general.name").value_or("");
  info.weight_bytes = file.tensor_bytes();
  return info;
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
    info_ = describe_file(file_, family_, hp_, weights_, max_step_tokens_);
    info_.exact = arithmetic_.exact;
    info_.exact_reason = arithmetic_.reason;
    info_.arithmetic_id = arithmetic_.id;
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

ModelInfo describe_ggml_model(const std::string& path) {
  route_ggml_log();
  const GgufFile file(path, GgufFile::Contents::kHeader);
  const Family& family = find_family(file);
  const Hyperparameters hp = read_hyperparameters(file, family);
  return describe_file(file, family, hp, bind_weights(file, family, hp),
                       GgmlModelOptions().max_step_tokens);
}

std::unique_ptr<Model> load_ggml_model(const std::string& path, const GgmlModelOptions& options) {
  check(options);
  route_ggml_log();
  return std::make_unique<GgmlModel>(path, options);
}

}  // namespace pagedkv
