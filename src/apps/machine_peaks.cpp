#include "apps/machine_peaks.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "apps/measure.h"
#include "pagedkv/base/executor.h"

namespace pagedkv::apps {
namespace {

constexpr int64_t kArrayBytes = int64_t{256} << 20;
constexpr int64_t kLine = 64, kAhead = 16 << 10;
constexpr int kRuns = 7;

// One word of a line is loaded, which brings the whole line: as fast as loading it in 512-bit registers, and faster than
// in 128-bit ones (16, 15 and 10 GB/s, contiguous, Xeon with AMX).
struct alignas(kLine) Line {
  uint64_t words[kLine / sizeof(uint64_t)];
};

// Nobody reads the sums; without them the compiler would drop the loads.
std::atomic<uint64_t> sink;

// Of the best run, since a peak is what nothing disturbed; with one thread its processor time.
double best_seconds(int threads, FunctionRef<void(int64_t, int)> share) {
  ThreadPool pool(threads);
  const CallTimes times = time_calls(kRuns, [&] { pool.run(threads, share); });
  return 1e-3 * std::ranges::min(threads == 1 ? times.cpu_ms : times.ms);
}

template <class T>
std::span<const T> share_of(std::span<const T> all, int64_t i, int64_t threads) {
  const auto size = static_cast<int64_t>(all.size());
  return all.subspan(size * i / threads, size * (i + 1) / threads - size * i / threads);
}

// Pages are visited in chunks of at most 4 KiB, all of one size, so that one distance in chunks is the same distance in
// bytes for small pages and large ones.
int64_t chunk_lines(int64_t page_lines) {
  int64_t lines = std::min<int64_t>(page_lines, 4096 / kLine);
  while (page_lines % lines != 0) --lines;
  return lines;
}

// Where each chunk begins, in lines.
std::vector<uint32_t> shuffled_chunks(int64_t page_lines, int64_t lines) {
  std::vector<uint32_t> pages(kArrayBytes / kLine / page_lines), chunks;
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
  chunks.reserve(pages.size() * page_lines / lines);
  for (const uint32_t page : pages)
    for (int64_t at = 0; at < page_lines; at += lines)
      chunks.push_back(static_cast<uint32_t>(page * page_lines + at));
  return chunks;
}

uint64_t read_chunks(const Line* array, std::span<const uint32_t> chunks, int64_t lines) {
  const size_t ahead = (kAhead / kLine + lines - 1) / lines;
  uint64_t sum = 0;
  for (size_t c = 0; c < chunks.size(); ++c) {
    const Line* chunk = array + chunks[c];
    const Line* next = array + chunks[std::min(c + ahead, chunks.size() - 1)];
    for (int64_t i = 0; i < lines; ++i) {
      __builtin_prefetch(next + i, 0, 2);
      sum += chunk[i].words[0];
    }
  }
  return sum;
}

uint64_t read_run(std::span<const Line> run) {
  uint64_t sum = 0;
  for (const Line& line : run) sum += line.words[0];
  return sum;
}

// Twelve chains, which is more than latency times ports asks for on any of these CPUs (Zen: 4 x 2, Cortex: 4 x 2).
constexpr int kChains = 12;
#if defined(__x86_64__)
#define PAGEDKV_FMAS(r)                    \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "0\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "1\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "2\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "3\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "4\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "5\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "6\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "7\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "8\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "9\n\t"                                  \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r \
  "10\n\t"                                 \
  "vfmadd231ps %%" r "14, %%" r "15, %%" r "11\n\t"
#define PAGEDKV_FMA_LOOP(zero, r)                                                              \
  asm volatile(zero "1:\n\t" PAGEDKV_FMAS(r) "dec %0\n\tjnz 1b\n\tvzeroupper"                  \
               : "+r"(turns)                                                                   \
               :                                                                               \
               : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", \
                 "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
void multiply(int bits, int64_t turns) {
  if (bits == 512)
    PAGEDKV_FMA_LOOP("vzeroall\n\t", "zmm");
  else
    PAGEDKV_FMA_LOOP("vzeroall\n\t", "ymm");
}
#elif defined(__aarch64__)
void multiply(int, int64_t turns) {
  using Floats [[gnu::vector_size(16)]] = float;
  Floats sums[kChains] = {}, a{}, b{};
  for (; turns > 0; --turns)
    for (Floats& sum : sums) asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
}
#else
void multiply(int, int64_t) {}
#endif

int register_bits(const KernelSet& set) {
  const std::string_view name = set.name;
  return name == "avx512" ? 512 : name == "avx2" ? 256 : name == "neon" ? 128 : 0;
}

}  // namespace

void MachinePeaks::Free::operator()(std::byte* p) const { std::free(p); }

MachinePeaks::MachinePeaks() {
  void* memory = nullptr;
  if (posix_memalign(&memory, 2 << 20, kArrayBytes) != 0) throw std::bad_alloc();
  array_.reset(static_cast<std::byte*>(memory));
#if defined(MADV_HUGEPAGE)
  madvise(memory, kArrayBytes, MADV_HUGEPAGE);
#endif
  std::memset(memory, 1, kArrayBytes);
}

double MachinePeaks::contiguous_gb_s(int threads) {
  double& rate = reads_[{0, threads}];
  if (rate > 0) return rate;
  const std::span array(reinterpret_cast<const Line*>(array_.get()), kArrayBytes / kLine);
  const double seconds =
      best_seconds(threads, [&](int64_t i, int) { sink += read_run(share_of(array, i, threads)); });
  return rate = 1e-9 * kArrayBytes / seconds;
}

double MachinePeaks::shuffled_gb_s(int64_t page_bytes, int threads) {
  const int64_t page_lines = (page_bytes + kLine - 1) / kLine, lines = chunk_lines(page_lines);
  double& rate = reads_[{page_lines, threads}];
  if (rate > 0) return rate;
  const std::vector<uint32_t> chunks = shuffled_chunks(page_lines, lines);
  const std::span<const uint32_t> all(chunks);
  const auto* array = reinterpret_cast<const Line*>(array_.get());
  const double seconds = best_seconds(threads, [&](int64_t i, int) {
    sink += read_chunks(array, share_of(all, i, threads), lines);
  });
  return rate = 1e-9 * static_cast<double>(all.size() * lines * kLine) / seconds;
}

double MachinePeaks::fma_gflop_s(const KernelSet& set, int threads) {
  const int bits = register_bits(set);
  if (bits == 0) return 0;
  double& rate = fmas_[{bits, threads}];
  if (rate > 0) return rate;
  constexpr int64_t kTurns = 4 << 20;
  const double seconds = best_seconds(threads, [&](int64_t, int) { multiply(bits, kTurns); });
  return rate = 1e-9 * 2 * kChains * (bits / 32) * static_cast<double>(kTurns) * threads / seconds;
}

}  // namespace pagedkv::apps
