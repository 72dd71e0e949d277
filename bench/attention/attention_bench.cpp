// Times attention cases, each checked against the reference first, and prints one JSON object a line.
//   attention_bench                                the table below, every supported kernel set, f16, q8, q6 and q4
//   attention_bench --case 'keys=f16 values=f16 heads=32/8 dims=128/128 seqs=32768:1:1' --set avx512
// Options: --threads N (1), --runs N (15), --set NAME (all supported), --format NAME (of the table; any page format), --no-check.
// The words of a case are those of tests/kernels/attention_case.h. Time only on an otherwise idle machine.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/attention_case.h"

namespace {

using namespace pagedkv;
using namespace pagedkv::testing;

struct Options {
  std::vector<std::string> cases;
  std::string set, format;
  int threads = 1, runs = 15;
  bool check = true;
};

constexpr const char* kTable[] = {
    "heads=32/8 dims=128/128 seqs=32768:1:1",     // decode, long
    "heads=9/3 dims=64/64 seqs=8192:1:1",         // decode, small model
    "heads=32/32 dims=128/128 seqs=8192:1:1",     // decode, bound by memory
    "heads=32/8 dims=128/128 seqs=4096:512:1",    // prefill
    "heads=9/3 dims=64/64 seqs=4096:512:1",       // prefill, small model
    "heads=32/8 dims=80/80 seqs=8192:1:1",        // head_dim 80
    "heads=9/3 dims=64/64 seqs=8192:7:1",         // a few rows
    "heads=9/3 dims=64/64 page=1 seqs=8192:1:1",  // pages smaller than a tile
};

Options parse(int argc, char** argv) {
  Options o;
  auto next = [&](int& i) {
    if (i + 1 >= argc) throw std::invalid_argument(std::string(argv[i]) + " needs a value");
    return std::string(argv[++i]);
  };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--case")
      o.cases.push_back(next(i));
    else if (word == "--set")
      o.set = next(i);
    else if (word == "--format")
      o.format = next(i);
    else if (word == "--threads")
      o.threads = std::stoi(next(i));
    else if (word == "--runs")
      o.runs = std::stoi(next(i));
    else if (word == "--no-check")
      o.check = false;
    else
      throw std::invalid_argument("unknown option " + word);
  }
  if (!o.cases.empty()) return o;
  std::vector<std::string> formats = {"f16", "q8", "q6", "q4"};
  if (!o.format.empty()) formats = {std::string(page_format_name(parse_page_format(o.format)))};
  for (const std::string& format : formats)
    for (const char* line : kTable)
      o.cases.push_back("keys=" + format + " values=" + format + " " + line);
  return o;
}

// The first and last row of each sequence, alone, by the reference. Needs a causal case without mask.
void check(AttentionProblem& problem, const AttentionArgs& args) {
  const AttentionCase& c = problem.spec();
  ThreadPool one(1);
  for (int s = 0; s < args.num_seqs; ++s)
    for (int row : {args.query_start[s], args.query_start[s + 1] - 1}) {
      const int32_t query_start[] = {0, 1};
      const int32_t seq_len = args.seq_lens[s] - (args.query_start[s + 1] - row) + 1;
      const int64_t floats = int64_t{c.num_q_heads} * c.value_dim;
      std::vector<float> out(floats);
      AttentionArgs alone = args;
      alone.queries += int64_t{row} * c.num_q_heads * c.key_dim;
      alone.out = out.data();
      alone.num_seqs = 1;
      alone.query_start = query_start;
      alone.seq_lens = &seq_len;
      alone.block_table += s * args.block_table_stride;
      AttentionPlan plan;
      plan.prepare(alone, 1);
      reference_set().attend(alone, plan.impl(), one);
      if (std::memcmp(out.data(), args.out + row * floats, floats * sizeof(float)) != 0)
        throw std::runtime_error("row " + std::to_string(row) + " differs from the reference");
    }
}

// Of the calling thread: with one thread, a time that other programs disturb less.
double thread_cpu_ms() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return 1e3 * static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_nsec);
}

std::string cpu_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

double visible_tokens(const AttentionCase& c) {  // summed over rows
  double sum = 0;
  for (const Sequence& s : c.sequences)
    for (int i = 0; i < s.query_len; ++i) {
      const int all = c.causal ? s.seq_len - s.query_len + i + 1 : s.seq_len;
      sum += c.window ? std::min(c.window, all) : all;
    }
  return sum;
}

void time_case(const Options& o, const std::string& text, AttentionProblem& problem,
               const KernelSet& set) {
  const AttentionCase& c = problem.spec();
  ThreadPool pool(o.threads);
  std::vector<float> out(int64_t{c.num_tokens()} * c.num_q_heads * c.value_dim);
  AttentionArgs args = problem.args();
  args.out = out.data();
  AttentionPlan plan;
  plan.prepare(args, o.threads);
  set.attend(args, plan.impl(), pool);
  if (o.check) check(problem, args);
  std::vector<double> ms, cpu_ms;
  for (int i = 0; i < o.runs + 1; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = thread_cpu_ms();
    set.attend(args, plan.impl(), pool);
    if (i == 0) continue;
    cpu_ms.push_back(thread_cpu_ms() - cpu_start);
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
                     .count());
  }
  std::sort(ms.begin(), ms.end());
  std::sort(cpu_ms.begin(), cpu_ms.end());
  const double median = ms[ms.size() / 2],
               flop = 2.0 * (c.key_dim + c.value_dim) * c.num_q_heads * visible_tokens(c);
  double tokens = 0;
  for (const Sequence& s : c.sequences) tokens += s.seq_len;
  const double bytes =
      tokens * c.num_kv_heads *
      (row_bytes(c.key_format, c.key_dim) + row_bytes(c.value_format, c.value_dim) +
       4 * has_scales(c.key_format) + 4 * has_scales(c.value_format));
  std::printf(
      "{\"set\": \"%s\", \"threads\": %d, \"case\": \"%s\", \"ms\": %.4f, \"ms_min\": %.4f, "
      "\"ms_max\": %.4f, \"cpu_ms\": %.4f, "
      "\"gflops\": %.1f, \"gb_per_s\": %.2f, \"runs\": %d, \"checked\": %s, \"compiler\": "
      "\"%s\", \"cpu\": \"%s\"}\n",
      set.name, o.threads, text.c_str(), median, ms.front(), ms.back(), cpu_ms[cpu_ms.size() / 2],
      flop / median / 1e6, bytes / median / 1e6, o.runs, o.check ? "true" : "false", __VERSION__,
      cpu_name().c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  const Options o = parse(argc, argv);
  for (const std::string& text : o.cases) {
    AttentionProblem problem(AttentionCase::parse(text));
    for (const KernelSet* set : supported_sets())
      if (o.set.empty() ? set != &reference_set() : o.set == set->name)
        time_case(o, text, problem, *set);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "attention_bench: %s\n", error.what());
  return 1;
}
