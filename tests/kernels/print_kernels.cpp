// Prints the kernel set in use, or the error, and what was logged: ctest runs it under different variables.
#include <cstdio>
#include <stdexcept>
#include <string>

#include "pagedkv/base/log.h"
#include "pagedkv/kernels/kernel_set.h"

int main() {
  int warnings = 0;
  pagedkv::set_log_sink([&](pagedkv::LogLevel, std::string_view message) {
    ++warnings;
    std::printf("warning: %.*s\n", static_cast<int>(message.size()), message.data());
  });
  try {
    for (int i = 0; i < 3; ++i) pagedkv::kernels();
    std::printf("set: %s, warnings: %d\n", pagedkv::kernels().name, warnings);
  } catch (const std::invalid_argument& error) {
    std::printf("error: %s\n", error.what());
  }
}
