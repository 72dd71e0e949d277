#include "apps/doctor.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "apps/attention_problem.h"
#include "apps/cpu_name.h"
#include "apps/machine_peaks.h"
#include "core/memory_budget.h"
#include "engine/threads.h"
#include "models/ggml/ggml_model.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using nlohmann::ordered_json;

constexpr int kDefaultPort = 8000;

constexpr const char* kVerdictNames[] = {"ok", "warning", "error"};

Check ok(std::string name, std::string text) {
  return {std::move(name), Verdict::kOk, std::move(text)};
}
Check warning(std::string name, std::string text, std::string advice) {
  return {std::move(name), Verdict::kWarning, std::move(text), std::move(advice)};
}
Check error(std::string name, std::string text, std::string advice, ExitCode code) {
  return {std::move(name), Verdict::kError, std::move(text), std::move(advice), code};
}

std::string first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// ---- processor

// What kernel set avx512 needs (KernelSet::needs), as /proc/cpuinfo names it.
constexpr const char* kAvx512Flags[] = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"};

std::vector<std::string> cpu_flags(const std::string& root) {
  std::ifstream in(root + "/proc/cpuinfo");
  std::vector<std::string> flags;
  for (std::string line; flags.empty() && std::getline(in, line);) {
    if (line.rfind("flags", 0) != 0) continue;
    std::istringstream words(line.substr(std::min(line.find(':') + 1, line.size())));
    for (std::string word; words >> word;) flags.push_back(word);
  }
  return flags;
}

const KernelSet& set_named(std::string_view name) {
  return *std::ranges::find_if(kernel_sets(), [&](const KernelSet& s) { return s.name == name; });
}

// ---- memory

Check check_huge_pages(const std::string& root) {
  const std::string name = "huge pages";
  const std::string path = "/sys/kernel/mm/transparent_hugepage/enabled";
  const std::string setting = first_line(root + path);
  if (setting.empty())
    return warning(name, path + " cannot be read: the kernel may have none",
                   "attention over large caches is then slower by a few percent");
  if (setting.find("[never]") != std::string::npos)
    return warning(
        name, path + " says never",
        "echo madvise > " + path + ": attention over large caches gets a few percent faster");
  return ok(name, setting);
}

Check check_overcommit(const std::string& root) {
  const std::string name = "overcommit";
  const int64_t room = commit_room(root);
  if (room == kUnlimitedBytes) return ok(name, "vm.overcommit_memory is not 2");
  const std::string advice = "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio";
  const std::string text =
      "vm.overcommit_memory = 2: the kernel refuses memory beyond CommitLimit, " +
      format_bytes(room) + " of it are left";
  // A pool that may not even have what it would leave to others cannot be of use.
  if (room < PagePoolOptions().headroom_bytes) return error(name, text, advice, kResource);
  return warning(name, text + ", and pages may be refused while memory is free", advice);
}

int64_t file_bytes(const std::string& path) {
  std::error_code none;
  const auto bytes = fs::file_size(path, none);
  return none ? 0 : static_cast<int64_t>(bytes);
}

Check check_memory(const std::string& root, const std::string& model) {
  const std::string name = "memory";
  const int64_t limit = memory_limit(root), available = available_memory(root);
  if (limit == kUnlimitedBytes && available == kUnlimitedBytes)
    return warning(name, "neither /proc/meminfo nor a cgroup tells how much there is",
                   "give --kv-cache-memory-bytes");
  const std::string text = "this process may use " + format_bytes(limit) +
                           " (machine and cgroups), " + format_bytes(available) +
                           " are available now";
  const int64_t bytes = model.empty() ? 0 : file_bytes(model);
  const std::string needs = ", the model file has " + format_bytes(bytes);
  if (bytes > limit)
    return error(name, text + needs, "raise the limit, or take a smaller or more quantised model",
                 kResource);
  if (const int64_t headroom = PagePoolOptions().headroom_bytes; available <= headroom)
    return error(
        name, text + ": nothing is left for pages beyond the headroom of " + format_bytes(headroom),
        "free memory or raise the limit", kResource);
  if (bytes > available)
    return warning(name, text + needs,
                   "free memory: weights that do not stay in memory are read again in every step");
  return ok(name, bytes > 0 ? text + needs : text);
}

// ---- files

Check check_model(const std::string& path) {
  try {
    const ModelInfo info = describe_ggml_model(path);
    return ok("model", info.description + ", context " + std::to_string(info.context_length));
  } catch (const ModelError& e) {
    return error("model", e.what(), "take a whole GGUF file of a family that is supported", kModel);
  }
}

