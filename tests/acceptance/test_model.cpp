#include "acceptance/test_model.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "engine/engine.h"
#include "models/ggml/ggml_text.h"
#include "models/toy/toy_model.h"

namespace pagedkv::testing {
namespace {

struct Recorder final : RequestSink {
  explicit Recorder(Generation& g) : out(g) {}
  void on_prompt_logprob(int64_t, double logprob, std::span<const TokenLogprob>) override {
    out.prompt_logprobs.push_back(logprob);
  }
  void on_token(const TokenEvent& e) override {
    out.tokens.push_back(e.id);
    out.logprobs.push_back(e.logprob.value());
  }
  void on_finish(FinishReason, std::string_view, std::exception_ptr error) override {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::exception& e) {
      out.error = e.what();
    }
  }
  Generation& out;
};

}  // namespace

std::string model_file(const std::string& name) {
  const char* folder = std::getenv("PAGEDKV_TEST_MODELS");
  if (!folder)
    throw std::runtime_error(
        "PAGEDKV_TEST_MODELS is not set: run scripts/test.sh, which makes the test models");
  return std::string(folder) + "/" + name;
}

std::string english(size_t offset, size_t bytes) {
  std::ifstream in(PAGEDKV_SOURCE_DIR "/LICENSE");
  std::ostringstream text;
  text << in.rdbuf();
  std::string once, out;
  for (char c : text.str())  // one space for each run of white space
    if (c != ' ' && c != '\n')
      once += c;
    else if (!once.empty() && once.back() != ' ')
      once += ' ';
  while (out.size() < offset + bytes) out += once;
  return out.substr(offset, bytes);
}

Generation generate(Model& model, const std::vector<int32_t>& prompt, const RunConfig& config) {
  Generation out;
  Recorder sink(out);
  const auto tokenizer = make_toy_tokenizer();  // text is not looked at
  PagePool pool(pool_options(model.info(), config.kv));
  EngineOptions options;
  options.prefill_chunk = config.prefill_chunk;
  Engine engine(
      model, *tokenizer, pool,
      [&](const SamplerOptions& s) { return make_sampler(s, model.info().vocab_size); }, options);
  GenerationRequest request;
  request.prompt = prompt;
  request.max_new_tokens = config.max_new_tokens;
  request.ignore_end = true;
  request.logprobs = true;
  request.prompt_logprobs = config.prompt_logprobs;
  engine.submit(std::move(request), sink);
  while (engine.step()) {
  }
  pool.verify();
  return out;
}

}  // namespace pagedkv::testing
