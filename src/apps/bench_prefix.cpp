#include "apps/bench_prefix.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>

#include "apps/measure.h"
#include "engine/engine.h"

namespace pagedkv::apps {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;
using Prompts = std::vector<std::vector<int32_t>>;

struct Answer final : RequestSink {
  void on_token(const TokenEvent& event) override {
    times.push_back(Clock::now());
    tokens.push_back(event.id);
  }
  void on_finish(FinishReason, std::string_view, std::exception_ptr e) override { error = e; }

  std::vector<int32_t> tokens;
  std::vector<Clock::time_point> times;
  std::exception_ptr error;
};

// One way to run all requests.
struct Run {
  double prompt_ms = 0;          // until each has its first token
  double gen_per_second = 0;     // tokens of all answers from there on
  int64_t computed = 0;          // prompt tokens
  int64_t pages = 0, bytes = 0;  // held at the peak
  std::vector<std::vector<int32_t>> answers;
};

Run run(LoadedModel& m, const KvSettings& settings, const PrefixBench& o, const Prompts& prompts,
        bool shares) {
  PagePool pool(pool_options(m.model->info(), settings));
  EngineOptions options;
  options.prefix_cache = shares;
  Engine engine(
      *m.model, *m.tokenizer, pool, [&](const SamplerOptions& s) { return m.make_sampler(s); },
      options);
  std::vector<std::unique_ptr<Answer>> answers;
  const auto begin = Clock::now();
  for (const auto& prompt : prompts) {
    GenerationRequest request;
    request.prompt = prompt;
    request.max_new_tokens = o.num_gen;
    request.ignore_end = true;
    engine.submit(std::move(request), *answers.emplace_back(std::make_unique<Answer>()));
  }
  while (engine.step()) {
  }
  const auto end = Clock::now();
  Run out;
  auto last_first = begin;
  for (const auto& answer : answers) {
    if (answer->error) std::rethrow_exception(answer->error);
    last_first = std::max(last_first, answer->times.at(0));
    out.answers.push_back(std::move(answer->tokens));
  }
  int64_t later = 0;  // tokens
  for (const auto& answer : answers)
    later += std::ranges::count_if(answer->times, [&](auto time) { return time > last_first; });
  const auto ms = [](auto a, auto b) {
    return std::chrono::duration<double, std::milli>(b - a).count();
  };
  out.prompt_ms = ms(begin, last_first);
  out.gen_per_second = 1e3 * static_cast<double>(later) / ms(last_first, end);
  out.computed = engine.stats().prompt_tokens;
  out.pages = pool.stats().pages_peak;
  out.bytes = pool.stats().bytes_peak;
  return out;
}

Prompts make_prompts(const PrefixBench& o, int vocab_size, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int32_t> any(0, vocab_size - 1);
  const auto draw = [&](std::vector<int32_t>& tokens, int count) {
    for (int i = 0; i < count; ++i) tokens.push_back(any(random));
  };
  std::vector<int32_t> shared;
  draw(shared, o.shared_tokens);
  Prompts prompts(static_cast<size_t>(o.num_requests), shared);
  for (auto& prompt : prompts) draw(prompt, o.own_tokens);
  return prompts;
}

ordered_json summary(const std::vector<Run>& runs) {
  std::vector<double> prompt, gen;
  for (const Run& run : runs) {
    prompt.push_back(run.prompt_ms);
    gen.push_back(run.gen_per_second);
  }
  return {{"prompt_ms", median(prompt)},
          {"gen_per_second", median(gen)},
          {"prompt_tokens_computed", runs[0].computed},
          {"pages_peak", runs[0].pages},
          {"bytes_peak", runs[0].bytes},
          {"samples_prompt_ms", prompt},
          {"samples_gen_per_second", gen}};
}

double ratio(const std::vector<Run>& first, const std::vector<Run>& second, double Run::* what) {
  std::vector<double> a, b;
  for (const Run& run : first) a.push_back(run.*what);
  for (const Run& run : second) b.push_back(run.*what);
  return median(ratios(a, b));
}

}  // namespace

ordered_json bench_prefix(LoadedModel& m, const KvSettings& settings, const PrefixBench& o) {
  const ModelInfo& info = m.model->info();
  if (const int64_t need = int64_t{o.shared_tokens} + o.own_tokens + o.num_gen;
      need > info.context_length)
    throw CapacityError("a prompt of " + std::to_string(o.shared_tokens + o.own_tokens) +
                        " tokens and an answer of " + std::to_string(o.num_gen) +
                        ": the model's context is " + std::to_string(info.context_length));
  KvSettings s = settings;
  s.max_seqs = o.num_requests;
  std::vector<Run> alone, shared;
  for (int i = 0; i < o.repetitions; ++i) {
    const Prompts prompts = make_prompts(o, info.vocab_size, static_cast<uint32_t>(i + 1));
    alone.push_back(run(m, s, o, prompts, false));
    shared.push_back(run(m, s, o, prompts, true));
    if (info.exact && alone.back().answers != shared.back().answers)
      throw std::runtime_error("answers over shared pages differ from those alone");
  }
  return {{"model_type", info.description},
          {"type_k", page_format_name(s.key_format)},
          {"type_v", page_format_name(s.value_format)},
          {"exact", info.exact},
          {"n_requests", o.num_requests},
          {"n_shared", o.shared_tokens},
          {"n_own", o.own_tokens},
          {"n_gen", o.num_gen},
          {"shared", summary(shared)},
          {"alone", summary(alone)},
          {"speedup",
           {{"prompt", ratio(alone, shared, &Run::prompt_ms)},
            {"gen", ratio(shared, alone, &Run::gen_per_second)}}},
          {"bytes_saved", alone[0].bytes - shared[0].bytes}};
}

}  // namespace pagedkv::apps
