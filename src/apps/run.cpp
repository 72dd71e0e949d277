#include "apps/run.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "apps/chat.h"
#include "apps/cli.h"
#include "apps/conversation.h"
#include "apps/progress.h"
#include "base/bounded_text.h"
#include "engine/engine.h"
#include "engine/text_stream.h"
#include "pagedkv/base/log.h"

namespace pagedkv::apps {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

double ms_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::milli>(b - a).count();
}

struct RunOptions {
  ModelOptions model;
  std::vector<std::string> prompt;
  std::string file;
  bool raw = false, stats = false, json = false, go_on = false;
  std::string system, template_kwargs;
  int64_t max_new_tokens = -1;
  int prefill_chunk = 0;
  int num_answers = 1;
  SamplerOptions sampler;
  int64_t seed = -1;
  std::vector<std::string> stop;
};

// Without a prompt, at a terminal.
bool is_chat(const RunOptions& o) {
  return o.prompt.empty() && o.file.empty() && !o.raw && !o.json && isatty(STDIN_FILENO);
}

TemplateKwargs parse_kwargs(const std::string& text) {
  TemplateKwargs out;
  if (text.empty()) return out;
  if (json_depth(text) > kMostJsonDepth)
    throw std::invalid_argument("--chat-template-kwargs: nested " +
                                std::to_string(json_depth(text)) + " deep; the limit is " +
                                std::to_string(kMostJsonDepth));
  const auto object = ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object())
    throw std::invalid_argument("--chat-template-kwargs " + text +
                                ": must be a JSON object, such as {\"enable_thinking\": false}");
  for (const auto& [key, value] : object.items()) out[key] = value.dump();
  return out;
}

// What was said before the prompt.
Conversation begin_conversation(const RunOptions& o) {
  Conversation out;
  if (o.go_on) out = Conversation::load(conversation_path());
  if (!o.system.empty()) out.set_system(o.system);
  return out;
}

GenerationRequest make_request(const RunOptions& o) {
  GenerationRequest request;
  request.sampler = o.sampler;
  request.sampler.top_k = std::max(0, o.sampler.top_k);
  request.sampler.seed = o.seed < 0 ? std::random_device{}() : static_cast<uint64_t>(o.seed);
  if (o.sampler.temperature > 0 && o.seed < 0)
    log(LogLevel::kInfo, "seed " + std::to_string(request.sampler.seed));
  request.max_new_tokens = o.max_new_tokens;
  request.stop = o.stop;
  request.logprobs = request.prompt_logprobs = o.json;
  return request;
}

// The prompt from exactly one of: arguments, --file, standard input.
std::string read_prompt(const RunOptions& o) {
  if (!o.prompt.empty() && !o.file.empty())
    throw std::invalid_argument("--file " + o.file + ": a prompt is given as an argument already");
  const bool dash = o.prompt == std::vector<std::string>{"-"};
  std::string text;
  if (!o.file.empty()) {
    text = read_file(o.file, "--file " + o.file);
  } else if (!o.prompt.empty() && !dash) {
    for (const auto& word : o.prompt) text += (text.empty() ? "" : " ") + word;
  } else if (!isatty(STDIN_FILENO) || dash) {
    text = read_all(std::cin, "standard input");
    if (!text.empty() && text.back() == '\n') text.pop_back();
  }
  if (text.empty())
    throw std::invalid_argument(
        "no prompt: give it as an argument, with --file, or on standard input");
  return text;
}

// The first SIGINT or SIGTERM ends the answer, the second the program.
std::atomic<int> g_signals{0};
void on_signal(int signal) {
  if (g_signals.fetch_add(1) > 0) _exit(128 + signal);
}

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0)
    throw std::runtime_error("standard output: cannot be written");
}

// Writes the only answer as it comes, and keeps what is reported.
class RunSink final : public RequestSink {
 public:
  RunSink(const RunOptions& options, const Tokenizer& tokenizer, bool shows_progress)
      : options_(options), tokenizer_(tokenizer), shows_progress_(shows_progress) {}

