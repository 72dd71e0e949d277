#pragma once

#include <fstream>
#include <string>

namespace pagedkv::apps {

// `root` is put before the path that is read (tests).
inline std::string cpu_name(const std::string& root = {}) {
  std::ifstream in(root + "/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

}  // namespace pagedkv::apps
