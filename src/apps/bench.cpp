#include "apps/bench.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "apps/bench_attention.h"
#include "apps/bench_prefix.h"
#include "apps/cli.h"
#include "apps/cpu_name.h"
#include "engine/text_stream.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

struct BenchOptions {
  ModelOptions model;
  std::vector<int> num_prompt{512}, num_gen{128}, depth{0}, threads;
  int repetitions = 5;
  bool no_warmup = false;
  std::string flash_attn = "1";
  std::string output = "md";
  bool attention = false;
  AttentionBench one;  // with --attention
  bool prefix = false;
  PrefixBench sharing;  // with --prefix
};

struct Case {
  int num_prompt, num_gen, depth;
};

// One sequence driven straight through the model, without sampling, as llama-bench does: random tokens, chunks of at most
// the step's limit, logits for the last token of a prompt and for every generated one.
class Driver {
 public:
  Driver(Model& model, const KvSettings& settings)
      : model_(model), pool_(pool_options(model.info(), settings)), table_(pool_), random_(1) {}

  void trim_to(int64_t length) { table_.trim_to(length); }
  void prompt(int n) {
    while (n > 0) {
      const int now = std::min(n, model_.max_step_tokens());
      step(now, n == now ? 1 : 0);
      n -= now;
    }
  }
  void generate(int n) {
    for (int i = 0; i < n; ++i) step(1, 1);
  }
  const PagePool& pool() const { return pool_; }

 private:
  void step(int n, int outputs) {
    std::uniform_int_distribution<int32_t> any(0, model_.info().vocab_size - 1);
    tokens_.resize(n);
    for (auto& t : tokens_) t = any(random_);
    table_.append(n);
    StepBatch batch;
    batch.sequences.push_back({&table_, tokens_, outputs});
    model_.step(batch, pool_);
  }

  Model& model_;
  PagePool pool_;
  BlockTable table_;
  std::mt19937 random_;
  std::vector<int32_t> tokens_;
};

double mean(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v;
  return x.empty() ? 0 : sum / static_cast<double>(x.size());
}

double deviation(const std::vector<double>& x) {
  if (x.size() < 2) return 0;
  double sum = 0;
  for (double v : x) sum += (v - mean(x)) * (v - mean(x));
  return std::sqrt(sum / static_cast<double>(x.size() - 1));
}

std::string test_time() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

std::string case_name(const Case& c) {
  std::string name = c.num_prompt && c.num_gen
                         ? "pp" + std::to_string(c.num_prompt) + "+tg" + std::to_string(c.num_gen)
                     : c.num_prompt ? "pp" + std::to_string(c.num_prompt)
                                    : "tg" + std::to_string(c.num_gen);
  return c.depth ? name + " @ d" + std::to_string(c.depth) : name;
}

ordered_json run_case(const Case& c, const BenchOptions& o, Model& model,
                      const KvSettings& settings, int threads) {
  const auto& info = model.info();
  const int need = c.depth + c.num_prompt + c.num_gen;
  KvSettings s = settings;
  if (!s.num_pages) s.num_pages = (need + s.page_size - 1) / s.page_size;
  Driver driver(model, s);
  if (!o.no_warmup) {
    if (c.num_prompt) driver.prompt(std::min(c.num_prompt, model.max_step_tokens()));
    if (c.num_gen) driver.generate(1);
  }
  driver.trim_to(0);
  driver.prompt(c.depth);
  std::vector<double> ns;
  for (int r = 0; r < o.repetitions; ++r) {
    driver.trim_to(c.depth);
    const auto begin = Clock::now();
    driver.prompt(c.num_prompt);
    driver.generate(c.num_gen);
    ns.push_back(std::chrono::duration<double, std::nano>(Clock::now() - begin).count());
  }
  std::vector<double> ts;
  for (double t : ns) ts.push_back(1e9 * (c.num_prompt + c.num_gen) / t);
  std::vector<int64_t> samples_ns(ns.begin(), ns.end());
  return {{"build_commit", "pagedkv-" PAGEDKV_VERSION_TEXT},
          {"build_number", 0},
          {"cpu_info", cpu_name()},
          {"gpu_info", ""},
          {"backends", "CPU"},
          {"kernel_set", kernels().name},
          {"model_filename", valid_utf8(o.model.path())},
          {"model_type", info.description},
          {"model_size", info.weight_bytes},
          {"model_n_params", info.num_params},
          {"n_batch", model.max_step_tokens()},
          {"n_ubatch", model.max_step_tokens()},
          {"n_threads", threads},
          {"type_k", page_format_name(s.key_format)},
          {"type_v", page_format_name(s.value_format)},
          {"kv_cache_dtype", format_label(s)},
          {"block_size", s.page_size},
          {"exact", info.exact},
          {"n_gpu_layers", 0},
          {"flash_attn", true},
          {"n_prompt", c.num_prompt},
          {"n_gen", c.num_gen},
          {"n_depth", c.depth},
          {"test_time", test_time()},
          {"avg_ns", static_cast<int64_t>(mean(ns))},
          {"stddev_ns", static_cast<int64_t>(deviation(ns))},
          {"avg_ts", mean(ts)},
          {"stddev_ts", deviation(ts)},
          {"samples_ns", samples_ns},
          {"samples_ts", ts}};
}

