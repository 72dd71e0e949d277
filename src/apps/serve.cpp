#include "apps/serve.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <limits>
#include <memory>
#include <sstream>
#include <thread>

#include "apps/cli.h"
#include "apps/plan.h"
#include "apps/test_hooks.h"
#include "base/units.h"
#include "engine/engine_loop.h"
#include "engine/metrics.h"
#include "pagedkv/base/log.h"
#include "pagedkv/kernels/kernel_set.h"
#include "server/kv_routes.h"
#include "server/openai_routes.h"
#include "server/operator_routes.h"
#include "server/web_routes.h"

namespace pagedkv::apps {
namespace {

struct ServeOptions {
  ModelOptions model;
  HttpOptions http;
  std::string max_body = "32MiB", idle = "60s", receive = "60s", send = "30s";
  std::vector<std::string> key_files;
  std::vector<std::string> names;
  bool any_name = false;
  int max_seqs = 16, max_waiting = 256, max_n = 16;
  int prefill_chunk = 256;
  bool prefix_cache = true;
  std::string kv_idle = "30s", prefix_ttl, prefix_bytes, prefix_bytes_per_salt;
  int ping_seconds = 10;
  std::string metrics_compat = "vllm";
  bool metrics_public = false;
};

// That followers of /v1/kv/events may be behind; one of a long prompt's chunk takes about 2 KiB.
constexpr int64_t kEvents = 4096;

std::chrono::seconds whole_seconds(const std::string& flag, const std::string& text) {
  const double seconds = parse_seconds(text);
  if (seconds < 1 || seconds > 1e6)
    throw std::invalid_argument(flag + " " + text + ": must be in 1s..1000000s");
  return std::chrono::seconds(static_cast<int64_t>(seconds));
}

// One key a line; empty lines and those that begin with # are none.
void read_keys(const std::string& path, std::vector<std::string>& keys) {
  std::istringstream lines(read_file(path, "--api-key-file " + path));
  for (std::string line; std::getline(lines, line);) {
    while (!line.empty() && std::strchr(" \t\r", line.back())) line.pop_back();
    if (!line.empty() && line[0] != '#') keys.push_back(line);
  }
}

HttpOptions http_options(const ServeOptions& o) {
  HttpOptions http = o.http;
  http.max_body_bytes = parse_bytes(o.max_body);
  if (http.max_body_bytes < 1024)
    throw std::invalid_argument("--max-body-bytes " + o.max_body + ": must be at least 1024");
  http.idle = whole_seconds("--keep-alive", o.idle);
  http.receive = whole_seconds("--receive-timeout", o.receive);
  http.send = whole_seconds("--timeout", o.send);
  for (const std::string& path : o.key_files) read_keys(path, http.api_keys);
  if (!o.key_files.empty() && http.api_keys.empty())
    throw std::invalid_argument("--api-key-file " + o.key_files[0] + ": has no key");
  return http;
}

PrefixIndexOptions prefix_options(const ServeOptions& o) {
  PrefixIndexOptions prefix;
  if (!o.prefix_ttl.empty())
    prefix.ttl_ns = static_cast<int64_t>(parse_seconds(o.prefix_ttl) * 1e9);
  if (!o.prefix_bytes.empty()) prefix.max_bytes = parse_bytes(o.prefix_bytes);
  if (!o.prefix_bytes_per_salt.empty())
    prefix.max_bytes_per_salt = parse_bytes(o.prefix_bytes_per_salt);
  return prefix;
}

// The model's file without folder and ending, where it has no name given.
std::vector<std::string> names_of(const ServeOptions& o) {
  if (!o.names.empty()) return o.names;
  if (o.model.model == "toy:") return {"toy"};
  return {std::filesystem::path(o.model.path()).stem().string()};
}

// Signals arrive on the main thread's pipe: the first drains, the second ends the program.
int g_wake[2] = {-1, -1};
volatile std::sig_atomic_t g_signals = 0;

void on_signal(int signal) {
  if (g_signals > 0) _exit(128 + signal);
  g_signals = 1;
  [[maybe_unused]] const ssize_t n = write(g_wake[1], "s", 1);
}

void watch_signals() {
  if (pipe(g_wake) != 0) throw EnvironmentError("no pipe: out of descriptors");
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

// Waits for a signal, or for stop_waiting(). Whether it was a signal.
bool wait_for_signal() {
  char c = 0;
  while (read(g_wake[0], &c, 1) < 0 && errno == EINTR) {
  }
  return c == 's';
}
void stop_waiting() { [[maybe_unused]] const ssize_t n = write(g_wake[1], "e", 1); }

// Each connection is a descriptor; without any the listener could not even refuse.
void allow_descriptors(int max_connections) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = static_cast<rlim_t>(max_connections) + 512;
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < wanted)
    log(LogLevel::kWarning, "--max-connections " + std::to_string(max_connections) +
                                ": this process may open " + std::to_string(limit.rlim_cur) +
                                " descriptors (ulimit -n); fewer connections will fit");
}

std::string in_url(const std::string& host) {
  const std::string reachable = host == "0.0.0.0" ? "127.0.0.1" : host == "::" ? "::1" : host;
  return reachable.find(':') == std::string::npos ? reachable : "[" + reachable + "]";
}

void print_welcome(const Served& served, const std::string& host, int port, bool keys) {
  const std::string url = "http://" + in_url(host) + ":" + std::to_string(port);
  log(LogLevel::kInfo, "listening on " + url + ", model " + served.names.front());
  log(LogLevel::kInfo, "the largest request that fits: " +
                           std::to_string(std::min(served.context, served.pool_tokens)) +
                           " tokens (context " + std::to_string(served.context) + ", pages for " +
                           std::to_string(served.pool_tokens) + ")");
  log(LogLevel::kInfo, "try: curl " + url +
                           "/v1/chat/completions -H 'Content-Type: application/json'" +
                           (keys ? " -H 'Authorization: Bearer KEY'" : "") +
                           " -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'");
}

int serve(ServeOptions o) {
  o.model.num_threads = o.model.threads();
  allow_descriptors(o.http.max_connections);
  HttpServer http(http_options(o));
  int port = 0;
  try {
    port = http.bind();  // before the model: a port in use is told at once
  } catch (const AddressError& e) {
    throw EnvironmentError(e.what());
  }
  KvSettings settings = o.model.kv_settings();
  settings.max_seqs = o.max_seqs;
  const double idle = parse_seconds(o.kv_idle);
  auto m = load_model(o.model, true);
  m.model = with_test_hooks(std::move(m.model));
  const ModelInfo& info = m.model->info();

  PagePoolOptions pages = pool_options(info, settings);
  pages.idle_seconds = idle;
  add_test_hooks(pages);
  PagePool pool(pages);
  log(LogLevel::kInfo, startup_line(info, settings, pool, o.model.threads()));
  EngineOptions engine_options;
  engine_options.context = context_tokens(info, settings);
  engine_options.prefill_chunk = o.prefill_chunk;
  engine_options.within_pool = true;
  engine_options.max_seqs = o.max_seqs;
  engine_options.prefix_cache = o.prefix_cache;
  engine_options.prefix = prefix_options(o);
  PageEventQueue events(kEvents);
  engine_options.prefix.events = &events;
  Metrics metrics({.model_name = names_of(o).front(),
                   .version = PAGEDKV_VERSION_TEXT,
                   .kernels = std::string(kernels().name),
                   .kv_format = format_label(settings),
                   .arithmetic_id = info.arithmetic_id,
                   .exact = info.exact,
                   .prefix_cache = o.prefix_cache,
                   .vllm_names = o.metrics_compat == "vllm"});
  engine_options.observer = &metrics;
  Engine engine(
      *m.model, *m.tokenizer, pool, [&](const SamplerOptions& s) { return m.make_sampler(s); },
      engine_options);
  EngineLoop loop(engine, {.max_waiting = o.max_waiting});
  TextWorkers text;
  Served served{.loop = loop,
                .engine = engine,
                .pool = pool,
                .info = info,
                .tokenizer = *m.tokenizer,
                .chat_template = *m.chat_template,
                .text = text,
                .metrics = metrics,
                .events = events,
                .kv = settings,
                .context = engine.context(),
                .pool_tokens = tokens_that_fit(pages, pool.stats().bytes_limit),
                .names = names_of(o),
                .any_name = o.any_name,
                .max_n = o.max_n,
                .prefix_cache = o.prefix_cache,
                .metrics_public = o.metrics_public,
                .ping_seconds = o.ping_seconds,
                .created = static_cast<int64_t>(std::time(nullptr)),
                .fingerprint = system_fingerprint(info, settings)};
  add_openai_routes(http, served);
  add_kv_routes(http, served);
  add_operator_routes(http, served);
  add_web_routes(http);

  watch_signals();
  print_welcome(served, o.http.host, port, !http.options().api_keys.empty());
  std::exception_ptr failure;
  std::thread listener([&] {
    try {
      http.run();
    } catch (...) {
      failure = std::current_exception();
      stop_waiting();
    }
  });
  if (wait_for_signal()) {
    http.drain();
    loop.drain();
    log(LogLevel::kInfo, "shutting down: " + std::to_string(loop.num_requests()) +
                             " requests go on to their end; a second signal ends them");
    while (!loop.wait_idle(std::chrono::seconds(1))) {
    }
  }
  http.stop();
  listener.join();
  if (failure) std::rethrow_exception(failure);
  return kOk;
}

}  // namespace

