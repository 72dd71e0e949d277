// Attention and append over pages, timed beside what the machine could do at best. One JSON object a line: for each
// number of threads the machine's peaks, then the cases, each with every kernel set and number of threads.
//
//   attention_bench                    the table below, every supported kernel set but the reference
//   attention_bench --case 'keys=q8 values=q8 heads=32/8 dims=128/128 seqs=32768:1' --set avx512 --threads 1,2
//   attention_bench --case 'append heads=32 keys=q4 values=q4 seqs=16:16'     stores the new tokens instead
//
// The words of a case are told in src/apps/attention_case.h. Each result is checked against the reference before it is
// timed; times are medians. cpu_ms, with one thread, is processor time, which other programs disturb less.
//   share_of_bandwidth  the time that reading K and V once takes in shuffled pages of this size, as a share of the time
//                       taken: above 1 where K and V fit in a cache
//   share_of_fma_peak   the same for the multiply-adds, in registers as wide as this set's
//                       Both are shares of cpu_ms where it is there.
//   kv_tokens_per_s     tokens held / time: one sequence of 32k tokens beside 64 of 512
// A case with shared=N is timed in turns with the same tokens in copies of the shared pages, which must give the same bits:
//   speedup             median of the pairs' ratios, time with copies / time of the case; cpu_speedup likewise
// Time only on an otherwise idle machine.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "append_problem.h"
#include "apps/attention_problem.h"
#include "apps/cpu_name.h"
#include "apps/machine_peaks.h"

namespace {

using namespace pagedkv;
using namespace pagedkv::bench;
using apps::AttentionCase;
using apps::AttentionProblem;
using apps::CallTimes;
using apps::MachinePeaks;
using apps::SharingProblem;
using nlohmann::ordered_json;

constexpr const char* kUsage =
    "attention_bench [--case WORDS]... [--set NAME] [--format NAME] [--threads LIST] [--runs N] "
    "[--no-check]\n"
    "                [--no-peaks] [--list]\n"
    "  --case WORDS    in place of the table; may be given again\n"
    "  --set NAME      one kernel set; default: all that this CPU supports but the reference\n"
    "  --format NAME   the table in one page format\n"
    "  --threads LIST  default 1\n"
    "  --runs N        timed calls of each case, after one that warms up; default 15\n"
    "  --no-check      do not compare with the reference\n"
    "  --no-peaks      do not measure the machine\n"
    "  --list          print the cases and stop\n";

constexpr std::string_view kAppend = "append ";

struct Options {
  std::vector<std::string> cases;
  const KernelSet* set = nullptr;  // null: all
  std::vector<int> threads{1};
  int runs = 15;
  bool check = true, peaks = true, list = false;
};

constexpr const char* kTable[] = {
    "heads=32/8 dims=128/128 seqs=32768:1",     // decode, long
    "heads=9/3 dims=64/64 seqs=8192:1",         // decode, small model
    "heads=32/32 dims=128/128 seqs=8192:1",     // decode, bound by memory
    "heads=32/8 dims=128/128 seqs=4096:512",    // prefill
    "heads=9/3 dims=64/64 seqs=4096:512",       // prefill, small model
    "heads=32/8 dims=80/80 seqs=8192:1",        // other sizes of a head
    "heads=32/8 dims=96/96 seqs=8192:1",        //
    "heads=32/8 dims=192/192 seqs=8192:1",      //
    "heads=32/8 dims=256/256 seqs=8192:1",      //
    "heads=9/3 dims=64/64 seqs=8192:7",         // a few rows
    "heads=9/3 dims=64/64 page=1 seqs=8192:1",  // pages smaller than a tile
    "heads=32/8 dims=128/128 seqs=64*512:1",    // a batch with as many tokens as the first
};
// Sequences with a common prompt, each decoding one token. The copies take up to 2 GiB.
constexpr const char* kSharedTable[] = {
    "heads=32/32 dims=128/128 shared=8192 seqs=16*8256:1",
    "heads=32/8 dims=128/128 shared=8192 seqs=16*8256:1",
    "heads=9/3 dims=64/64 shared=8192 seqs=16*8256:1",
};
// The source stays in L2, or is larger than most caches.
constexpr const char* kAppendTable[] = {
    "heads=32 dims=128/128 seqs=16:16",
    "heads=32 dims=128/128 seqs=8192:8192",
};

void add_table(const std::string& only_format, std::vector<std::string>& cases) {
  const auto add = [&](std::string_view what, const std::string& format, const char* line) {
    if (only_format.empty() || format == only_format)
      cases.push_back(std::string(what) + "keys=" + format + " values=" + format + " " + line);
  };
  const char* const formats[] = {"f16", "q8", "q6", "q4"};
  for (const char* line : kTable) {
    for (const char* format : formats) add("", format, line);
    if (line == kTable[0])
      for (const char* format : {"bf16", "f32"}) add("", format, line);
  }
  for (const char* line : kSharedTable)
    for (const char* format : formats) add("", format, line);
  for (const char* line : kAppendTable)
    for (const char* format : formats) add(kAppend, format, line);
}

int number(const std::string& option, std::string_view text) {
  int value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || value < 1)
    throw std::invalid_argument(option + " " + std::string(text) + ": not a positive number");
  return value;
}

