// The cache's variables, unset at first and put back at the end.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

extern "C" char** environ;

namespace pagedkv::testing {

class ScopedEnvironment {
 public:
  ScopedEnvironment() {
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const char* const equals = std::strchr(*entry, '=');
      const std::string name(*entry, equals != nullptr ? static_cast<size_t>(equals - *entry) : 0);
      if (name.rfind("MTPLX_", 0) == 0 ||
          (name.rfind("PAGEDKV_", 0) == 0 && name.rfind("PAGEDKV_TEST", 0) != 0 &&
           name.rfind("PAGEDKV_KERNELS", 0) != 0))
        before_.emplace_back(name, equals + 1);
    }
    for (const auto& [name, value] : before_) unsetenv(name.c_str());
  }
  ~ScopedEnvironment() {
    for (const std::string& name : set_) unsetenv(name.c_str());
    for (const auto& [name, value] : before_) setenv(name.c_str(), value.c_str(), 1);
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

  void set(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    set_.push_back(name);
  }
  void unset(const std::string& name) { unsetenv(name.c_str()); }

 private:
  std::vector<std::pair<std::string, std::string>> before_;
  std::vector<std::string> set_;
};

}  // namespace pagedkv::testing