  void on_prompt(int64_t done, int64_t total) override {
    num_prompt = done;
    if (!shows_progress_) return;
    bar_.show(static_cast<double>(done) / static_cast<double>(total));
    if (done == total) bar_.clear();
  }
  void on_prompt_logprob(int64_t, double logprob, std::span<const TokenLogprob>) override {
    prompt_logprobs_.push_back(logprob);
  }
  void on_token(const TokenEvent& event) override {
    if (num_tokens++ == 0) first_token = Clock::now();
    last_token = Clock::now();
    if (options_.json) {
      tokens_ += (tokens_.empty() ? "" : ",") + std::string("{\"id\":") + std::to_string(event.id) +
                 ",\"text\":" + quoted(tokenizer_.piece(event.id, true)) +
                 ",\"logprob\":" + number(event.logprob.value_or(NAN)) + "}";
    }
    write(event.text);
  }
  void on_finish(FinishReason why, std::string_view rest, std::exception_ptr e) override {
    write(rest);
    reason = why;
    error = e;
    finished = Clock::now();
  }

  // Of --json: the members of an answer, and the array of the prompt's tokens.
  std::string answer_json() const {
    return "\"text\":" + quoted(text) +
           ",\"finish_reason\":" + quoted(std::string(finish_reason_name(reason))) +
           ",\"tokens\":[" + tokens_ + "]";
  }
  std::string prompt_json(const std::vector<int32_t>& prompt) const {
    std::string out = "[";
    for (size_t i = 0; i < prompt.size(); ++i)
      out +=
          (i ? "," : "") + std::string("{\"id\":") + std::to_string(prompt[i]) + ",\"logprob\":" +
          (i == 0 || i > prompt_logprobs_.size() ? "null" : number(prompt_logprobs_[i - 1])) + "}";
    return out + "]";
  }
  static std::string quoted(const std::string& what) {
    return ordered_json(valid_utf8(what)).dump();
  }

  int64_t num_prompt = 0;  // prompt tokens computed; fewer than all where the run was cancelled
  int64_t num_tokens = 0;
  std::string text;  // the answer
  FinishReason reason = FinishReason::kError;
  std::exception_ptr error;
  Clock::time_point first_token{}, last_token{}, finished{};

 private:
  // JSON has no infinity.
  static std::string number(double x) { return std::isfinite(x) ? shortest(x) : "-9999.0"; }
  void write(std::string_view more) {
    text += more;
    if (!options_.json && options_.num_answers == 1) print(more);
  }

  const RunOptions& options_;
  const Tokenizer& tokenizer_;
  bool shows_progress_;
  ProgressBar bar_{"prompt", true};
  std::string tokens_;
  std::vector<double> prompt_logprobs_;
};

using Answers = std::vector<std::unique_ptr<RunSink>>;

// What lies behind an answer that was written as it came, or all of several.
void print_answers(const Answers& answers) {
  if (answers.size() == 1) {
    const std::string& text = answers[0]->text;
    if (!text.empty() && text.back() != '\n') print("\n");
    return;
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    const std::string head = (i ? "\n" : "") + std::string("answer ") + std::to_string(i + 1) +
                             " of " + std::to_string(answers.size()) + ":\n";
    print(head + answers[i]->text + "\n");
  }
}

// The object of --json; `rest` holds usage, timings and stats. Several answers are "choices".
std::string json(const Answers& answers, const std::vector<int32_t>& prompt,
                 const ordered_json& rest) {
  std::string out = "{";
  if (answers.size() == 1) {
    out += answers[0]->answer_json();
  } else {
    out += "\"choices\":[";
    for (size_t i = 0; i < answers.size(); ++i)
      out += (i ? "," : "") + std::string("{\"index\":") + std::to_string(i) + "," +
             answers[i]->answer_json() + "}";
    out += "]";
  }
  out += ",\"prompt_tokens\":" + answers[0]->prompt_json(prompt);
  for (const auto& [key, value] : rest.items())
    out += "," + RunSink::quoted(key) + ":" + value.dump();
  return out + "}";
}