void print_markdown(const ordered_json& r, const Case& c, bool first) {
  if (first)
    std::printf(
        "| model | kv | threads | exact | test | t/s |\n| --- | --- | --: | --- | --: | --: |\n");
  std::printf("| %s | %s | %d | %s | %s | %.2f ± %.2f |\n",
              r["model_type"].get<std::string>().c_str(),
              r["kv_cache_dtype"].get<std::string>().c_str(), r["n_threads"].get<int>(),
              r["exact"].get<bool>() ? "yes" : "no", case_name(c).c_str(),
              r["avg_ts"].get<double>(), r["stddev_ts"].get<double>());
  std::fflush(stdout);
}

std::vector<Case> cases_of(const BenchOptions& o) {
  std::vector<Case> cases;
  for (int d : o.depth) {
    for (int p : o.num_prompt)
      if (p > 0) cases.push_back({p, 0, d});
    for (int n : o.num_gen)
      if (n > 0) cases.push_back({0, n, d});
  }
  if (cases.empty()) throw std::invalid_argument("nothing to measure: -p and -n are both 0");
  return cases;
}

void print_attention(const ordered_json& r, bool first) {
  const bool shared = r.contains("speedup");
  if (first)
    std::printf(
        "| case | kernels | threads | ms | GB/s | GFLOP/s |%s\n"
        "| --- | --- | --: | --: | --: | --: |%s\n",
        shared ? " copied ms | speedup |" : "", shared ? " --: | --: |" : "");
  std::printf("| %s | %s | %d | %.3f | %.2f | %.1f |", r["case"].get<std::string>().c_str(),
              r["kernel_set"].get<std::string>().c_str(), r["threads"].get<int>(),
              r["ms"].get<double>(), r["gb_s"].get<double>(), r["gflop_s"].get<double>());
  if (shared)
    std::printf(" %.3f | %.2f |", r["copied_ms"].get<double>(), r["speedup"].get<double>());
  std::printf("\n");
  std::fflush(stdout);
}

// Rows as they come, as Markdown or as lines of JSON, or all of them at the end as one array of JSON.
class Report {
 public:
  explicit Report(const std::string& format) : format_(format) {}

  // print(row, whether it is the first) writes it as Markdown.
  template <class Print>
  void add(ordered_json row, const Print& print) {
    if (format_ == "md") print(row, rows_.empty());
    if (format_ == "jsonl") std::cout << row.dump() << std::endl;
    rows_.push_back(std::move(row));
  }
  int end() const {
    if (format_ == "json") std::cout << rows_.dump(2) << std::endl;
    if (!std::cout || std::ferror(stdout) != 0)
      throw std::runtime_error("standard output: cannot be written");
    return kOk;
  }

 private:
  const std::string& format_;
  ordered_json rows_ = ordered_json::array();
};

// One case for each number of threads.
int bench_one_attention(BenchOptions o) {
  const KvSettings settings = o.model.kv_settings();
  o.one.key_format = settings.key_format;
  o.one.value_format = settings.value_format;
  o.one.page_size = settings.page_size;
  o.one.repetitions = o.repetitions;
  Report report(o.output);
  for (const int threads : o.threads) {
    o.one.num_threads = threads;
    report.add(bench_attention(o.one), print_attention);
  }
  return report.end();
}

void print_prefix(const ordered_json& r, bool first) {
  if (first)
    std::puts(
        "| requests | shared + own | threads | prompts ms | alone | speedup | answers t/s | alone "
        "| speedup | MiB | alone |\n"
        "| --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |");
  const auto number = [&](const char* run, const char* what) { return r[run][what].get<double>(); };
  constexpr double kMiB = 1 << 20;
  std::printf("| %d | %d + %d | %d | %.0f | %.0f | %.2f | %.0f | %.0f | %.2f | %.1f | %.1f |\n",
              r["n_requests"].get<int>(), r["n_shared"].get<int>(), r["n_own"].get<int>(),
              r["n_threads"].get<int>(), number("shared", "prompt_ms"),
              number("alone", "prompt_ms"), number("speedup", "prompt"),
              number("shared", "gen_per_second"), number("alone", "gen_per_second"),
              number("speedup", "gen"), number("shared", "bytes_peak") / kMiB,
              number("alone", "bytes_peak") / kMiB);
  std::fflush(stdout);
}

// Once for each number of threads.
int bench_sharing(BenchOptions o) {
  const KvSettings settings = o.model.kv_settings();
  o.sharing.repetitions = o.repetitions;
  Report report(o.output);
  for (const int threads : o.threads) {
    o.model.num_threads = threads;
    auto m = load_model(o.model, true);
    ordered_json r = bench_prefix(m, settings, o.sharing);
    r["n_threads"] = threads;
    r["cpu_info"] = cpu_name();
    r["kernel_set"] = kernels().name;
    r["test_time"] = test_time();
    report.add(std::move(r), print_prefix);
  }
  return report.end();
}

