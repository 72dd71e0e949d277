#include "apps/bench_attention.h"

#include <stdexcept>

#include "apps/attention_problem.h"

namespace pagedkv::apps {
namespace {

using nlohmann::ordered_json;

AttentionCase as_case(const AttentionBench& o) {
  const auto heads = parse_heads(o.heads);
  if (!heads)
    throw std::invalid_argument("--heads " + o.heads +
                                ": write query/kv heads, query a multiple of kv, as in 32/8");
  check_head_dim(o.key_format, o.head_dim);
  check_head_dim(o.value_format, o.head_dim);
  if (o.new_tokens > o.context)
    throw std::invalid_argument("--new-tokens " + std::to_string(o.new_tokens) + ": --context " +
                                std::to_string(o.context) + " counts them");
  AttentionCase c;
  c.key_format = o.key_format;
  c.value_format = o.value_format;
  c.heads = *heads;
  c.key_dim = c.value_dim = o.head_dim;
  c.page_size = o.page_size;
  c.shared = o.shared_tokens;
  c.sequences.assign(o.num_seqs, {o.context, o.new_tokens});
  return c;
}

std::string case_name(const AttentionBench& o) {
  const std::string k(page_format_name(o.key_format)), v(page_format_name(o.value_format));
  std::string name = o.heads;
  name.append(" x ").append(std::to_string(o.head_dim)).append(" ").append(k);
  if (v != k) name.append("/").append(v);
  name.append(", ").append(std::to_string(o.new_tokens)).append(" of ");
  name.append(std::to_string(o.context));
  if (o.num_seqs > 1) name.append(" x ").append(std::to_string(o.num_seqs));
  if (o.shared_tokens > 0)
    name.append(", ").append(std::to_string(o.shared_tokens)).append(" shared");
  return name;
}

ordered_json result(const AttentionBench& o, const AttentionProblem& problem,
                    const std::vector<double>& ms) {
  const double typical = median(ms), flops = problem.spec().flops();
  return {{"case", case_name(o)},
          {"kernel_set", kernels().name},
          {"threads", o.num_threads},
          {"ms", typical},
          {"gb_s", 1e-6 * static_cast<double>(problem.bytes()) / typical},
          {"gflop_s", 1e-6 * flops / typical},
          {"bytes", problem.bytes()},
          {"flops", static_cast<int64_t>(flops)},
          {"block_size", o.page_size},
          {"checked", true},
          {"samples_ms", ms}};
}

ordered_json bench_sharing(const AttentionBench& o) {
  SharingProblem problem(as_case(o), o.num_threads);
  problem.check(kernels());
  const auto [copied, shared] = problem.time(kernels(), o.repetitions);
  ordered_json r = result(o, problem.shared(), shared.ms);
  r["copied_ms"] = median(copied.ms);
  r["speedup"] = median(ratios(copied.ms, shared.ms));
  r["copied_samples_ms"] = copied.ms;
  return r;
}

}  // namespace

ordered_json bench_attention(const AttentionBench& o) {
  const KernelSet& set = kernels();  // a bad PAGEDKV_KERNELS is told before anything else
  if (o.shared_tokens > 0) return bench_sharing(o);
  AttentionProblem problem(as_case(o), o.num_threads);
  problem.check(set);
  return result(o, problem, problem.time(set, o.repetitions).ms);
}

}  // namespace pagedkv::apps