int64_t peak_rss_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

ordered_json stats_json(const PagePool& pool, const KvSettings& settings, int64_t tokens) {
  const auto s = pool.stats();
  int64_t blocks = 0;  // of a layer group, as --num-blocks; pages are counted over all
  for (int g = 0; g < pool.num_groups(); ++g) blocks = std::max(blocks, pool.pages_peak(g));
  const double tokens_held =  // where every group has a window, that is not known
      std::min(static_cast<double>(tokens), static_cast<double>(blocks * pool.page_size()));
  return {{"page_format", format_label(settings)},
          {"page_size", pool.page_size()},
          {"pages_peak", s.pages_peak},
          {"pages_capacity", s.pages_capacity},
          {"pages_committed", s.pages_committed},
          {"num_blocks_needed", blocks},
          {"tokens", tokens},
          {"block_utilization",
           blocks ? tokens_held / static_cast<double>(blocks * pool.page_size()) : 0.0},
          {"bytes_per_token", pool.bytes_per_token()},
          {"bytes_in_use", s.bytes_peak},
          {"bytes_committed", s.bytes_committed},
          {"bytes_resident", pool.bytes_resident()},
          {"bytes_reserved", s.bytes_reserved},
          {"bytes_limit", s.bytes_limit},
          {"bytes_moved", s.bytes_moved},
          {"grow_events", s.grow_events},
          {"commit_events", s.commit_events},
          {"allocations", s.allocations},
          {"refusals", s.refusals},
          {"peak_rss_bytes", peak_rss_bytes()}};
}

std::string stats_text(const ordered_json& stats, const ordered_json& timings) {
  std::ostringstream out;
  const auto bytes = [&](const char* key) { return format_bytes(stats[key].get<int64_t>()); };
  char line[200];
  std::snprintf(line, sizeof line,
                "prompt: %lld tokens in %.0f ms (%.1f tokens/s), generated: %lld in %.0f ms (%.1f "
                "tokens/s), start to first token %.0f ms\n",
                timings["prompt_n"].get<long long>(), timings["prompt_ms"].get<double>(),
                timings["prompt_per_second"].get<double>(), timings["predicted_n"].get<long long>(),
                timings["predicted_ms"].get<double>(),
                timings["predicted_per_second"].get<double>(),
                timings["first_token_ms"].get<double>());
  out << line << "pages: " << stats["pages_peak"] << " of " << stats["page_size"]
      << " tokens at the peak, room for " << stats["pages_capacity"] << ", growth events "
      << stats["grow_events"] << ", utilisation ";
  std::snprintf(line, sizeof line, "%.1f %%", 100 * stats["block_utilization"].get<double>());
  out << line << "\nbytes: in use " << bytes("bytes_in_use") << ", committed "
      << bytes("bytes_committed") << ", resident " << bytes("bytes_resident") << ", reserved "
      << bytes("bytes_reserved") << ", limit " << bytes("bytes_limit") << ", moved by growth "
      << stats["bytes_moved"] << "\nthis run needed --num-blocks " << stats["num_blocks_needed"];
  return out.str();
}