Options parse(int argc, char** argv) {
  Options o;
  std::string format;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&] {
      if (i + 1 >= argc) throw std::invalid_argument(option + " needs a value");
      return std::string(argv[++i]);
    };
    if (option == "--case")
      o.cases.push_back(value());
    else if (option == "--set") {
      select_kernels(value());  // it fills the pages, too
      o.set = &kernels();
    } else if (option == "--format")
      format = page_format_name(parse_page_format(value()));
    else if (option == "--threads") {
      o.threads.clear();
      std::istringstream list(value());
      for (std::string one; std::getline(list, one, ',');) o.threads.push_back(number(option, one));
    } else if (option == "--runs")
      o.runs = number(option, value());
    else if (option == "--no-check")
      o.check = false;
    else if (option == "--no-peaks")
      o.peaks = false;
    else if (option == "--list")
      o.list = true;
    else
      throw std::invalid_argument(option + ": unknown\n" + kUsage);
  }
  if (o.cases.empty()) add_table(format, o.cases);
  return o;
}

std::vector<const KernelSet*> sets_to_run(const Options& o) {
  if (o.set) return {o.set};
  std::vector<const KernelSet*> sets;
  for (const KernelSet& set : kernel_sets().first(kernel_sets().size() - 1))
    if (set.supported()) sets.push_back(&set);
  return sets;
}

void print(const ordered_json& line) { std::cout << line.dump() << std::endl; }

void print_peaks(MachinePeaks& peaks, const std::vector<const KernelSet*>& sets, int threads) {
  ordered_json fma = ordered_json::object();
  for (const KernelSet* set : sets) fma[set->name] = peaks.fma_gflop_s(*set, threads);
  print({{"cpu", apps::cpu_name()},
         {"cores", std::thread::hardware_concurrency()},
         {"compiler", __VERSION__},
         {"threads", threads},
         {"contiguous_read_gb_s", peaks.contiguous_gb_s(threads)},
         {"fma_gflop_s", fma}});
}

ordered_json times(const Options& o, const std::string& words, const KernelSet& set, int threads,
                   const CallTimes& t) {
  const auto [low, high] = std::minmax_element(t.ms.begin(), t.ms.end());
  ordered_json line{{"case", words},      {"kernel_set", set.name},
                    {"threads", threads}, {"ms", apps::median(t.ms)},
                    {"ms_min", *low},     {"ms_max", *high}};
  if (threads == 1) line["cpu_ms"] = apps::median(t.cpu_ms);
  line["checked"] = o.check;
  return line;
}

// What reading K and V once would take.
double read_ms(const AttentionProblem& problem, MachinePeaks& peaks) {
  const AttentionCase& c = problem.spec();
  const double rows = static_cast<double>(c.tokens_stored()) * c.heads.kv;
  const auto ms = [&](PageFormat format, int dim) {
    const int64_t row = row_bytes(format, dim);
    const double bytes = rows * static_cast<double>(row + 4 * has_scales(format));
    return 1e-6 * bytes /
           peaks.shuffled_gb_s(row * c.heads.kv * c.page_size, problem.num_threads());
  };
  return ms(c.key_format, c.key_dim) + ms(c.value_format, c.value_dim);
}

