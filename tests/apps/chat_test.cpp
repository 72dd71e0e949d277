// `pagedkv run` at a terminal, through a pseudo terminal.
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "apps/conversation.h"

namespace pagedkv {
namespace {

namespace fs = std::filesystem;
using apps::Conversation;

std::string model(const std::string& name) {
  const char* folder = std::getenv("PAGEDKV_TEST_MODELS");
  if (!folder)
    throw std::runtime_error(
        "PAGEDKV_TEST_MODELS is not set: run scripts/test.sh, which makes the test models");
  return std::string(folder) + "/" + name;
}

// A random model: what it writes is of no interest, but for being the same each time.
constexpr const char* kTiny = "model-variants/tied.gguf";
constexpr const char* kPrompt = "\n> ";

class Terminal {
 public:
  Terminal(const std::vector<std::string>& args, const fs::path& state) {
    pid_ = forkpty(&fd_, nullptr, nullptr, nullptr);
    if (pid_ < 0) throw std::runtime_error("forkpty");
    if (pid_ > 0) return;
    setenv("XDG_STATE_HOME", state.c_str(), 1);
    setenv("HOME", state.c_str(), 1);  // no ~/.editrc
    setenv("TERM", "dumb", 1);
    std::vector<char*> argv{const_cast<char*>(PAGEDKV_BINARY)};
    for (const auto& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
    argv.push_back(nullptr);
    execv(PAGEDKV_BINARY, argv.data());
    _exit(127);
  }
  ~Terminal() {
    close(fd_);
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  void type(const std::string& text) {
    // libedit shows its prompt before it takes the terminal out of cooked mode, in which Ctrl-D would be swallowed.
    if (text.find_first_of("\x03\x04") != std::string::npos) usleep(200000);
    ASSERT_EQ(write(fd_, text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  // Reads until `text` was shown since the last call.
  void expect(const std::string& text) {
    size_t at;
    while ((at = seen_.find(text)) == std::string::npos)
      ASSERT_TRUE(read_some()) << "no \"" << text << "\" in: " << seen_;
    seen_.erase(0, at + text.size());
  }
  // Reads "<a> of <b> ".
  std::pair<int, int> fraction() {
    while (seen_.find(" prompt") == std::string::npos && read_some()) {
    }
    int a = -1, b = -1;
    std::sscanf(seen_.c_str(), "%d of %d", &a, &b);
    return {a, b};
  }
  int exit_code() {
    while (read_some()) {
    }
    kill(pid_, SIGALRM);  // nothing to one that has ended
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  pid_t pid() const { return pid_; }

 private:
  // False at the end of what the program writes, or when it writes nothing for a minute.
  bool read_some() {
    pollfd p{fd_, POLLIN, 0};
    if (poll(&p, 1, 60000) != 1) return false;
    char part[4096];
    const ssize_t n = read(fd_, part, sizeof part);
    if (n <= 0) return false;
    seen_.append(part, static_cast<size_t>(n));
    return true;
  }
  int fd_ = -1;
  pid_t pid_ = -1;
  std::string seen_;
};

struct ChatTest : testing::Test {
  void SetUp() override {
    dir = fs::temp_directory_path() / ("pagedkv_chat_" + std::to_string(getpid()));
    fs::create_directories(dir);
  }
  void TearDown() override { fs::remove_all(dir); }
  std::string kept() const { return (dir / "pagedkv/conversation.json").string(); }
  std::vector<ChatMessage> messages() const { return Conversation::load(kept()).messages(); }
  fs::path dir;
};

TEST_F(ChatTest, HoldsWhatWasSaidAndKeepsTheConversation) {
  Terminal t({"run", "-m", model(kTiny), "-n", "5", "--system", "Be brief."}, dir);
  t.expect(kPrompt);
  t.type("AB\r");
  t.expect(kPrompt);
  t.type("/stats\r");
  // "system: Be brief.\nuser: AB\nassistant:" is 37 tokens; the newest of the answer's is not stored.
  t.expect("conversation: 41 of 512 tokens; kept: 3 pages of 16");
  t.expect("last turn: 37 of 37 prompt tokens computed");
  t.type("CD\r");
  t.expect(kPrompt);
  t.type("/stats\r");
  t.expect("last turn: ");
  const auto [computed, prompt] = t.fraction();
  EXPECT_EQ(prompt, 37 + 1 + static_cast<int>(messages().at(2).content.size()) + 20);
  EXPECT_EQ(computed, prompt - 37);  // this template puts a space before an answer that had none
  t.expect(kPrompt);
  t.type("\x04");
  EXPECT_EQ(t.exit_code(), 0);
  const auto said = messages();
  ASSERT_EQ(said.size(), 5u);
  EXPECT_EQ(said[0].role, "system");
  EXPECT_EQ(said[1].content, "AB");
  EXPECT_EQ(said[2].role, "assistant");
  EXPECT_EQ(said[3].content, "CD");
  struct stat status{};
  ASSERT_EQ(stat(kept().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
}

TEST_F(ChatTest, CommandsLinesAndTheirEnds) {
  Terminal t({"run", "-m", model(kTiny), "-n", "5"}, dir);
  t.expect(kPrompt);
  t.type("/nonsense\r");
  t.expect("/nonsense is no command");
  t.expect(kPrompt);
  t.type("forget me\x03");
  t.expect(kPrompt);
  t.type("one\\\r");
  t.expect(". ");
  t.type("two\r");
  t.expect(kPrompt);
  t.type("//slash\r");
  t.expect(kPrompt);
  EXPECT_EQ(messages().at(0).content, "one\ntwo");
  EXPECT_EQ(messages().at(2).content, "/slash");
  t.type("/reset\r");
  t.expect("forgotten");
  EXPECT_TRUE(messages().empty());
  t.expect(kPrompt);
  t.type("/exit\r");
  EXPECT_EQ(t.exit_code(), 0);
}

TEST_F(ChatTest, ControlCStopsTheAnswerNotTheProgram) {
  Terminal t({"run", "-m", model("SmolLM2-135M-Instruct.Q4_1.gguf"), "-t", "1", "-n", "100"}, dir);
  t.expect(kPrompt);
  t.type("Tell me a very long story about a ship.\r");
  t.expect("a");
  usleep(300000);
  t.type("\x03");
  t.expect("(stopped)");
  t.type("Say yes.\r");
  t.expect(kPrompt);
  t.type("/stats\r");
  t.expect("prompt tokens computed");
  t.expect(kPrompt);
  EXPECT_EQ(messages().size(), 4u);
  kill(t.pid(), SIGTERM);  // at the prompt it ends the program
  EXPECT_EQ(t.exit_code(), 128 + SIGTERM);
}

TEST_F(ChatTest, AMessageTooLongForTheContextIsTakenBack) {
  Terminal t({"run", "-m", model(kTiny), "-n", "5", "-c", "60"}, dir);
  t.expect(kPrompt);
  t.type("AB\r");
  t.expect(kPrompt);
  t.type(std::string(80, 'x') + "\r");
  t.expect("the context holds 60; /reset makes room");
  t.expect(kPrompt);
  t.type("C\r");
  t.expect(kPrompt);
  EXPECT_EQ(messages().size(), 4u);
  t.type("\x04");
  EXPECT_EQ(t.exit_code(), 0);
}

TEST_F(ChatTest, ContinuesAConversation) {
  Conversation before;
  before.set_system("Old.");
  before.add("user", "AB");
  before.add("assistant", "CDE");
  before.save(kept());
  const std::string run = "XDG_STATE_HOME='" + dir.string() + "' '" PAGEDKV_BINARY "' run -m '" +
                          model(kTiny) + "' -n 5 ";
  const std::string out = (dir / "out").string();
  const auto shell = [&](const std::string& args) {
    return std::system((run + args + " >'" + out + "' 2>/dev/null </dev/null").c_str());
  };
  ASSERT_EQ(shell("--continue --system New. F"), 0);
  const auto said = messages();
  ASSERT_EQ(said.size(), 5u);
  EXPECT_EQ(said[0].content, "New.");
  EXPECT_EQ(said[3].content, "F");
  ASSERT_EQ(shell("--raw 'system: New.\nuser: AB\nassistant: CDE\nuser: F\nassistant:'"), 0);
  std::ifstream in(out);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), said[4].content + "\n");
  EXPECT_EQ(messages().size(), 5u);  // only continued conversations are kept
}

TEST(Conversation, RefusesWhatIsNone) {
  const fs::path dir = fs::temp_directory_path() / ("pagedkv_conv_" + std::to_string(getpid()));
  fs::create_directories(dir);
  const std::string path = (dir / "c.json").string();
  EXPECT_THROW(Conversation::load(path), std::invalid_argument);
  for (const char* text : {"", "{}", "[1]", "{\"messages\": null}",
                           "{\"messages\": [{\"role\": \"boss\", \"content\": \"\"}]}",
                           "{\"messages\": 3}", "{\"messages\": [{\"role\": 1}]}"}) {
    std::ofstream(path) << text;
    EXPECT_THROW(Conversation::load(path), std::runtime_error) << text;
  }
  Conversation c;
  c.add("user", "broken \xff text");
  c.save(path);
  EXPECT_EQ(Conversation::load(path).messages()[0].content, "broken \xEF\xBF\xBD text");
  EXPECT_THROW(c.save("/proc/none/c.json"), std::runtime_error);
  fs::remove_all(dir);
}

}  // namespace
}  // namespace pagedkv