int run(RunOptions o, Clock::time_point start) {
  o.model.num_threads = o.model.threads();  // settled once: the default follows the machine's load
  const bool at_terminal = is_chat(o);
  if (o.raw && (o.go_on || !o.system.empty() || !o.template_kwargs.empty()))
    throw std::invalid_argument(
        "--raw has no chat template, which --system, --continue and --chat-template-kwargs need");
  if (o.num_answers > 1 && (at_terminal || o.go_on))
    throw std::invalid_argument("--num-answers " + std::to_string(o.num_answers) +
                                ": a conversation goes on with one answer; give a prompt, without "
                                "--continue");
  const TemplateKwargs kwargs = parse_kwargs(o.template_kwargs);
  Conversation conversation = begin_conversation(o);
  const std::string text = at_terminal ? "" : read_prompt(o);
  KvSettings settings = o.model.kv_settings();
  settings.max_seqs = o.num_answers;
  auto m = load_model(o.model, true);
  const auto& info = m.model->info();
  const auto loaded = Clock::now();

  PagePool pool(pool_options(info, settings));
  log(LogLevel::kInfo, startup_line(info, settings, pool, o.model.threads()));
  EngineOptions engine_options;
  engine_options.context = context_tokens(info, settings);
  engine_options.prefill_chunk = o.prefill_chunk;
  engine_options.max_seqs = o.num_answers;
  Engine engine(
      *m.model, *m.tokenizer, pool, [&](const SamplerOptions& s) { return m.make_sampler(s); },
      engine_options);

  GenerationRequest request = make_request(o);
  if (at_terminal)
    return chat({engine, pool, m, std::move(conversation), kwargs, std::move(request),
                 conversation_path()});

  conversation.add("user", text);
  const std::string rendered =
      o.raw ? text : m.chat_template->render(conversation.messages(), kwargs);
  const auto prompt = m.tokenizer->tokenize(rendered, true, !o.raw);
  request.prompt = prompt;
  Answers answers;
  std::vector<RequestSink*> sinks;
  for (int i = 0; i < o.num_answers; ++i)
    sinks.push_back(answers.emplace_back(std::make_unique<RunSink>(o, *m.tokenizer, i == 0)).get());
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  const auto begin = Clock::now();
  const auto ids = engine.submit(std::move(request), sinks);
  while (engine.step())
    if (g_signals.load() > 0)
      for (const RequestId id : ids) engine.cancel(id);
  if (!o.json) print_answers(answers);
  int64_t num_tokens = 0, num_later = 0;  // generated; of them, behind the first of each answer
  auto first = answers[0]->finished, last = begin;
  for (const auto& answer : answers) {
    if (answer->error) std::rethrow_exception(answer->error);
    num_tokens += answer->num_tokens;
    num_later += std::max<int64_t>(0, answer->num_tokens - 1);
    if (answer->num_tokens == 0) continue;
    first = std::min(first, answer->first_token);
    last = std::max(last, answer->last_token);
  }
  const int64_t num_prompt = answers[0]->num_prompt;
  const double prompt_ms = ms_between(begin, first),
               predicted_ms = num_later > 0 ? ms_between(first, last) : 0;
  const ordered_json timings{
      {"load_ms", ms_between(start, loaded)},
      {"prompt_n", num_prompt},
      {"prompt_ms", prompt_ms},
      {"prompt_per_second", 1e3 * static_cast<double>(num_prompt) / prompt_ms},
      {"predicted_n", num_tokens},
      {"predicted_ms", predicted_ms},
      {"predicted_per_second",
       predicted_ms > 0 ? 1e3 * static_cast<double>(num_later) / predicted_ms : 0.0},
      {"first_token_ms", ms_between(start, first)}};
  // The newest token of an answer is never stored: nothing follows it. The prompt is stored once.
  const auto stats = stats_json(pool, settings, num_prompt + num_later);
  if (o.json) {
    const auto all = static_cast<int64_t>(prompt.size());
    const ordered_json usage{{"prompt_tokens", all},
                             {"completion_tokens", num_tokens},
                             {"total_tokens", all + num_tokens}};
    std::cout << json(answers, prompt, {{"usage", usage}, {"timings", timings}, {"stats", stats}})
              << std::endl;
    if (!std::cout) throw std::runtime_error("standard output: cannot be written");
  }
  if (o.go_on) {
    conversation.add("assistant", answers[0]->text);
    conversation.keep(conversation_path());
  }
  if (o.stats) std::fprintf(stderr, "%s\n", stats_text(stats, timings).c_str());
  return kOk;
}

}  // namespace