int bench(BenchOptions o) {
  if (o.attention && o.prefix) throw std::invalid_argument("--prefix: --attention is given too");
  if (o.threads.empty()) o.threads = {o.model.threads()};
  if (o.attention) return bench_one_attention(std::move(o));
  if (o.prefix) return bench_sharing(std::move(o));
  const auto cases = cases_of(o);
  const KvSettings settings = o.model.kv_settings();
  Report report(o.output);
  for (int threads : o.threads) {
    o.model.num_threads = threads;
    auto m = load_model(o.model, true, false);
    for (const auto& c : cases) {
      if (const int need = c.depth + c.num_prompt + c.num_gen;
          need > m.model->info().context_length)
        throw CapacityError(case_name(c) + " needs " + std::to_string(need) +
                            " tokens, the model's context is " +
                            std::to_string(m.model->info().context_length));
      report.add(run_case(c, o, *m.model, settings, o.model.threads()),
                 [&](const ordered_json& r, bool first) { print_markdown(r, c, first); });
    }
  }
  return report.end();
}

}  // namespace

void add_bench(CLI::App& app, std::function<int()>& command) {
  auto o = std::make_shared<BenchOptions>();
  auto* sub = app.add_subcommand(
      "bench", "measure prompt and generation speed (llama-bench's flags and JSON fields)");
  o->model.add_model(*sub);
  sub->remove_option(sub->get_option("--threads"));
  name_variable(sub->add_option("-t,--threads", o->threads,
                                "threads, a list (default: the cores that are free)"))
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  add_option(*sub, "-p,--n-prompt", o->num_prompt, "prompt tokens, a list; 0: none")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 24));
  add_option(*sub, "-n,--n-gen", o->num_gen, "tokens to generate, a list; 0: none")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 24));
  add_option(*sub, "-d,--n-depth", o->depth, "tokens held before the test, a list")
      ->delimiter(',')
      ->check(CLI::Range(0, 1 << 24));
  add_option(*sub, "-r,--repetitions", o->repetitions, "runs of each test")
      ->check(CLI::Range(1, 100000));
  add_option(*sub, "-o,--output", o->output, "md, json or jsonl")
      ->check(CLI::IsMember({"md", "json", "jsonl"}));
  name_variable(sub->add_flag("--no-warmup", o->no_warmup, "leave the warm-up run out"));
  add_option(*sub, "--flash-attn", o->flash_attn, "(-fa) attention is always fused: 1, on or auto")
      ->check(CLI::IsMember({"1", "on", "auto"}));
  auto* sharing = "Shared beginnings";
  name_variable(
      sub->add_flag("--prefix", o->prefix,
                    "time requests whose prompts begin alike, with that beginning's pages "
                    "shared and without"))
      ->group(sharing);
  add_option(*sub, "--prefix-tokens", o->sharing.shared_tokens,
             "tokens that all prompts begin with")
      ->check(CLI::Range(1, 1 << 24))
      ->group(sharing);
  add_option(*sub, "--own-tokens", o->sharing.own_tokens, "tokens of each prompt behind them")
      ->check(CLI::Range(1, 1 << 24))
      ->group(sharing);
  add_option(*sub, "--prefix-requests", o->sharing.num_requests, "requests at once")
      ->check(CLI::Range(1, 256))
      ->group(sharing);
  add_option(*sub, "--answer-tokens", o->sharing.num_gen, "tokens of each answer")
      ->check(CLI::Range(1, 1 << 24))
      ->group(sharing);
  auto* attention = "Attention alone";
  name_variable(
      sub->add_flag("--attention", o->attention,
                    "time one attention call over shuffled pages, checked against the reference; "
                    "no model is loaded"))
      ->group(attention);
  add_option(*sub, "--heads", o->one.heads, "query/kv heads")->group(attention);
  add_option(*sub, "--head-dim", o->one.head_dim, "elements of a head")
      ->check(CLI::Range(1, 512))
      ->group(attention);
  add_option(*sub, "--context", o->one.context, "tokens held, the new ones among them")
      ->check(CLI::Range(1, 1 << 26))
      ->group(attention);
  add_option(*sub, "--new-tokens", o->one.new_tokens, "queries of each sequence")
      ->check(CLI::Range(1, 1 << 20))
      ->group(attention);
  add_option(*sub, "--num-seqs", o->one.num_seqs, "sequences in the call")
      ->check(CLI::Range(1, 1 << 16))
      ->group(attention);
  add_option(
      *sub, "--shared-tokens", o->one.shared_tokens,
      "first tokens that all sequences hold in the same pages; copies of them are timed beside it")
      ->check(CLI::Range(0, 1 << 26))
      ->group(attention);
  o->model.add_pages(*sub);
  sub->parse_complete_callback([o, &command] { command = [=] { return bench(*o); }; });
}

}  // namespace pagedkv::apps
