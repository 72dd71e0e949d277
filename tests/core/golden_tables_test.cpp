// The seed's parsing and sizing functions on recorded arguments (tests/data/golden/tables.txt): ours give
// the same, but for the listed deviations, each of which must occur. A table that nobody knows fails.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/golden_data.h"
#include "core/golden_deviations.h"
#include "core/golden_seen.h"
#include "pagedkv/base/quantize.h"
#include "pagedkv/core/kv_quant.h"
#include "pagedkv/core/page_pool.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv::testing {
namespace {

// Tables of things that are not in C++.
struct NotInCpp {
  std::string_view table, reason;
};
constexpr NotInCpp kNotInCpp[] = {
    {"configure_attention_kv_cache", "puts caches into a model's list: the Python package's"},
    {"dynamic_paged_kv_reservation", "what a server reserves for a request: the server's"},
    {"env_bool", "a stricter switch that other parts of the seed use"},
    {"gqa_route", "a route: our kernels serve grouped queries of every length"},
    {"kv_quant_decode_route", "a route: our kernels read quantised pages always"},
    {"kv_quant_kernel_q_len", "a limit of a route: our kernels take any number of queries"},
    {"kv_quant_kernel_switch", "a switch between routes"},
    {"kv_quant_q4_kernel_switch", "a switch between routes"},
    {"kv_quant_working_copy_peak_rows", "there is no working copy"},
    {"packed_quant_q_len", "a limit of a route"},
    {"paged_attention_flag", "the installer's master switch; whoever makes our cache has it"},
    {"partition_threshold", "a route: our attention is partitioned always, with the same bits"},
    {"partitioned_attention_flag", "a switch between routes"},
    {"safe_2pass_q_len", "a limit of a route"},
};

int bits_of(PagedKVQuantMode mode) {
  return mode == PagedKVQuantMode::kQ4 ? 4 : mode == PagedKVQuantMode::kQ6 ? 6 : 8;
}

Words number_out(int64_t value) { return {{"out", word(value)}}; }
Words text_out(std::string_view text) { return {{"out", quote(text)}}; }

// Python's str() of the value: its words are all that C++ takes.
std::string value_text(const GoldenLine& line) {
  const std::string& value = line.fields().at("in.value");
  if (value.front() == '"') return line.text("in.value");
  return value == "true" ? "True" : value == "false" ? "False" : value;
}

// The number behind "request_tokens=" and the like in a table's name.
std::optional<int64_t> argument(const std::string& table, const std::string& name) {
  const size_t at = table.find(name + "=");
  if (at == std::string::npos) return std::nullopt;
  return std::stoll(table.substr(at + name.size() + 1));
}

Words quant_config(const GoldenLine& line) {
  const PagedKVQuantConfig config(line.text("in.mode"));
  return {{"out.normalized_mode", quote(config.mode())},
          {"out.bits", word(bits_of(config.keys()))}};
}

Words config_from_env(const GoldenLine&) {
  const auto quant = PagedKVCacheOptions::from_environment().quant;
  if (!quant || !quant->enabled()) return {{"out", "null"}};
  return {{"out.mode", quote(quant->mode())},
          {"out.normalized_mode", quote(quant->mode())},
          {"out.bits", word(bits_of(quant->keys()))}};
}

Words quantization_env(const GoldenLine& line) {
  const std::string mode = line.is_null("in.mode") ? "" : line.text("in.mode");
  const std::string name = quote(quant_mode_name(parse_quant_mode(mode)));
  return {{"out.MTPLX_VLLM_METAL_PAGED_KV_QUANT", name}, {"out.MTPLX_PAGED_KV_QUANT", name}};
}

// A cache of 4 blocks of 16 is given 65 tokens.
Words growth_flag(const GoldenLine&) {
  PagedKVCacheOptions given;
  given.block_size = 16;
  given.num_blocks = 4;
  PagedKVCache cache(PagedKVCacheOptions::from_environment(given));
  const Tensor rows(DType::kF32, 1, 65, 2);
  try {
    cache.update(rows, rows);
  } catch (const CapacityError&) {
    return {{"out", "null"}};
  }
  return number_out(cache.capacity() / 16);
}

Words num_blocks(const GoldenLine& line) {
  const PagedKVCacheOptions options = PagedKVCacheOptions::from_environment();
  const std::optional<int64_t> tokens = argument(line.text("table"), "request_tokens");
  if (!tokens) return number_out(options.num_blocks.value_or(1024));
  InitialSize size;
  size.tokens = *tokens;
  return number_out(options.dynamic.value_or(false) ? initial_num_blocks(size.with_environment())
                                                    : size.configured);
}

Words grown_blocks(const GoldenLine& line) {
  const bool fixed = line.text("table") == "paged_grown_blocks(10, 161, 16)";
  const int64_t current = fixed ? 10 : line.integer("in.current_blocks"),
                tokens = fixed ? 161 : line.integer("in.required_tokens"),
                block_size = std::max<int64_t>(1, fixed ? 16 : line.integer("in.block_size"));
  const int64_t window = PagedKVCacheOptions::from_environment().context_window.value_or(0);
  return number_out(grown_pages(current, (tokens + block_size - 1) / block_size,
                                (window + block_size - 1) / block_size));
}

// A live cache first grows for the prompt, then, where it is installed again, to the size that the
// reservation asks for.
Words lease_capacity(const GoldenLine& line) {
  const bool grows = PagedKVCacheOptions::from_environment().dynamic.value_or(false);
  InitialSize size;
  size.configured = PagedKVCacheOptions::from_environment().num_blocks.value_or(1024);
  size.tokens = line.integer("in.reserved_tokens");
  PagedKVCacheOptions given;
  given.block_size = 16;
  given.num_blocks = static_cast<int32_t>(line.integer("in.capacity") / 16);
  given.dynamic = true;
  PagedKVCache cache(PagedKVCacheOptions::from_environment(given));
  cache.grow_to_capacity(line.integer("in.prompt_tokens"));
  if (line.flag("in.repages") && grows)
    cache.grow_to_capacity(initial_num_blocks(size.with_environment()) * 16);
  return number_out(cache.capacity());
}

Words sliding_window(const GoldenLine& line) {
  const int64_t otherwise = argument(line.text("table"), "requested").value_or(-1);
  return number_out(
      PagedKVCacheOptions::from_environment().sliding_window.value_or(static_cast<int>(otherwise)));
}

Words normalize(const GoldenLine& line) {
  return text_out(quant_mode_name(parse_quant_mode(value_text(line))));
}

Words mode_from_env(const GoldenLine&) {
  return text_out(quant_mode_name(paged_kv_quant_mode_from_env()));
}

Words packed(const GoldenLine& line) {
  return number_out(packed_dim(static_cast<int>(line.integer("in.head_dim")),
                               static_cast<int>(line.integer("in.bits"))));
}

Words ratio(const GoldenLine& line) {
  const double value = compression_ratio(static_cast<int>(line.integer("in.head_dim")),
                                         static_cast<int>(line.integer("in.bits")));
  // The same double is written the same way.
  return {{"out", value == line.number("out") ? line.fields().at("out") : std::to_string(value)}};
}

const std::map<std::string, std::function<Words(const GoldenLine&)>> kTables = {
    {"PagedKVQuantConfig", quant_config},
    {"compression_ratio", ratio},
    {"config_from_env", config_from_env},
    {"dynamic_growth_flag", growth_flag},
    {"dynamic_paged_num_blocks", num_blocks},
    {"effective_sliding_window", sliding_window},
    {"normalize_paged_kv_quantization", normalize},
    {"packed_dim", packed},
    {"paged_grown_blocks", grown_blocks},
    {"paged_kv_quant_mode_from_env", mode_from_env},
    {"paged_kv_quantization_env", quantization_env},
    {"paged_lease_capacity_after", lease_capacity},
    {"stats_sliding_window", sliding_window},
};

std::string deviation(const GoldenLine& line, const std::string& table, const Words& ours) {
  const auto is = [&](const std::string& field, const std::string& text) {
    return line.has(field) && line.fields().at(field) == quote(text);
  };
  const auto env = [&](const std::string& name) {
    const std::string field = "env." + name;
    if (!line.has(field) || line.is_null(field)) return std::optional<std::string>();
    return std::optional<std::string>(line.text(field));
  };
  const auto blank = [](const std::optional<std::string>& text) {
    return text && text->find_first_not_of(' ') == std::string::npos;
  };
  const bool failed = ours.contains("error");
  if (line.has("in.bits") && line.integer("in.bits") == 6 && !failed) return "q6";
  if (is("in.value", "q6") || is("in.value", "6")) return failed ? "" : "q6";
  if (table == "PagedKVQuantConfig" && is("in.mode", "uint8")) return "uint8";
  if (table == "normalize_paged_kv_quantization" && line.is_null("in.value")) return "no value";
  if (blank(env("MTPLX_VLLM_METAL_PAGED_KV_QUANT"))) return "blank variable";
  if (blank(env("MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW"))) return failed ? "" : "blank variable";
  const auto window = env("MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW");
  if (window == "-3" && ours.at("out") == "0") return "negative window";
  const auto growth = env("MTPLX_DYNAMIC_PAGED_KV");
  if (table == "dynamic_growth_flag" && (!growth || blank(growth)) && ours.at("out") == "6")
    return "growth by default";
  return "";
}

TEST(GoldenTables, EqualButForListedDeviations) {
  const GoldenFile file("tables");
  Deviations deviations(Deviation::kTables);
  std::map<std::string, int> compared, left_out;
  int cases = 0;
  for (const GoldenLine& line : file.lines()) {
    SCOPED_TRACE(line.place() + " " + line.text("id"));
    ++cases;
    const std::string table = line.text("table").substr(0, line.text("table").find('('));
    const auto known = kTables.find(table);
    if (known == kTables.end()) {
      ++left_out[table];
      continue;
    }
    ++compared[table];
    GoldenEnvironment environment;
    environment.set_all(line);
    Words ours;
    std::string text;
    try {
      ours = known->second(line);
    } catch (const std::invalid_argument& e) {
      ours["error"] = quote("ValueError");
      text = e.what();
    }
    Words seed;
    for (const auto& [field, value] : line.fields())
      if (field == "out" || field.starts_with("out.")) seed[field] = value;
    if (line.has("error.type")) seed["error"] = line.fields().at("error.type");
    if (seed == ours) continue;
    const std::string name = deviation(line, table, ours);
    if (!name.empty()) {
      deviations.met(name);
      continue;
    }
    ADD_FAILURE() << "ours " << ::testing::PrintToString(ours) << ' ' << text << ", the seed's "
                  << ::testing::PrintToString(seed);
  }
  int sum = 0;
  for (const auto& [table, count] : compared) {
    std::cout << "  " << count << " cases of " << table << '\n';
    sum += count;
  }
  std::cout << sum << " of " << cases << " cases compared; deviations:\n";
  deviations.print();
  std::cout << "not in C++:\n";
  for (const NotInCpp& each : kNotInCpp) {
    const int count = left_out[std::string(each.table)];
    std::cout << "  " << count << " of " << each.table << ": " << each.reason << '\n';
    EXPECT_GT(count, 0) << each.table;
  }
  EXPECT_EQ(cases, 638);
  EXPECT_EQ(compared.size(), kTables.size());
  EXPECT_EQ(deviations.unused(), std::vector<std::string>());
  EXPECT_EQ(left_out.size(), std::size(kNotInCpp)) << ::testing::PrintToString(left_out);
}

}  // namespace
}  // namespace pagedkv::testing