void add_run(CLI::App& app, std::function<int()>& command) {
  const auto start = Clock::now();
  auto o = std::make_shared<RunOptions>();
  auto* sub = app.add_subcommand("run", "write text from a prompt, or chat at a terminal")
                  ->alias("generate");
  sub->add_option(
      "-p,--prompt,prompt", o->prompt,
      "the prompt, with or without the flag (else --file or, also as -, standard input)");
  sub->add_option("-f,--file", o->file, "read the prompt from a file")->type_name("FILE");
  name_variable(
      sub->add_flag("--raw", o->raw, "the prompt as it is, without the model's chat template"));
  add_option(*sub, "--system", o->system, "a system message before the first prompt")
      ->type_name("TEXT")
      ->default_str("");
  name_variable(
      sub->add_flag("--continue", o->go_on,
                    "go on with the last conversation (that was held at a terminal or continued)"));
  add_option(*sub, "--chat-template-kwargs", o->template_kwargs,
             "variables of the chat template, e.g. {\"enable_thinking\": false}")
      ->type_name("JSON")
      ->default_str("");
  o->model.add_model(*sub);
  add_option(*sub, "-n,--predict,--max-tokens", o->max_new_tokens,
             "most tokens to generate (-1: until the model ends or the context is full)")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 40));
  add_option(
      *sub, "--num-answers", o->num_answers,
      "answers to the prompt, which is computed once (also --n); each draws with a seed of its own")
      ->check(CLI::Range(1, 64));
  add_option(*sub, "-c,--ctx-size,--max-model-len", o->model.context,
             "context in tokens (default: the model's)")
      ->default_str("");
  add_option(*sub, "--prefill-chunk", o->prefill_chunk,
             "most prompt tokens in a step (default: 512)")
      ->default_str("")
      ->check(CLI::Range(1, 1 << 20));
  auto* sampling = "Sampling";
  add_option(*sub, "--temperature,--temp", o->sampler.temperature,
             "0: always the most likely token")
      ->check(in_range(0.0f, 100.0f))
      ->group(sampling);
  add_option(*sub, "--top-k", o->sampler.top_k, "0 or -1: off")
      ->check(CLI::Range(-1, std::numeric_limits<int32_t>::max()))
      ->group(sampling);
  add_option(*sub, "--top-p", o->sampler.top_p, "1: off")
      ->check(in_range(0.0f, 1.0f))
      ->group(sampling);
  add_option(*sub, "--min-p", o->sampler.min_p, "0: off")
      ->check(in_range(0.0f, 1.0f))
      ->group(sampling);
  add_option(*sub, "--repetition-penalty,--repeat-penalty", o->sampler.repetition_penalty,
             "1: off; over the last 64 tokens")
      ->check(in_range(0.01f, 100.0f))
      ->group(sampling);
  add_option(*sub, "-s,--seed", o->seed, "for temperature > 0 (-1: random, and reported)")
      ->check(CLI::Range(int64_t{-1}, std::numeric_limits<int64_t>::max()))
      ->group(sampling);
  name_variable(
      sub->add_option("--stop", o->stop, "end before this text; may be given more than once"))
      ->take_all()
      ->allow_extra_args(false)
      ->group(sampling);
  o->model.add_pages(*sub);
  name_variable(
      sub->add_flag("--stats", o->stats, "report pages, bytes, growth and times at the end"));
  name_variable(sub->add_flag("--json", o->json, "one JSON object on stdout instead of the text"));
  // On completion, not as a plain callback: else CLI11 reads this subcommand's variables for every other.
  sub->parse_complete_callback([o, start, &command] { command = [=] { return run(*o, start); }; });
}

}  // namespace pagedkv::apps
