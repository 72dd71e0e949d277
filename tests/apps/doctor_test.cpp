// The doctor finds what is wrong with a machine, here one made of files, and says so in a line.
#include "apps/doctor.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <nlohmann/json.hpp>

#include "apps/cli_testing.h"
#include "engine/threads.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::Cli;
using testing::slurp;

constexpr const char* kAllOfAvx512 = "fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl";

struct Doctor : Cli {
  void SetUp() override {
    Cli::SetUp();
    cpu("fpu avx2 fma");
    machine("/proc/meminfo",
            "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\nCommitLimit: 8000000 "
            "kB\nCommitted_AS: 7000000 kB\n");
    machine("/proc/self/cgroup", "0::/job\n");
    machine("/proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    machine("/proc/sys/vm/overcommit_memory", "0\n");
    machine("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    options.root = root();
    options.cache_folder = (dir / "cache").string();
    options.num_threads = 1;
    options.self_test = false;
  }

  std::string root() const { return (dir / "machine").string(); }
  void machine(const std::string& path, const std::string& text) const {
    const fs::path at = root() + path;
    fs::create_directories(at.parent_path());
    std::ofstream(at) << text;
  }
  void cpu(const std::string& flags) const {
    machine("/proc/cpuinfo",
            "processor : 0\nmodel name : Made up\nflags : " + flags + "\n\nprocessor : 1\n");
  }
  void cgroup(const std::string& limit) const {
    machine("/sys/fs/cgroup/job/memory.max", limit + "\n");
    machine("/sys/fs/cgroup/job/memory.current", "0\n");
    machine("/sys/fs/cgroup/job/memory.stat", "inactive_file 0\n");
  }
  Check find(const std::string& name) const {
    for (const Check& check : diagnose(options))
      if (check.name == name) return check;
    ADD_FAILURE() << "no check " << name;
    return {};
  }
  static void expect(const Check& check, Verdict verdict, const std::string& word) {
    EXPECT_EQ(check.verdict, verdict) << check.name << ": " << check.text;
    EXPECT_NE(check.text.find(word), std::string::npos) << check.name << ": " << check.text;
    EXPECT_EQ(check.advice.empty(), verdict == Verdict::kOk) << check.name << ": " << check.advice;
    EXPECT_EQ(check.code != kOk, verdict == Verdict::kError) << check.name;
  }

  DoctorOptions options;
};

TEST_F(Doctor, AHealthyMachineHasNothingToMend) {
  options.model = models() + "/model-variants/gemma3.gguf";
  const auto checks = diagnose(options);
  for (const Check& check : checks)
    if (check.name != "kernels") expect(check, Verdict::kOk, "");  // the real set, a made-up CPU
  EXPECT_EQ(checks.size(), 7u);
  EXPECT_EQ(exit_code(checks), kOk);
}

TEST_F(Doctor, NoHugePages) {
  machine("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
  expect(find("huge pages"), Verdict::kWarning, "never");
  fs::remove_all(root() + "/sys/kernel");
  expect(find("huge pages"), Verdict::kWarning, "cannot be read");
}

TEST_F(Doctor, ACgroupLimitBelowTheModel) {
  options.model = models() + "/model-variants/gemma3.gguf";
  const auto bytes = static_cast<int64_t>(fs::file_size(options.model));
  cgroup(std::to_string(bytes - 1));
  expect(find("memory"), Verdict::kError, "the model file has 1.1 MiB");
  EXPECT_EQ(exit_code(diagnose(options)), kResource);
  cgroup(std::to_string(bytes + 1));  // the model fits, pages do not
  expect(find("memory"), Verdict::kError, "nothing is left for pages");
  cgroup(std::to_string(bytes + (int64_t{257} << 20)));
  expect(find("memory"), Verdict::kOk, "258.1 MiB");
  cgroup("max");
  expect(find("memory"), Verdict::kOk, "15.3 GiB");
}

TEST_F(Doctor, AModelLargerThanTheMemory) {
  options.model = (dir / "large.gguf").string();
  std::ofstream(options.model) << "x";
  fs::resize_file(options.model, uintmax_t{8} << 30);  // a hole
  expect(find("memory"), Verdict::kWarning, "8.0 GiB");
  fs::resize_file(options.model, uintmax_t{16} << 30);
  expect(find("memory"), Verdict::kError, "16.0 GiB");
}

TEST_F(Doctor, OvercommitByTheBook) {
  machine("/proc/sys/vm/overcommit_memory", "2\n");
  expect(find("overcommit"), Verdict::kWarning, "976.6 MiB");
  machine("/proc/meminfo",
          "MemAvailable: 8000000 kB\nCommitLimit: 8000 kB\nCommitted_AS: 9000 kB\n");
  expect(find("overcommit"), Verdict::kError, "0 B");
  machine("/proc/sys/vm/overcommit_memory", "1\n");
  expect(find("overcommit"), Verdict::kOk, "");
}

TEST_F(Doctor, ABrokenModelFile) {
  const std::string whole = slurp(models() + "/model-variants/gemma3.gguf");
  options.model = file("cut.gguf", whole.substr(0, whole.size() - 100));
  expect(find("model"), Verdict::kError, "is cut short");
  EXPECT_EQ(exit_code(diagnose(options)), kModel);
  options.model = file("none.gguf", whole.substr(0, 3));
  expect(find("model"), Verdict::kError, "none.gguf");
  options.model = (dir / "missing.gguf").string();
  expect(find("model"), Verdict::kError, "cannot be opened");
}

TEST_F(Doctor, AnUnknownFamily) {
  std::string other = slurp(models() + "/model-variants/qwen2.gguf");
  const std::string key = "general.architecture";
  const size_t at = other.find(key) + key.size() + 4 + 8;  // type and length of the text
  ASSERT_EQ(other.substr(at, 5), "qwen2");
  other.replace(at, 5, "swan2");
  options.model = file("swan.gguf", other);
  expect(find("model"), Verdict::kError, "architecture swan2 is not supported");
}

TEST_F(Doctor, HiddenAvx512) {
  expect(check_kernels(root(), "avx2"), Verdict::kOk, "Made up, kernel set avx2");
  cpu("fpu avx2 avx512f avx512cd");
  expect(check_kernels(root(), "avx2"), Verdict::kWarning, "hides avx512bw, avx512dq, avx512vl");
  cpu("fpu avx2 amx_tile");
  expect(check_kernels(root(), "avx2"), Verdict::kWarning, "hides avx512f");
  cpu(kAllOfAvx512);
  expect(check_kernels(root(), "avx2"), Verdict::kWarning, "the CPU has AVX-512");
  expect(check_kernels(root(), "reference"), Verdict::kWarning, "the CPU has AVX-512");
  expect(check_kernels(root(), "avx512"), Verdict::kOk, "avx512");
  cpu("fpu");
  expect(check_kernels(root(), "reference"), Verdict::kWarning, "reference");
}

// While one lives, files are opened as somebody without rights, even where the test runs as root.
struct AsNobody {
  AsNobody() { done = seteuid(getuid() == 0 ? 65534 : getuid()) == 0; }
  ~AsNobody() { done = seteuid(getuid()) == 0; }
  bool done;
};

TEST_F(Doctor, AReadOnlyCacheFolder) {
  expect(check_cache_folder(dir / "not" / "yet"), Verdict::kOk, "yet");
  EXPECT_FALSE(fs::exists(dir / "not"));
  const fs::path folder = dir / "cache";
  fs::create_directory(folder);
  expect(check_cache_folder(folder), Verdict::kOk, "cache");
  EXPECT_TRUE(fs::is_empty(folder));
  fs::permissions(folder, fs::perms{0555});
  {
    const AsNobody nobody;
    ASSERT_TRUE(nobody.done);
    expect(check_cache_folder(folder), Verdict::kWarning, "Permission denied");
    expect(check_cache_folder(folder / "pagedkv"), Verdict::kWarning, "Permission denied");
  }
  expect(check_cache_folder(file("plain", "") + "/pagedkv"), Verdict::kWarning, "Not a directory");
  expect(check_cache_folder("/proc/pagedkv"), Verdict::kWarning, "/proc");
  const auto r = run("doctor", "PAGEDKV_CACHE_DIR=/proc");
  EXPECT_EQ(r.code, 0) << r.out;
  EXPECT_NE(r.out.find("warning  cache folder: /proc"), std::string::npos) << r.out;
}

TEST_F(Doctor, TooManyThreads) {
  options.num_threads = usable_cores();
  expect(find("threads"), Verdict::kOk, "that this process may use");
  options.num_threads = usable_cores() + 1;
  expect(find("threads"), Verdict::kWarning, std::to_string(usable_cores() + 1) + " threads");
  options.num_threads = 2;
  machine("/sys/fs/cgroup/cpu.max", "100000 100000\n");
  expect(find("threads"), Verdict::kWarning, "2 threads on 1 core");
}

TEST_F(Doctor, APortInUse) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  options.port = ntohs(address.sin_port);
  expect(find("port"), Verdict::kError, "127.0.0.1:" + std::to_string(options.port));
  EXPECT_EQ(exit_code(diagnose(options)), kEnvironment);
  const auto r = run("doctor --port " + std::to_string(options.port));
  EXPECT_EQ(r.code, 5) << r.out;
  EXPECT_NE(r.out.find("error    port: "), std::string::npos) << r.out;
  close(fd);
  expect(find("port"), Verdict::kOk, "is free");
}

TEST_F(Doctor, AnUnknownKernelSet) {
  const auto r = run("doctor -t 1", "PAGEDKV_KERNELS=avx1024");
  EXPECT_EQ(r.code, 5) << r.out;
  EXPECT_NE(r.out.find("error    kernels: PAGEDKV_KERNELS: kernel set \"avx1024\""),
            std::string::npos)
      << r.out;
  EXPECT_NE(r.out.find("ok       self-test"), std::string::npos) << r.out;
}

TEST_F(Doctor, TheSelfTestTriesEverySetOfThisCpu) {
  options.root.clear();
  options.self_test = true;
  const Check self = find("self-test");
  expect(self, Verdict::kOk, "bit for bit in 4 cases");
  for (const KernelSet& set : kernel_sets())
    EXPECT_EQ(self.text.find(set.name) != std::string::npos, set.supported()) << set.name;
  expect(find("read bandwidth"), Verdict::kOk, "GB/s with 1 thread");
}

TEST_F(Doctor, JsonIsOneObject) {
  const auto r = run("doctor --json -t 1 --port -m " + file("cut.gguf", "GGUF"));
  EXPECT_EQ(r.code, 4) << r.out;
  const json j = json::parse(r.out);
  EXPECT_EQ(j["exit_code"], 4);
  std::vector<std::string> names;
  for (const json& check : j["checks"]) {
    names.push_back(check["check"]);
    EXPECT_EQ(check.contains("advice"), check["status"] != "ok") << check;
    EXPECT_FALSE(check["text"].get<std::string>().empty());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"kernels", "memory", "huge pages", "overcommit",
                                             "model", "cache folder", "threads", "port",
                                             "self-test", "read bandwidth"}));
  EXPECT_EQ(run("doctor --port 70000").code, 2);
  EXPECT_EQ(run("doctor -t -1").code, 2);
}

// Without errors before it, the first error decides.
TEST_F(Doctor, TheFirstErrorIsTheExitCode) {
  const Check fine{"a", Verdict::kOk, "", "", kOk}, odd{"b", Verdict::kWarning, "", "", kOk};
  const Check wrong{"c", Verdict::kError, "", "", kVerification},
      port{"d", Verdict::kError, "", "", kEnvironment};
  EXPECT_EQ(exit_code({fine, odd}), kOk);
  EXPECT_EQ(exit_code({fine, odd, wrong, port}), kVerification);
}

}  // namespace
}  // namespace pagedkv::apps