// Creates a file or folder in `folder` and takes it away again: what access() says, a read-only file system or a
// quota may refuse. Returns an errno.
int try_to_write(const std::string& folder) {
  std::string name = folder + "/.pagedkv-doctor-XXXXXX";
  const int file = mkstemp(name.data());
  if (file < 0) return errno;
  close(file);
  unlink(name.c_str());
  return 0;
}

// ---- threads, port

Check check_threads(int num_threads, const std::string& root) {
  const int cores = usable_cores(root);
  const std::string text =
      std::to_string(num_threads) + (num_threads == 1 ? " thread" : " threads") + " on " +
      std::to_string(cores) + (cores == 1 ? " core" : " cores") + " that this process may use";
  if (num_threads <= cores) return ok("threads", text);
  return warning("threads", text,
                 "-t " + std::to_string(cores) +
                     " or less: threads that wait spin, so more than that is much slower");
}

// Binds it on the loopback address as a server would; a connection that is still closing does not count.
Check check_port(int port) {
  const std::string text = "127.0.0.1:" + std::to_string(port);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int failed = fd < 0 ? errno : 0;
  if (failed == 0) {
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        listen(fd, 1) != 0)
      failed = errno;
    close(fd);
  }
  if (failed == 0) return ok("port", text + " is free");
  return error("port", text + " cannot be had: " + std::strerror(failed),
               failed == EACCES ? "take a port from 1024 on"
                                : "stop what listens there, or take another --port",
               kEnvironment);
}

// ---- self-test

// Every page format, windows, soft cap, sinks, heads that no vector divides, several partitions of a sequence.
constexpr const char* kCases[] = {
    "keys=f16 values=f16 heads=9/3 dims=64/64 seqs=1100:1,40:1",
    "keys=q8 values=q8 heads=8/2 dims=128/128 seqs=700:5",
    "keys=q4 values=q6 heads=6/2 dims=64/96 page=5 seqs=600:3",
    "keys=bf16 values=f32 heads=4/4 dims=80/48 window=50 softcap=3 sinks=1 seqs=530:9",
};
constexpr double kSelfTestSeconds = 3.0;  // no further case is begun after them
constexpr int64_t kPeaksBytes = int64_t{512}
                                << 20;  // the array that is read, and as much again to spare

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Check check_arithmetic(int threads) {
  const std::string name = "self-test";
  const auto start = Clock::now();
  std::vector<const KernelSet*> sets;
  std::string names;
  for (const KernelSet& set : kernel_sets()) {
    if (!set.supported()) continue;
    sets.push_back(&set);
    names += (names.empty() ? "" : ", ") + std::string(set.name);
  }
  int cases = 0;
  std::string words;
  try {
    for (const char* each : kCases) {
      if (seconds_since(start) > kSelfTestSeconds) break;
      words = each;
      AttentionProblem problem(AttentionCase::parse(words), threads);
      for (const KernelSet* set : sets) problem.check(*set);
      ++cases;
    }
  } catch (const MemoryError& e) {
    return warning(name, std::string("not run: ") + e.what(), "free memory");
  } catch (const std::runtime_error& e) {
    return error(name, words + ": " + e.what(),
                 "do not trust results of this build on this machine; please report it",
                 kVerification);
  }
  return ok(name, names + ": attention equals the reference bit for bit in " +
                      std::to_string(cases) + " cases");
}

Check check_bandwidth(int threads, const std::string& root) {
  const std::string name = "read bandwidth";
  if (available_memory(root) < kPeaksBytes)
    return warning(name, "not measured: " + format_bytes(kPeaksBytes) + " of memory are needed",
                   "free memory");
  char text[80];
  std::snprintf(text, sizeof text, "%.1f GB/s with %d %s", MachinePeaks().contiguous_gb_s(threads),
                threads, threads == 1 ? "thread" : "threads");
  return ok(name, text);
}

// ---- output

std::string line_of(const Check& check) {
  char verdict[16];
  std::snprintf(verdict, sizeof verdict, "%-8s ", kVerdictNames[static_cast<int>(check.verdict)]);
  return printable(verdict + check.name + ": " + check.text +
                   (check.advice.empty() ? "" : "; " + check.advice));
}

ordered_json to_json(const std::vector<Check>& checks) {
  ordered_json list = ordered_json::array();
  for (const Check& c : checks) {
    list.push_back({{"check", c.name},
                    {"status", kVerdictNames[static_cast<int>(c.verdict)]},
                    {"text", c.text}});
    if (!c.advice.empty()) list.back()["advice"] = c.advice;
  }
  return {{"exit_code", exit_code(checks)}, {"checks", list}};
}

