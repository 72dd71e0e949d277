#include "pagedkv/base/log.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace pagedkv {
namespace {

class Log : public ::testing::Test {
 protected:
  Log() {
    before_ = set_log_sink([this](LogLevel level, std::string_view message) {
      lines_.push_back(std::to_string(static_cast<int>(level)) + " " + std::string(message));
    });
  }
  ~Log() override { set_log_sink(before_); }
  LogSink before_;
  std::vector<std::string> lines_;
};

TEST_F(Log, GoesToTheSink) {
  log(LogLevel::kError, "lost");
  EXPECT_EQ(lines_, std::vector<std::string>{"2 lost"});
}

TEST_F(Log, WarnsOncePerKey) {
  for (int i = 0; i < 3; ++i) warn_once("log_test.a", "first");
  warn_once("log_test.b", "second");
  EXPECT_EQ(lines_, (std::vector<std::string>{"1 first", "1 second"}));
}

TEST_F(Log, AnEmptySinkDiscards) {
  const LogSink mine = set_log_sink({});
  log(LogLevel::kError, "nobody hears");
  set_log_sink(mine);
  EXPECT_TRUE(lines_.empty());
}

}  // namespace
}  // namespace pagedkv