void add_serve(CLI::App& app, std::function<int()>& command) {
  auto o = std::make_shared<ServeOptions>();
  auto* sub = app.add_subcommand("serve", "answer requests over HTTP, as OpenAI's API does");
  o->model.add_model(*sub);
  add_option(*sub, "--host", o->http.host, "the address to listen on")->type_name("ADDRESS");
  add_option(*sub, "--port", o->http.port, "its port (0: any free one, which is printed)")
      ->check(CLI::Range(0, 65535));
  add_option(*sub, "-c,--ctx-size,--max-model-len,--context-window", o->model.context,
             "tokens of prompt and answer together (default: the model's)")
      ->default_str("");
  add_option(*sub, "--max-num-seqs,--parallel", o->max_seqs, "(-np) answers that run at once")
      ->check(CLI::Range(1, 4096));
  add_option(*sub, "--max-waiting", o->max_waiting, "answers that may wait; more are refused (429)")
      ->check(CLI::Range(1, 1 << 20));
  add_option(*sub, "--max-num-batched-tokens", o->model.max_step_tokens,
             "most tokens in a step (default: 512)")
      ->default_str("")
      ->check(CLI::Range(1, 65536));
  add_option(*sub, "--prefill-chunk", o->prefill_chunk, "of them, most prompt tokens of a request")
      ->check(CLI::Range(1, 1 << 20));
  auto* requests = "Requests";
  name_variable(sub->add_option("--served-model-name", o->names,
                                "the model's name, and more names for it (default: its file's)"))
      ->group(requests);
  name_variable(
      sub->add_flag("--any-model-name", o->any_name, "take any name of a request for the model's"))
      ->group(requests);
  add_option(*sub, "--max-n", o->max_n, "most answers (n) to one prompt")
      ->check(CLI::Range(1, 128))
      ->group(requests);
  add_option(*sub, "--max-body-bytes", o->max_body, "of a request's body")
      ->type_name("SIZE")
      ->group(requests);
  add_option(*sub, "--sse-ping", o->ping_seconds, "seconds after which a silent stream is pinged")
      ->check(CLI::Range(1, 3600))
      ->group(requests);
  sub->add_flag_callback(
         "--metrics", [] {}, "for who knows llama.cpp's: GET /metrics is there anyway")
      ->group(requests);
  add_option(*sub, "--metrics-compat", o->metrics_compat,
             "whose metric names /metrics has beside ours: vllm, none")
      ->check(CLI::IsMember({"vllm", "none"}))
      ->group(requests);
  auto* connections = "Connections";
  add_option(*sub, "--max-connections", o->http.max_connections, "that are served at once")
      ->check(CLI::Range(1, 65536))
      ->group(connections);
  add_option(*sub, "--keep-alive", o->idle, "a connection may wait so long for its next request")
      ->type_name("TIME")
      ->group(connections);
  add_option(*sub, "--receive-timeout", o->receive, "a request may take so long to arrive")
      ->type_name("TIME")
      ->group(connections);
  add_option(*sub, "--timeout", o->send, "a client may take nothing of its answer for so long")
      ->type_name("TIME")
      ->group(connections);
  auto* security = "Security";
  name_variable(sub->add_option("--api-key", o->http.api_keys,
                                "clients must send this key, or another one given"))
      ->take_all()
      ->allow_extra_args(false)
      ->type_name("KEY")
      ->group(security);
  name_variable(sub->add_option("--api-key-file", o->key_files, "a file with one key a line"))
      ->take_all()
      ->allow_extra_args(false)
      ->type_name("FILE")
      ->group(security);
  name_variable(sub->add_flag("--metrics-public", o->metrics_public, "GET /metrics needs no key"))
      ->group(security);
  name_variable(sub->add_flag("--share-cache-between-keys", o->http.share_between_keys,
                              "clients with different keys share cached pages"))
      ->group(security);
  name_variable(sub->add_option("--cors-origins", o->http.cors_origins,
                                "web pages of these origins may ask (*: all)"))
      ->take_all()
      ->allow_extra_args(false)
      ->delimiter(',')
      ->type_name("ORIGIN")
      ->group(security);
  o->model.add_pages(*sub);
  auto* cache = "Prefix cache";
  name_variable(sub->add_flag("--enable-prefix-caching,!--no-enable-prefix-caching",
                              o->prefix_cache, "prompts begin with what others left (default)"))
      ->default_str("true")
      ->group(cache);
  add_option(*sub, "--kv-idle-seconds", o->kv_idle,
             "memory of pages that were not used for so long goes back (0: never)")
      ->type_name("TIME")
      ->group(cache);
  add_option(*sub, "--prefix-ttl", o->prefix_ttl, "cached pages go when not used for so long")
      ->type_name("TIME")
      ->default_str("")
      ->group(cache);
  add_option(*sub, "--prefix-max-bytes", o->prefix_bytes, "most bytes of cached prefixes")
      ->type_name("SIZE")
      ->default_str("")
      ->group(cache);
  add_option(*sub, "--prefix-max-bytes-per-salt", o->prefix_bytes_per_salt,
             "of them, most of one cache_salt")
      ->type_name("SIZE")
      ->default_str("")
      ->group(cache);
  sub->parse_complete_callback([o, &command] { command = [=] { return serve(*o); }; });
}

}  // namespace pagedkv::apps
