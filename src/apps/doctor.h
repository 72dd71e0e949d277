// Whether this machine is fit for pagedkv: one check a line, each with what to do.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/cli.h"

namespace pagedkv::apps {

enum class Verdict { kOk, kWarning, kError };

struct Check {
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string text;      // what was found
  std::string advice{};  // what to do about it
  ExitCode code = kOk;   // of an error
};

struct DoctorOptions {
  std::string model;    // GGUF file; empty: none is looked at
  int num_threads = 0;  // 0: default_num_threads()
  int port = 0;         // 0: none is looked at
  std::string cache_folder;
  // Before every file of /proc and /sys that is read; what the kernel itself answers is this machine's.
  std::string root;
  bool self_test = true;
};

std::vector<Check> diagnose(const DoctorOptions& options);

// The checks that tests make one by one. `kernel_set` is the name of the set in use.
Check check_kernels(const std::string& root, std::string_view kernel_set);
Check check_cache_folder(const std::string& folder);

// kOk without errors, else the first error's.
ExitCode exit_code(const std::vector<Check>& checks);

// `pagedkv doctor`. When the arguments name it, `command` becomes what runs it and returns the exit code.
void add_doctor(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