ordered_json attention_times(const Options& o, const std::string& words,
                             const AttentionProblem& problem, const KernelSet& set,
                             const CallTimes& t, MachinePeaks* peaks) {
  const AttentionCase& c = problem.spec();
  const int threads = problem.num_threads();
  const double ms = apps::median(t.ms);
  ordered_json line = times(o, words, set, threads, t);
  line["gb_s"] = 1e-6 * static_cast<double>(problem.bytes()) / ms;
  line["gflop_s"] = 1e-6 * c.flops() / ms;
  if (peaks) {
    const double taken_ms = threads == 1 ? apps::median(t.cpu_ms) : ms;
    const double reading_ms = read_ms(problem, *peaks);
    line["read_gb_s"] = 1e-6 * static_cast<double>(problem.bytes()) / reading_ms;
    line["share_of_bandwidth"] = reading_ms / taken_ms;
    if (const double fma = peaks->fma_gflop_s(set, threads); fma > 0)
      line["share_of_fma_peak"] = 1e-6 * c.flops() / taken_ms / fma;
  }
  line["kv_tokens_per_s"] = 1e3 * static_cast<double>(c.tokens_held()) / ms;
  line["visible_tokens"] = c.visible_tokens();
  line["samples_ms"] = t.ms;
  return line;
}

void run_attention(const Options& o, const std::string& words, MachinePeaks* peaks) {
  AttentionProblem problem(AttentionCase::parse(words), o.threads[0]);
  for (const int threads : o.threads) {
    problem.use_threads(threads);
    for (const KernelSet* set : sets_to_run(o)) {
      if (o.check) problem.check(*set);
      const CallTimes t = problem.time(*set, o.runs);
      print(attention_times(o, words, problem, *set, t, peaks));
    }
  }
}

void run_sharing(const Options& o, const std::string& words, MachinePeaks* peaks) {
  SharingProblem problem(AttentionCase::parse(words), o.threads[0]);
  for (const int threads : o.threads) {
    problem.use_threads(threads);
    for (const KernelSet* set : sets_to_run(o)) {
      if (o.check) problem.check(*set);
      const auto [copied, shared] = problem.time(*set, o.runs);
      const std::vector<double> speedups = apps::ratios(copied.ms, shared.ms);
      const auto [low, high] = std::minmax_element(speedups.begin(), speedups.end());
      ordered_json line = attention_times(o, words, problem.shared(), *set, shared, peaks);
      line["copied_ms"] = apps::median(copied.ms);
      line["speedup"] = apps::median(speedups);
      line["speedup_min"] = *low;
      line["speedup_max"] = *high;
      if (threads == 1)
        line["cpu_speedup"] = apps::median(apps::ratios(copied.cpu_ms, shared.cpu_ms));
      line["copied_samples_ms"] = copied.ms;
      print(line);
    }
  }
}

bool is_shared(const std::string& words) {
  const AttentionCase c = AttentionCase::parse(words);
  return c.shared > 0 && !c.copied;
}

void run_append(const Options& o, const std::string& words) {
  AppendProblem problem(AttentionCase::parse(words.substr(kAppend.size())));
  for (const int threads : o.threads) {
    ThreadPool pool(threads);
    for (const KernelSet* set : sets_to_run(o)) {
      if (o.check) problem.check(*set, pool);
      const CallTimes t = problem.time(*set, pool, o.runs);
      const double ns = 1e6 * apps::median(t.ms);
      ordered_json line = times(o, words, *set, threads, t);
      line["ns_per_row"] = ns / static_cast<double>(problem.rows());
      line["source_bytes"] = problem.source_bytes();
      line["source_gb_s"] = static_cast<double>(problem.source_bytes()) / ns;
      line["stored_gb_s"] = static_cast<double>(problem.stored_bytes()) / ns;
      line["samples_ms"] = t.ms;
      print(line);
    }
  }
}

void run(const Options& o) {
  if (o.list) {
    for (const std::string& words : o.cases) std::puts(words.c_str());
    return;
  }
  std::unique_ptr<MachinePeaks> peaks;
  if (o.peaks) {
    peaks = std::make_unique<MachinePeaks>();
    for (const int threads : o.threads) print_peaks(*peaks, sets_to_run(o), threads);
  }
  for (const std::string& words : o.cases)
    if (words.starts_with(kAppend))
      run_append(o, words);
    else if (is_shared(words))
      run_sharing(o, words, peaks.get());
    else
      run_attention(o, words, peaks.get());
}

}  // namespace

int main(int argc, char** argv) try {
  run(parse(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "attention_bench: %s\n", error.what());
  return 1;
}
