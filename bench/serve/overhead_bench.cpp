// What a step of the served engine costs outside the model: scheduling, block tables, sampling, and handing each token to the
// stream of its client. For each number of streams one line of JSON:
//   engine_us    from one step of the model to the next, nobody listening to the answers
//   served_us    the same while clients in another process read the streams over HTTP (median, p90)
//   process_us   processor time of the whole process a step, the model's apart: it also has what connections' threads do
//   step_us      a step of the model (median)
// The toy model, each of whose steps is made to last for 5 ms, as those of a real one do; or a model's file.
// Usage: overhead_bench [MODEL.gguf] [streams...]
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine_loop.h"
#include "engine/metrics.h"
#include "models/ggml/ggml_model.h"
#include "models/ggml/ggml_text.h"
#include "models/toy/toy_model.h"
#include "server/http_server.h"
#include "server/openai_routes.h"
#include "server/served.h"

namespace {

using namespace pagedkv;
using Clock = std::chrono::steady_clock;

constexpr int kTokens = 300;
constexpr std::chrono::microseconds kToyStep{5000};

double us(Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); }

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

double processor_us(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return 1e6 * static_cast<double>(t.tv_sec) + 1e-3 * static_cast<double>(t.tv_nsec);
}

// A model that times its steps and what lies between two of them, where both have one token of each stream.
class TimedModel final : public Model {
 public:
  TimedModel(std::unique_ptr<Model> model, bool paced) : model_(std::move(model)), paced_(paced) {}
  const ModelInfo& info() const noexcept override { return model_->info(); }
  int max_step_tokens() const noexcept override { return model_->max_step_tokens(); }
  std::span<const float> step(const StepBatch& batch, PagePool& pool) override {
    const auto begin = Clock::now();
    const double processor = processor_us(CLOCK_PROCESS_CPUTIME_ID);
    const bool whole = is_whole(batch);
    if (whole && last_was_whole_) {
      between_.push_back(us(begin - last_end_));
      outside_.push_back(processor - last_processor_);
    }
    const auto logits = model_->step(batch, pool);
    if (whole) steps_.push_back(us(Clock::now() - begin));
    if (paced_) {  // others' work meanwhile belongs to the process, not to the model
      last_processor_ = processor_us(CLOCK_PROCESS_CPUTIME_ID);
      std::this_thread::sleep_until(begin + kToyStep);
    } else {
      last_processor_ = processor_us(CLOCK_PROCESS_CPUTIME_ID);
    }
    last_was_whole_ = whole;
    last_end_ = Clock::now();
    return logits;
  }
  void begin(size_t num_streams) {
    num_streams_ = num_streams;
    last_was_whole_ = false;
    between_.clear();
    outside_.clear();
    steps_.clear();
  }
  const std::vector<double>& between() const { return between_; }
  const std::vector<double>& outside() const { return outside_; }
  const std::vector<double>& steps() const { return steps_; }

 private:
  bool is_whole(const StepBatch& batch) const {
    return batch.sequences.size() == num_streams_ &&
           std::ranges::all_of(batch.sequences, [](const auto& s) { return s.tokens.size() == 1; });
  }

  std::unique_ptr<Model> model_;
  const bool paced_;
  size_t num_streams_ = 0;
  bool last_was_whole_ = false;
  Clock::time_point last_end_;
  double last_processor_ = 0;
  std::vector<double> between_, outside_, steps_;
};

struct Silence final : RequestSink {
  void on_token(const TokenEvent&) override {}
  void on_finish(FinishReason, std::string_view, std::exception_ptr) override {}
};

