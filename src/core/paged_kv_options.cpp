#include <algorithm>
#include <limits>

#include "base/quant_words.h"
#include "base/units.h"
#include "core/environment.h"
#include "pagedkv/base/log.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv {
namespace {

using std::invalid_argument;

int64_t integer(const std::string& text, int64_t least, int64_t most) {
  const auto value = parse_integer(text);
  if (!value) throw invalid_argument("must be a whole number");
  if (*value < least || *value > most)
    throw invalid_argument("must be in " + std::to_string(least) + ".." + std::to_string(most));
  return *value;
}

std::optional<int64_t> integer_variable(const char* name, int64_t least, int64_t most) {
  const auto value = environment_value(name);
  if (!value) return std::nullopt;
  return read_variable(name, *value, [&](const std::string& v) { return integer(v, least, most); });
}

// As the seed reads it: what is no number is the default.
int64_t lenient_integer(const char* name, int64_t otherwise) {
  const auto text = environment_value(name);
  if (!text) return otherwise;
  if (const auto value = parse_integer(*text)) return *value;
  warn_once(name, std::string(name) + "=" + *text + " is no number: taken as " +
                      std::to_string(otherwise));
  return otherwise;
}

bool is_one_of(const std::string& word, std::initializer_list<const char*> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Ours: a word that is neither on nor off is an error.
bool parse_switch(const std::string& text) {
  const std::string word = trimmed_lower(text);
  if (is_one_of(word, {"1", "true", "yes", "on"})) return true;
  if (is_one_of(word, {"0", "false", "no", "off"})) return false;
  throw invalid_argument("must be on or off");
}

// The seed's: whatever is not on is off.
bool lenient_switch(const char* name, const std::string& text) {
  const std::string word = trimmed_lower(text);
  if (is_one_of(word, {"1", "true", "yes", "on"})) return true;
  if (!is_one_of(word, {"0", "false", "no", "off"}))
    warn_once(name, std::string(name) + "=" + text + ": not one of 1, true, yes, on; taken as off");
  return false;
}

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kMostInt = std::numeric_limits<int32_t>::max();

void read_geometry(PagedKVCacheOptions& o) {
  for (const char* name : {"PAGEDKV_BLOCK_SIZE", "MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE"})
    if (!o.block_size)
      if (const auto value = integer_variable(name, 1, 256))
        o.block_size = static_cast<int>(*value);
  if (!o.dynamic)
    if (const auto value = environment_value("PAGEDKV_DYNAMIC"))
      o.dynamic = read_variable("PAGEDKV_DYNAMIC", *value, parse_switch);
  if (!o.dynamic)
    if (const auto value = environment_value("MTPLX_DYNAMIC_PAGED_KV"))
      o.dynamic = lenient_switch("MTPLX_DYNAMIC_PAGED_KV", *value);
  for (const char* name : {"PAGEDKV_NUM_BLOCKS", "MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS"})
    if (!o.num_blocks)
      if (const auto value = integer_variable(name, 1, kMostInt))
        o.num_blocks = static_cast<int32_t>(*value);
}

// The seed's companions of the growth switch; they have nothing to say where it was not turned on.
void read_initial_size(PagedKVCacheOptions& o) {
  if (!o.dynamic.value_or(false)) return;
  InitialSize size;
  size.configured = o.num_blocks.value_or(static_cast<int32_t>(size.configured));
  size.block_size = o.block_size.value_or(size.block_size);
  const int64_t blocks = initial_num_blocks(size.with_environment());
  if (blocks > size.configured) o.num_blocks = static_cast<int32_t>(std::min(blocks, kMostInt));
}

// A word for K or V: quantised or off; or a dtype that is stored as it is.
void take_format(const char* name, const std::string& word, PagedKVQuantMode& mode,
                 std::optional<DType>& dtype) {
  read_variable(name, word, [&](const std::string& w) {
    if (quant_word(normalized_word(w)) != QuantWord::kUnknown) {
      mode = parse_quant_mode(w);
      return;
    }
    mode = PagedKVQuantMode::kOff;
    switch (parse_page_format(w)) {
      case PageFormat::kF32:
        dtype = DType::kF32;
        break;
      case PageFormat::kBF16:
        dtype = DType::kBF16;
        break;
      default:
        dtype = DType::kF16;
    }
  });
}

// For each of K and V: its own variable, else the one for both, else the seed's pair.
void read_formats(PagedKVCacheOptions& o) {
  const auto both = environment_value("PAGEDKV_KV_CACHE_DTYPE");
  bool any = environment_value("MTPLX_VLLM_METAL_PAGED_KV_QUANT") ||
             environment_value("MTPLX_PAGED_KV_QUANT");
  PagedKVQuantMode modes[2] = {};
  std::optional<DType> dtypes[2];
  if (any) modes[0] = modes[1] = paged_kv_quant_mode_from_env();
  for (int i = 0; i < 2; ++i) {
    const char* const own = i == 0 ? "PAGEDKV_CACHE_TYPE_K" : "PAGEDKV_CACHE_TYPE_V";
    const auto value = environment_value(own);
    if (!value && !both) continue;
    any = true;
    take_format(value ? own : "PAGEDKV_KV_CACHE_DTYPE", value ? *value : *both, modes[i],
                dtypes[i]);
  }
  if (!any) return;
  if (dtypes[0] && dtypes[1] && dtypes[0] != dtypes[1])
    throw invalid_argument(
        "PAGEDKV_CACHE_TYPE_K and _V: keys and values that are not quantised "
        "have one dtype in a cache");
  o.quant = PagedKVQuantConfig(modes[0], modes[1]);
  if (!o.dtype) o.dtype = dtypes[0] ? dtypes[0] : dtypes[1];
}

}  // namespace

InitialSize InitialSize::with_environment() const {
  InitialSize s = *this;
  if (const auto text = environment_value("MTPLX_DYNAMIC_PAGED_KV_MIN_BLOCKS"))
    s.min_blocks = lenient_integer("MTPLX_DYNAMIC_PAGED_KV_MIN_BLOCKS", configured);
  s.tokens = std::max(tokens, lenient_integer("MTPLX_DYNAMIC_PAGED_KV_TOKENS", 0));
  s.previous_high_water =
      lenient_integer("MTPLX_DYNAMIC_PAGED_KV_PREVIOUS_HIGH_WATER", previous_high_water);
  s.margin = lenient_integer("MTPLX_DYNAMIC_PAGED_KV_MARGIN", margin);
  return s;
}

int64_t initial_num_blocks(const InitialSize& size) noexcept {
  constexpr int64_t kLimit = int64_t{1} << 60;  // keeps the sums below in range
  const int64_t block_size = std::max(1, size.block_size);
  const int64_t floor = std::max(size.configured, size.min_blocks.value_or(size.configured));
  const int64_t margin = std::clamp<int64_t>(size.margin, 0, kLimit);
  const int64_t tokens = std::clamp<int64_t>(size.tokens, 0, kLimit);
  const int64_t high_water = std::clamp<int64_t>(size.previous_high_water, 0, kLimit);
  const int64_t need = std::max(tokens, (3 * high_water + 1) / 2);
  if (need == 0) return floor;
  return std::max(floor, (need + margin + block_size - 1) / block_size);
}

PagedKVCacheOptions PagedKVCacheOptions::from_environment() {
  return from_environment(PagedKVCacheOptions());
}

PagedKVCacheOptions PagedKVCacheOptions::from_environment(PagedKVCacheOptions given) {
  PagedKVCacheOptions o = std::move(given);
  read_geometry(o);
  read_initial_size(o);
  if (!o.quant) read_formats(o);
  if (!o.context_window)
    if (const auto value = environment_value("PAGEDKV_CTX_SIZE"); value && *value != "-1")
      o.context_window = integer_variable("PAGEDKV_CTX_SIZE", 1, kMost);  // -1: the model's
  if (!o.context_window && environment_value("MTPLX_CONTEXT_WINDOW_TOKENS"))
    o.context_window = std::max<int64_t>(0, lenient_integer("MTPLX_CONTEXT_WINDOW_TOKENS", 0));
  for (const char* name : {"PAGEDKV_SLIDING_WINDOW", "MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW"})
    if (!o.sliding_window)
      if (const auto value = integer_variable(name, -kMostInt, kMostInt))
        o.sliding_window = static_cast<int>(std::max<int64_t>(0, *value));
  if (!o.max_bytes)
    if (const auto value = environment_value("PAGEDKV_KV_CACHE_MEMORY_BYTES"))
      o.max_bytes = read_variable("PAGEDKV_KV_CACHE_MEMORY_BYTES", *value, parse_bytes);
  return o;
}

}  // namespace pagedkv