int doctor(const DoctorOptions& options, bool json) {
  const auto checks = diagnose(options);
  if (json)
    std::cout << to_json(checks).dump(2, ' ', false, ordered_json::error_handler_t::replace)
              << std::endl;
  else
    for (const Check& check : checks) std::cout << line_of(check) << std::endl;
  if (!std::cout) throw std::runtime_error("standard output: cannot be written");
  return exit_code(checks);
}

}  // namespace

Check check_kernels(const std::string& root, std::string_view kernel_set) {
  const KernelSet& set = set_named(kernel_set);
  const std::string text = cpu_name(root) + ", kernel set " + set.name + " (" + set.needs + ")";
  const auto flags = cpu_flags(root);
  std::string missing;
  for (const char* flag : kAvx512Flags)
    if (std::ranges::count(flags, flag) == 0)
      missing += (missing.empty() ? "" : ", ") + std::string(flag);
  // CPUs with AMX have AVX-512 too, whatever a hypervisor shows.
  const bool has_parts = std::ranges::any_of(
      flags, [](const std::string& f) { return f.starts_with("avx512") || f.starts_with("amx"); });
  if (has_parts && kernel_set != "avx512") {
    if (missing.empty())
      return warning("kernels", text + ": the CPU has AVX-512",
                     "unset PAGEDKV_KERNELS, if it is set; else the system does not let programs "
                     "use the registers");
    return warning(
        "kernels", text + ": of AVX-512 the system hides " + missing,
        "let the virtual machine or the boot options show them: avx512 is the fastest set");
  }
  if (kernel_set == "reference")
    return warning("kernels", text,
                   "unset PAGEDKV_KERNELS, or take a CPU with AVX2: the reference is slow");
  return ok("kernels", text);
}

Check check_cache_folder(const std::string& folder) {
  fs::path existing = fs::absolute(folder).lexically_normal();
  std::error_code none;
  while (!fs::exists(existing, none) && existing.has_relative_path())
    existing = existing.parent_path();
  const int failed = fs::is_directory(existing, none) ? try_to_write(existing.string()) : ENOTDIR;
  if (failed == 0) return ok("cache folder", folder);
  return warning(
      "cache folder",
      folder + " cannot be written (" + existing.string() + ": " + std::strerror(failed) + ")",
      "PAGEDKV_CACHE_DIR names another folder for models and builds");
}

ExitCode exit_code(const std::vector<Check>& checks) {
  const auto failed = std::ranges::find(checks, Verdict::kError, &Check::verdict);
  return failed == checks.end() ? kOk : failed->code;
}

std::vector<Check> diagnose(const DoctorOptions& o) {
  std::vector<Check> checks;
  try {
    checks.push_back(check_kernels(o.root, kernels().name));
  } catch (const std::invalid_argument& e) {
    checks.push_back(
        error("kernels", e.what(), "unset PAGEDKV_KERNELS, or name one of these", kEnvironment));
    select_kernels("reference");  // for the pages of the self-test, which tries every set
  }
  checks.push_back(check_memory(o.root, o.model));
  checks.push_back(check_huge_pages(o.root));
  checks.push_back(check_overcommit(o.root));
  if (!o.model.empty()) checks.push_back(check_model(o.model));
  checks.push_back(check_cache_folder(o.cache_folder));
  const int threads = o.num_threads > 0 ? o.num_threads : default_num_threads();
  checks.push_back(check_threads(threads, o.root));
  if (o.port > 0) checks.push_back(check_port(o.port));
  if (!o.self_test) return checks;
  const int workers = std::min(threads, usable_cores(o.root));
  checks.push_back(check_arithmetic(workers));
  checks.push_back(check_bandwidth(workers, o.root));
  return checks;
}

void add_doctor(CLI::App& app, std::function<int()>& command) {
  struct Options {
    DoctorOptions doctor;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  auto* sub = app.add_subcommand("doctor", "check this machine, one line a check, with what to do");
  add_option(*sub, "-m,--model", o->doctor.model, "GGUF file to check")
      ->type_name("FILE")
      ->default_str("");
  add_option(*sub, "-t,--threads", o->doctor.num_threads, "threads (0: the cores that are free)")
      ->check(CLI::Range(0, 1024));
  add_option(*sub, "--port", o->doctor.port,
             "port of a server to come, " + std::to_string(kDefaultPort) + " unless named")
      ->expected(0, 1)
      ->default_str(std::to_string(kDefaultPort))
      ->check(CLI::Range(1, 65535));
  name_variable(sub->add_flag("--json", o->json, "one JSON object on stdout instead of lines"));
  sub->parse_complete_callback([o, &command] {
    command = [=] {
      DoctorOptions options = o->doctor;
      options.cache_folder = cache_folder();
      return doctor(options, o->json);
    };
  });
}

}  // namespace pagedkv::apps
