// What the page pool costs, as JSON on stdout:
//   allocate_release_ns  one page taken and given back (median of batches)
//   of_a_million_ns      with a million pages: each of them released in random order, then allocated; and each
//                        released and allocated again while all others are held (medians of batches of 2,000)
//   give_back            memory of free pages given back and taken again: of long runs, and from between held pages;
//                        idle_ns is a give_back_idle() with nothing to do
//   grow_step            one commit of the same number of pages at 16 MiB and at 1 GiB held, the budget
//                        asked of the machine each time; the two alternate over pools of their own
//   budget_us            asking the machine what is left (part of each commit)
//   page_name_ns         the name of one page of 16 tokens below 128,000 (median of batches)
// Usage: pool_bench [small held MiB = 16] [large held MiB = 1024] [pairs = 9]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/memory_budget.h"
#include "pagedkv/core/page_name.h"
#include "pagedkv/core/page_pool.h"

namespace {

using namespace pagedkv;
using Clock = std::chrono::steady_clock;

double ns_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

constexpr int kSteps = 4;  // of each pool

struct Spread {
  double median, low, high;
};

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values[values.size() / 2], values.front(), values.back()};
}

// 30 layers of 3 kv heads x 64, f16, K and V: SmolLM2-135M.
PagePoolOptions model() {
  PagePoolOptions options;
  options.groups = {
      {0, std::vector<LayerSpec>(30, {3, 64, 64, PageFormat::kF16, PageFormat::kF16})}};
  options.num_pages = 1;
  return options;
}

void take(PagePool& pool, std::vector<PageId>& pages, int64_t count) {
  pages.resize(static_cast<size_t>(count));
  if (!pool.try_allocate(0, pages)) throw std::runtime_error(pool.refusal_text());
}

Spread allocate_release() {
  PagePool pool(model());
  std::vector<PageId> pages;
  take(pool, pages, 512);
  pool.release(0, pages);
  constexpr int kBatch = 100000;
  std::vector<double> ns;
  for (int batch = 0; batch < 21; ++batch) {
    const auto start = Clock::now();
    for (int i = 0; i < kBatch; ++i) {
      PageId page;
      if (!pool.try_allocate(0, {&page, 1})) std::abort();
      pool.release(0, {&page, 1});
    }
    ns.push_back(ns_since(start) / kBatch);
  }
  return spread(ns);
}

Spread name_pages() {
  int32_t tokens[16];
  for (int i = 0; i < 16; ++i) tokens[i] = i * 7919;
  PageName name = root_name();
  constexpr int kBatch = 20000;
  std::vector<double> ns;
  for (int batch = 0; batch < 21; ++batch) {
    const auto start = Clock::now();
    for (int i = 0; i < kBatch; ++i) name = page_name(name, tokens);
    ns.push_back(ns_since(start) / kBatch);
  }
  return spread(ns);
}

struct ManyPages {
  Spread allocate_release, release, allocate;
};

// Pages of 256 bytes, since bookkeeping alone is timed.
ManyPages many_pages() {
  constexpr int64_t kPages = 1'000'000;
  PagePoolOptions options;
  options.groups = {{0, {{1, 1, 1, PageFormat::kF32, PageFormat::kF32}}}};
  options.num_pages = static_cast<int32_t>(kPages);
  PagePool pool(options);
  std::vector<PageId> pages;
  take(pool, pages, kPages);
  std::mt19937 random(1);
  std::vector<double> both, release, allocate;
  // In batches too short to be interrupted often.
  const auto time_each = [&](std::vector<double>& ns, const auto& call) {
    constexpr size_t kBatch = 2000;
    for (size_t i = 0; i < pages.size(); i += kBatch) {
      const auto start = Clock::now();
      for (size_t k = i; k < i + kBatch; ++k) call(pages[k]);
      ns.push_back(ns_since(start) / kBatch);
    }
  };
  const auto give = [&](const PageId& page) { pool.release(0, {&page, 1}); };
  const auto get = [&](PageId& page) {
    if (!pool.try_allocate(0, {&page, 1})) std::abort();
  };
  for (int round = 0; round < 5; ++round) {
    std::shuffle(pages.begin(), pages.end(), random);
    time_each(release, give);
    time_each(allocate, get);
    std::shuffle(pages.begin(), pages.end(), random);
    time_each(both, [&](PageId& page) { give(page), get(page); });
  }
  return {spread(both), spread(release), spread(allocate)};
}

struct GiveBack {
  std::vector<double> back_us, again_us;  // per MiB
};

