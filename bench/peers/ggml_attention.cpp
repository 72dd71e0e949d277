// Times ggml's flash attention on the CPU over contiguous K and V: what attention_bench's cases cost there. Takes the
// same words and prints one JSON object. bench/peers/build.sh builds it; bench/attention/vs_ggml.py runs it.
//   ggml_attention WORDS [THREADS = 1] [RUNS = 15]
// q8 and q4 become q8_0 and q4_0, which have one scale for 32 elements. All sequences must have the same lengths.
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "apps/attention_case.h"
#include "apps/measure.h"

namespace {

using pagedkv::PageFormat;
using pagedkv::apps::AttentionCase;
using pagedkv::apps::CallTimes;
using pagedkv::apps::median;
using pagedkv::apps::time_calls;

ggml_type as_ggml_type(PageFormat format) {
  switch (format) {
    case PageFormat::kF32:
      return GGML_TYPE_F32;
    case PageFormat::kF16:
      return GGML_TYPE_F16;
    case PageFormat::kBF16:
      return GGML_TYPE_BF16;
    case PageFormat::kQ8:
      return GGML_TYPE_Q8_0;
    case PageFormat::kQ4:
      return GGML_TYPE_Q4_0;
    case PageFormat::kQ6:
      break;
  }
  throw std::invalid_argument("ggml has no format like " + std::string(page_format_name(format)));
}

struct FreeContext {
  void operator()(ggml_context* c) const { ggml_free(c); }
};

class Problem {
 public:
  Problem(const AttentionCase& c, int threads) {
    const auto [held, fresh] = c.sequences[0];
    for (const auto& s : c.sequences)
      if (s.seq_len != held || s.query_len != fresh)
        throw std::invalid_argument("sequences of different lengths: not timed here");
    if (c.window || c.softcap != 0 || c.sinks || c.shared > 0)
      throw std::invalid_argument("window, softcap, sinks and shared are not timed here");
    const auto num_seqs = static_cast<int64_t>(c.sequences.size());
    const ggml_type key_type = as_ggml_type(c.key_format);
    const ggml_type value_type = as_ggml_type(c.value_format);
    const int64_t rows = int64_t{held} * c.heads.kv * num_seqs;
    const int64_t query_rows = int64_t{fresh} * c.heads.query * num_seqs;
    const int64_t bytes =
        rows * (row_size(key_type, c.key_dim) + row_size(value_type, c.value_dim)) +
        query_rows * (c.key_dim + c.value_dim) * 4 + int64_t{held} * fresh * 2;
    context_.reset(ggml_init({static_cast<size_t>(bytes) + (1 << 20), nullptr, false}));
    if (!context_) throw std::runtime_error("ggml_init failed");
    ggml_context* g = context_.get();
    auto* queries = ggml_new_tensor_4d(g, GGML_TYPE_F32, c.key_dim, fresh, c.heads.query, num_seqs);
    auto* k = ggml_new_tensor_4d(g, key_type, c.key_dim, held, c.heads.kv, num_seqs);
    auto* v = ggml_new_tensor_4d(g, value_type, c.value_dim, held, c.heads.kv, num_seqs);
    auto* mask = ggml_new_tensor_2d(g, GGML_TYPE_F16, held, fresh);
    fill(queries, 7);
    fill(k, 1);
    fill(v, 2);
    auto* hidden = static_cast<ggml_fp16_t*>(mask->data);
    for (int row = 0; row < fresh; ++row)
      for (int t = 0; t < held; ++t)
        *hidden++ = ggml_fp32_to_fp16(t <= held - fresh + row ? 0.0f : -INFINITY);
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.key_dim));
    graph_ = ggml_new_graph(g);
    ggml_build_forward_expand(graph_, ggml_flash_attn_ext(g, queries, k, v, mask, scale, 0, 0));
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    threads_.reset(ggml_threadpool_new(&params));
    plan_ = ggml_graph_plan(graph_, threads, threads_.get());
    work_.resize(plan_.work_size);
    plan_.work_data = work_.data();
  }

  void run() {
    if (ggml_graph_compute(graph_, &plan_) != GGML_STATUS_SUCCESS)
      throw std::runtime_error("ggml_graph_compute failed");
  }

 private:
  struct FreeThreads {
    void operator()(ggml_threadpool* t) const { ggml_threadpool_free(t); }
  };

  static int64_t row_size(ggml_type type, int dim) {
    if (dim % ggml_blck_size(type) != 0)
      throw std::invalid_argument(std::string(ggml_type_name(type)) + " has no rows of " +
                                  std::to_string(dim));
    return static_cast<int64_t>(ggml_row_size(type, dim));
  }

  static void fill(ggml_tensor* t, uint32_t seed) {
    const int64_t rows = ggml_nrows(t);
    std::vector<float> x(rows * t->ne[0]);
    pagedkv::apps::fill(x, seed);
    if (t->type == GGML_TYPE_F32)
      std::copy(x.begin(), x.end(), static_cast<float*>(t->data));
    else
      ggml_quantize_chunk(t->type, x.data(), t->data, 0, rows, t->ne[0], nullptr);
  }

  std::unique_ptr<ggml_context, FreeContext> context_;
  std::unique_ptr<ggml_threadpool, FreeThreads> threads_;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_{};
  std::vector<uint8_t> work_;
};

int time_case(const std::string& words, int threads, int runs) {
  if (threads < 1 || runs < 1) throw std::invalid_argument("THREADS and RUNS: at least 1");
  const AttentionCase c = AttentionCase::parse(words);
  ggml_cpu_init();
  Problem problem(c, threads);
  const CallTimes times = time_calls(runs, [&] { problem.run(); });
  const double ms = median(times.ms);
  nlohmann::ordered_json line{{"case", words},
                              {"key_type", ggml_type_name(as_ggml_type(c.key_format))},
                              {"value_type", ggml_type_name(as_ggml_type(c.value_format))},
                              {"threads", threads},
                              {"ms", ms}};
  if (threads == 1) line["cpu_ms"] = median(times.cpu_ms);
  line["gflop_s"] = 1e-6 * c.flops() / ms;
  line["samples_ms"] = times.ms;
  std::cout << line.dump() << std::endl;
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2 || argc > 4) throw std::invalid_argument("WORDS [THREADS] [RUNS]");
  return time_case(argv[1], argc > 2 ? std::atoi(argv[2]) : 1, argc > 3 ? std::atoi(argv[3]) : 15);
} catch (const std::exception& error) {
  std::fprintf(stderr, "ggml_attention: %s\n", error.what());
  return 1;
}
