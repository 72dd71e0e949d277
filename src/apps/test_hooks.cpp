#include "apps/test_hooks.h"

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace pagedkv::apps {

#ifdef PAGEDKV_TEST_HOOKS
namespace {

int64_t number_from(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') return 0;
  const std::string_view text = value;
  int64_t x = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  if (error != std::errc() || end != text.data() + text.size() || x < 0)
    throw std::invalid_argument(variable + std::string("=") + value + ": must be a whole number");
  return x;
}

class HookedModel final : public Model {
 public:
  HookedModel(std::unique_ptr<Model> model, std::chrono::milliseconds step, int64_t fail_at)
      : model_(std::move(model)), step_(step), fail_at_(fail_at) {}

  const ModelInfo& info() const noexcept override { return model_->info(); }
  int max_step_tokens() const noexcept override { return model_->max_step_tokens(); }
  std::span<const float> step(const StepBatch& batch, PagePool& pool) override {
    std::this_thread::sleep_for(step_);
    if (fail_at_ > 0)
      for (const StepBatch::Sequence& s : batch.sequences) {
        const int64_t length = s.table->length();
        if (s.tokens.size() > 1 || !prompts_.contains(s.table)) prompts_[s.table] = length;
        if (length - prompts_[s.table] + 1 == fail_at_ && s.num_outputs > 0)
          throw std::runtime_error("PAGEDKV_TEST_FAIL_AT");
      }
    return model_->step(batch, pool);
  }

 private:
  std::unique_ptr<Model> model_;
  const std::chrono::milliseconds step_;
  const int64_t fail_at_;
  std::map<const BlockTable*, int64_t>
      prompts_;  // tokens of each sequence's prompt, as far as it is computed
};

}  // namespace

std::unique_ptr<Model> with_test_hooks(std::unique_ptr<Model> model) {
  const std::chrono::milliseconds step(number_from("PAGEDKV_TEST_STEP_MS"));
  const int64_t fail_at = number_from("PAGEDKV_TEST_FAIL_AT");
  if (step.count() == 0 && fail_at == 0) return model;
  return std::make_unique<HookedModel>(std::move(model), step, fail_at);
}

void add_test_hooks(PagePoolOptions& pages) {
  const int64_t most = number_from("PAGEDKV_TEST_COMMIT_BYTES");
  if (most == 0) return;
  pages.commit_hook = [most, sum = int64_t{0}](int64_t bytes) mutable {
    if (bytes > most - sum) return false;
    sum += bytes;
    return true;
  };
}
#else
void add_test_hooks(PagePoolOptions&) {}
std::unique_ptr<Model> with_test_hooks(std::unique_ptr<Model> model) { return model; }
#endif

}  // namespace pagedkv::apps