// All but every `period`-th run of `run` pages are free and go back, then come again.
void give_back(int64_t held, int64_t run, int64_t period, GiveBack& costs) {
  PagePool pool(model());
  const int64_t page_bytes = pool.bytes_per_token() * pool.page_size();
  std::vector<PageId> pages, freed;
  take(pool, pages, held / page_bytes);
  for (PageId page : pages)
    if (page / run % period != period - 1) freed.push_back(page);
  pool.release(0, freed);
  const auto mib = [&](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  auto start = Clock::now();
  pool.shrink_to(0, 1);
  costs.back_us.push_back(ns_since(start) / 1e3 / mib(pool.stats().bytes_given_back));
  start = Clock::now();
  if (!pool.try_grow(0, held / page_bytes)) throw std::runtime_error(pool.refusal_text());
  costs.again_us.push_back(ns_since(start) / 1e3 / mib(pool.stats().bytes_given_back));
}

Spread idle_call() {
  PagePoolOptions options = model();
  options.idle_seconds = 3600;
  PagePool pool(options);
  std::vector<double> ns;
  constexpr int kBatch = 100000;
  const auto now = Clock::now();
  for (int batch = 0; batch < 21; ++batch) {
    const auto start = Clock::now();
    for (int i = 0; i < kBatch; ++i)
      if (pool.give_back_idle(now) != 0) std::abort();
    ns.push_back(ns_since(start) / kBatch);
  }
  return spread(ns);
}

// Steps of a pool that holds about `held` bytes and has no free page left, added to `ns`. A step
// that ends early, at the capacity that the growth formula gave, is not counted: kSteps of full
// size are.
void grow_steps(int64_t held, std::vector<double>& ns, int64_t* step_bytes) {
  PagePool pool(model());
  const int64_t page_bytes = pool.bytes_per_token() * pool.page_size();
  std::vector<PageId> pages;
  take(pool, pages, held / page_bytes);
  for (int step = 0; step < kSteps;) {
    while (pool.stats().pages_committed > pool.stats().pages_held) take(pool, pages, 1);
    const int64_t committed = pool.stats().bytes_committed;
    const auto start = Clock::now();
    take(pool, pages, 1);
    const double taken = ns_since(start);
    const int64_t bytes = pool.stats().bytes_committed - committed;
    if (bytes < *step_bytes) continue;
    *step_bytes = bytes;
    ns.push_back(taken);
    ++step;
  }
}

void print(const char* name, Spread s, double unit) {
  std::printf("\"%s\": {\"median\": %.2f, \"min\": %.2f, \"max\": %.2f}", name, s.median / unit,
              s.low / unit, s.high / unit);
}

}  // namespace

int main(int argc, char** argv) try {
  const int64_t small_mib = argc > 1 ? std::atoll(argv[1]) : 16;
  const int64_t large_mib = argc > 2 ? std::atoll(argv[2]) : 1024;
  const int pairs = argc > 3 ? std::max(1, std::atoi(argv[3])) : 9;

  std::vector<double> small, large, budget;
  int64_t small_bytes = 0, large_bytes = 0;
  for (int i = 0; i < pairs; ++i) {
    grow_steps(small_mib << 20, small, &small_bytes);
    grow_steps(large_mib << 20, large, &large_bytes);
    const auto start = Clock::now();
    if (available_memory() <= 0) throw std::runtime_error("no memory is left");
    budget.push_back(ns_since(start));
  }
  const Spread s = spread(small), l = spread(large);
  std::printf("{");
  print("allocate_release_ns", allocate_release(), 1);
  std::printf(
      ",\n \"grow_step\": {\"small_held_mib\": %lld, \"large_held_mib\": %lld, \"pairs\": %d, "
      "\"steps\": %d,\n  ",
      static_cast<long long>(small_mib), static_cast<long long>(large_mib), pairs, kSteps);
  print("small_us", s, 1e3);
  std::printf(", \"small_step_bytes\": %lld,\n  ", static_cast<long long>(small_bytes));
  print("large_us", l, 1e3);
  std::printf(", \"large_step_bytes\": %lld,\n  \"ratio\": %.3f},\n ",
              static_cast<long long>(large_bytes), l.median / s.median);
  print("budget_us", spread(budget), 1e3);
  std::printf(",\n ");
  print("page_name_ns", name_pages(), 1);
  const ManyPages many = many_pages();
  std::printf(",\n \"of_a_million_ns\": {");
  print("allocate_release", many.allocate_release, 1);
  std::printf(",\n  ");
  print("release", many.release, 1);
  std::printf(",\n  ");
  print("allocate", many.allocate, 1);
  GiveBack whole, between;
  for (int i = 0; i < pairs; ++i) {
    give_back(large_mib << 20, large_mib, 2, whole);
    give_back(large_mib << 20, 16, 8, between);
  }
  std::printf("},\n \"give_back\": {\"held_mib\": %lld, \"rounds\": %d,\n  ",
              static_cast<long long>(large_mib), pairs);
  print("run_us_per_mib", spread(whole.back_us), 1);
  std::printf(",\n  ");
  print("run_again_us_per_mib", spread(whole.again_us), 1);
  std::printf(",\n  ");
  print("between_us_per_mib", spread(between.back_us), 1);
  std::printf(",\n  ");
  print("between_again_us_per_mib", spread(between.again_us), 1);
  std::printf(",\n  ");
  print("idle_ns", idle_call(), 1);
  std::printf("}}\n");
} catch (const std::exception& e) {
  std::fprintf(stderr, "pool_bench: %s\n", e.what());
  return 1;
}