// The clients: each asks for one stream and reads it to its end. Exit status 0 when each had so many tokens.
int read_streams(int port, int num_streams) {
  std::vector<pollfd> sockets;
  for (int i = 0; i < num_streams; ++i) {
    const int s = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (s < 0 || connect(s, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return 1;
    const std::string body =
        R"({"messages":[{"role":"user","content":"Hello, number )" + std::to_string(i) +
        R"("}],"stream":true,"temperature":0,"ignore_eos":true,"max_tokens":)" +
        std::to_string(kTokens) + "}";
    const std::string request =
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        "application/json\r\nConnection: close\r\n"
        "Content-Length: " +
        std::to_string(body.size()) + "\r\n\r\n" + body;
    if (write(s, request.data(), request.size()) != static_cast<ssize_t>(request.size())) return 1;
    sockets.push_back({s, POLLIN, 0});
  }
  std::vector<std::string> tails(sockets.size());
  for (size_t num_open = sockets.size(); num_open > 0;) {
    if (poll(sockets.data(), sockets.size(), 60'000) <= 0) return 1;
    for (size_t i = 0; i < sockets.size(); ++i) {
      if (sockets[i].revents == 0) continue;
      char data[65536];
      const ssize_t n = read(sockets[i].fd, data, sizeof data);
      if (n > 0) {
        tails[i].append(data, static_cast<size_t>(n));
        tails[i].erase(0, tails[i].size() - std::min<size_t>(tails[i].size(), 64));
        continue;
      }
      close(sockets[i].fd);
      sockets[i].fd = -1;
      --num_open;
    }
  }
  return std::ranges::all_of(
             tails, [](const std::string& t) { return t.find("[DONE]") != std::string::npos; })
             ? 0
             : 1;
}

struct Program {
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatTemplate> chat_template;
  std::unique_ptr<Model> model;
  SamplerFactory make_sampler;
  std::string name;
};

Program load(const std::string& path) {
  Program p;
  if (path.empty()) {
    p.name = "toy";
    p.tokenizer = make_toy_tokenizer();
    p.chat_template = make_toy_chat_template();
    p.model = make_toy_model();
    p.make_sampler = make_toy_sampler;
    return p;
  }
  p.name = path.substr(path.rfind('/') + 1);
  p.tokenizer = load_tokenizer(path);
  p.chat_template = make_chat_template(*p.tokenizer);
  p.model = load_ggml_model(
      path, {.num_threads = static_cast<int>(std::min(2u, std::thread::hardware_concurrency()))});
  const int32_t vocab_size = p.model->info().vocab_size;
  p.make_sampler = [vocab_size](const SamplerOptions& options) {
    return pagedkv::make_sampler(options, vocab_size);
  };
  return p;
}

double engine_alone(Engine& engine, TimedModel& model, const Tokenizer& tokenizer,
                    int num_streams) {
  model.begin(static_cast<size_t>(num_streams));
  std::vector<Silence> sinks(static_cast<size_t>(num_streams));
  for (size_t i = 0; i < sinks.size(); ++i) {
    GenerationRequest request;
    request.prompt = tokenizer.tokenize("Hello, number " + std::to_string(i), true, true);
    request.max_new_tokens = kTokens;
    request.ignore_end = true;
    engine.submit(std::move(request), sinks[i]);
  }
  while (engine.step()) {
  }
  return quantile(model.between(), .5);
}

void measure(const std::string& path, int num_streams) {
  int port_pipe[2];
  if (pipe(port_pipe) != 0) throw std::runtime_error("no pipe");
  const pid_t clients = fork();  // before there are threads
  if (clients == 0) {
    int port = 0;
    if (read(port_pipe[0], &port, sizeof port) != sizeof port) _exit(1);
    _exit(read_streams(port, num_streams));
  }
  Program p = load(path);
  TimedModel model(std::move(p.model), path.empty());
  KvSettings kv;
  kv.max_seqs = num_streams;
  PagePool pool(pool_options(model.info(), kv));
  PageEventQueue events(1024);
  Metrics metrics({.model_name = p.name});
  EngineOptions engine_options;
  engine_options.max_seqs = num_streams;
  engine_options.prefix.events = &events;
  engine_options.observer = &metrics;
  Engine engine(model, *p.tokenizer, pool, p.make_sampler, engine_options);
  const double alone = engine_alone(engine, model, *p.tokenizer, num_streams);
  model.begin(static_cast<size_t>(num_streams));

  HttpOptions options;
  options.port = 0;
  HttpServer http(options);
  const int port = http.bind();
  {
    EngineLoop loop(engine);
    TextWorkers text;
    Served served{.loop = loop,
                  .engine = engine,
                  .pool = pool,
                  .info = model.info(),
                  .tokenizer = *p.tokenizer,
                  .chat_template = *p.chat_template,
                  .text = text,
                  .metrics = metrics,
                  .events = events,
                  .kv = kv,
                  .context = engine.context(),
                  .pool_tokens = engine.context(),
                  .names = {"model"}};
    add_openai_routes(http, served);
    std::thread listener([&] { http.run(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(500));  // until it runs, it refuses
    if (write(port_pipe[1], &port, sizeof port) != sizeof port)
      throw std::runtime_error("no clients");
    int status = 0;
    waitpid(clients, &status, 0);
    http.stop();
    listener.join();
    if (status != 0) throw std::runtime_error("a stream did not end well");
  }
  if (model.between().size() < kTokens / 4)
    throw std::runtime_error("the streams did not run together");
  std::printf(
      R"({"model":"%s","streams":%d,"engine_us":%.1f,"served_us":{"median":%.1f,"p90":%.1f},"process_us":%.1f,"step_us":%.1f})"
      "\n",
      p.name.c_str(), num_streams, alone, quantile(model.between(), .5),
      quantile(model.between(), .9), quantile(model.outside(), .5), quantile(model.steps(), .5));
  std::fflush(stdout);
  close(port_pipe[0]);
  close(port_pipe[1]);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string path;
  std::vector<int> streams;
  for (int i = 1; i < argc; ++i) {
    if (const int n = std::atoi(argv[i]); n > 0)
      streams.push_back(n);
    else
      path = argv[i];
  }
  if (streams.empty()) streams = {1, 16, 64};
  for (const int n : streams) measure(path, n);
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "overhead_bench: %s\n", e.what());
  return 1;
}
