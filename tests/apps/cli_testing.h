// What tests of the program share: calling it as a user does.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace pagedkv::testing {

struct Result {
  int code;
  std::string out, err;
};

inline std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

struct Cli : ::testing::Test {
  void SetUp() override {
    dir = std::filesystem::temp_directory_path() / ("pagedkv_cli_" + std::to_string(getpid()));
    std::filesystem::create_directories(dir);
  }
  void TearDown() override { std::filesystem::remove_all(dir); }

  // Runs the program through the shell; `before` sets variables.
  Result run(const std::string& args, const std::string& before = "",
             const std::string& stdin_file = "/dev/null") {
    const std::string command = before + " '" + PAGEDKV_BINARY + "' " + args + " <" + stdin_file +
                                " >" + dir.string() + "/out 2>" + dir.string() + "/err";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), slurp(dir / "out"),
            slurp(dir / "err")};
  }
  std::string file(const std::string& name, const std::string& content) {
    std::ofstream(dir / name, std::ios::binary) << content;
    return (dir / name).string();
  }
  static std::string models() {
    const char* folder = std::getenv("PAGEDKV_TEST_MODELS");
    EXPECT_NE(folder, nullptr)
        << "PAGEDKV_TEST_MODELS: run scripts/test.sh, which makes the test models";
    return folder ? folder : "";
  }
  // As a word of the shell.
  static std::string quoted_model(const std::string& name) {
    return std::string("'").append(models()).append("/").append(name).append("'");
  }
  std::filesystem::path dir;
};

}  // namespace pagedkv::testing
