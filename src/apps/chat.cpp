#include "apps/chat.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>

#include "apps/line_editor.h"
#include "apps/progress.h"
#include "pagedkv/base/log.h"

namespace pagedkv::apps {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kHelp =
    "/stats   tokens, pages and speed\n"
    "/reset   forget what was said, but for the system message\n"
    "/exit    end (also Ctrl-D)\n"
    "Ctrl-C   stop the answer, or forget the line\n"
    "A line that ends in \\ goes on in the next; // begins a line with a slash.\n";

std::atomic<int> g_signal{0};
void on_signal(int signal) { g_signal.store(signal); }

// SIGINT and SIGTERM stop the answer while one lives.
class Signals {
 public:
  Signals() {
    g_signal.store(0);
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, &interrupt_);
    sigaction(SIGTERM, &action, &terminate_);
  }
  ~Signals() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  struct sigaction interrupt_{}, terminate_{};
};

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

class AnswerSink final : public RequestSink {
 public:
  void on_prompt(int64_t done, int64_t total) override {
    bar_.show(static_cast<double>(done) / static_cast<double>(total));
    if (done == total) bar_.clear();
  }
  void on_token(const TokenEvent& event) override {
    if (num_tokens++ == 0) first = Clock::now();
    last = Clock::now();
    write(event.text);
  }
  void on_finish(FinishReason why, std::string_view rest, std::exception_ptr e) override {
    write(rest);
    reason = why;
    error = e;
    if (num_tokens == 0) first = last = Clock::now();
  }

  std::string text;
  int64_t num_tokens = 0;
  FinishReason reason = FinishReason::kError;
  std::exception_ptr error;
  Clock::time_point first, last;

 private:
  void write(std::string_view more) {
    text += more;
    if (std::fwrite(more.data(), 1, more.size(), stdout) != more.size() || std::fflush(stdout) != 0)
      throw std::runtime_error("standard output: cannot be written");
  }
  ProgressBar bar_{"prompt", true};
};

class Session {
 public:
  explicit Session(Chat chat) : chat_(std::move(chat)) {}

  int run() {
    std::fputs("/help tells the commands, Ctrl-D ends.\n", stderr);
    std::string line;
    while (!ended_ && read(line)) {
      line.erase(0, line.find_first_not_of(" \t\n"));  // all of a blank one
      if (line.empty()) continue;
      if (line.starts_with("//"))
        answer(line.substr(1));
      else if (line[0] == '/')
        command(line);
      else
        answer(line);
    }
    return kOk;
  }

 private:
  // False at the end of the input. Ctrl-C gives an empty line.
  bool read(std::string& text) {
    text.clear();
    for (std::string line; true; text += '\n') {
      const auto what = editor_.read(text.empty() ? "> " : ". ", line);
      if (what == LineEditor::Read::kEnd) return false;
      if (what == LineEditor::Read::kInterrupted) {
        text.clear();
        return true;
      }
      text += line;
      if (!text.ends_with('\\')) break;
      text.pop_back();
    }
    if (!text.empty()) editor_.remember(text);
    return true;
  }

  void command(const std::string& line) {
    if (line == "/exit" || line == "/quit" || line == "/bye")
      ended_ = true;
    else if (line == "/help" || line == "/?")
      std::fputs(kHelp, stderr);
    else if (line == "/stats")
      show_stats();
    else if (line == "/reset")
      reset();
    else
      std::fprintf(stderr,
                   "%s is no command; /help tells them, and // begins a line with a slash\n",
                   line.c_str());
  }

  void reset() {
    chat_.conversation.clear();
    chat_.engine.prefix_index().clear();
    num_prompt_ = num_answer_ = 0;
    save();
    std::fputs("forgotten\n", stderr);
  }

  void answer(const std::string& text) {
    chat_.conversation.add("user", text);
    AnswerSink sink;
    try {
      generate(sink);
      if (sink.error) std::rethrow_exception(sink.error);
    } catch (const CapacityError& error) {
      return give_up(error.what(), "; /reset makes room");
    } catch (const MemoryError& error) {
      return give_up(error.what(), "; /reset makes room");
    } catch (const std::invalid_argument& error) {  // the template refuses the messages
      return give_up(error.what(), "");
    }
    if (!sink.text.ends_with('\n')) std::fputc('\n', stdout);
    std::fflush(stdout);
    if (sink.reason == FinishReason::kCancelled) std::fputs("(stopped)\n", stderr);
    if (sink.reason == FinishReason::kLength)
      std::fputs("(the answer was cut: -n or the context is reached)\n", stderr);
    chat_.conversation.add("assistant", sink.text);
    save();
  }

  void generate(AnswerSink& sink) {
    GenerationRequest request = chat_.request;
    request.prompt = chat_.model.tokenizer->tokenize(
        chat_.model.chat_template->render(chat_.conversation.messages(), chat_.template_kwargs),
        true, true);
    num_prompt_ = static_cast<int64_t>(request.prompt.size());
    const Signals signals;
    const auto begin = Clock::now();
    const int64_t before = chat_.engine.stats().prompt_tokens;
    const RequestId id = chat_.engine.submit(std::move(request), sink);
    while (chat_.engine.step())
      if (g_signal.load() != 0) chat_.engine.cancel(id);
    ended_ = g_signal.load() == SIGTERM;
    num_computed_ = chat_.engine.stats().prompt_tokens - before;
    num_answer_ = sink.num_tokens;
    prompt_seconds_ = seconds(sink.first - begin);
    answer_seconds_ = seconds(sink.last - sink.first);
  }

  // The message that could not be answered is taken back.
  void give_up(const std::string& why, const char* advice) {
    chat_.conversation.drop_last();
    log(LogLevel::kError, why + advice);
  }

  void show_stats() const {
    const PagePoolStats s = chat_.pool.stats();
    std::fprintf(
        stderr,
        "conversation: %lld of %lld tokens; kept: %lld pages of %d tokens, %s; committed %s, limit "
        "%s\n",
        static_cast<long long>(std::max<int64_t>(0, num_prompt_ + num_answer_ - 1)),
        static_cast<long long>(chat_.engine.context()), static_cast<long long>(s.pages_cached),
        chat_.pool.page_size(), format_bytes(s.bytes_cached).c_str(),
        format_bytes(s.bytes_committed).c_str(), format_bytes(s.bytes_limit).c_str());
    if (num_prompt_ == 0) return;
    std::fprintf(
        stderr,
        "last turn: %lld of %lld prompt tokens computed in %.0f ms, %lld generated in %.0f "
        "ms (%.1f tokens/s)\n",
        static_cast<long long>(num_computed_), static_cast<long long>(num_prompt_),
        1e3 * prompt_seconds_, static_cast<long long>(num_answer_), 1e3 * answer_seconds_,
        answer_seconds_ > 0 ? static_cast<double>(num_answer_ - 1) / answer_seconds_ : 0.0);
  }

  // Once is enough to say that it cannot be kept.
  void save() {
    if (chat_.save_path.empty()) return;
    if (!chat_.conversation.keep(chat_.save_path)) chat_.save_path.clear();
  }

  Chat chat_;
  LineEditor editor_;
  bool ended_ = false;
  int64_t num_prompt_ = 0, num_computed_ = 0, num_answer_ = 0;
  double prompt_seconds_ = 0, answer_seconds_ = 0;
};

}  // namespace

int chat(Chat chat) { return Session(std::move(chat)).run(); }

}  // namespace pagedkv::apps
