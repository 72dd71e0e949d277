#include "core/golden_seen.h"

#include <algorithm>
#include <cctype>
#include <regex>
#include <utility>

#include "core/golden_data.h"

namespace pagedkv::testing {
namespace {

std::string_view stored_dtype(PageFormat format) {
  const std::string_view name = page_format_name(format);
  if (name == "f32") return "float32";
  if (name == "f16") return "float16";
  if (name == "bf16") return "bfloat16";
  return name == "q8" ? "int8" : "uint8";
}

// The first `offset` rows [row, head, packed], and where the format has them their scales.
void add_pages(const PageArray& pages, const std::string& name, const PagedKVCache& cache,
               int num_kv_heads, Words& words) {
  const auto add = [&](const std::string& cache_name, const std::byte* data, int64_t bytes,
                       std::string_view dtype, int64_t width) {
    std::vector<std::byte> rows;
    for (int64_t t = 0; t < cache.offset(); ++t) {
      const PageId page = cache.block_table()[static_cast<size_t>(t / cache.block_size())];
      const std::byte* row =
          data + (int64_t{page} * cache.block_size() + t % cache.block_size()) * bytes;
      rows.insert(rows.end(), row, row + bytes);
    }
    words["pages." + cache_name + ".shape"] = shape_word(
        {cache.capacity() / cache.block_size(), cache.block_size(), num_kv_heads, width});
    words["pages." + cache_name + ".dtype"] = quote(dtype);
    words["pages." + cache_name + ".rows_sha256"] = quote(sha256(rows));
  };
  const int64_t row = row_bytes(pages.format, pages.head_dim);
  const int64_t width = has_scales(pages.format) ? row : pages.head_dim;
  add(name + "_cache", pages.data, row * num_kv_heads, stored_dtype(pages.format), width);
  if (has_scales(pages.format))
    add(name + "_scale_cache", reinterpret_cast<const std::byte*>(pages.scales),
        int64_t{4} * num_kv_heads, "float32", 1);
}

int64_t attention_calls(const PagedKVCacheStats& stats) {
  int64_t calls = 0;
  for (const auto& set : stats.attention_calls)
    for (const int64_t n : set.by_phase) calls += n;
  return calls;
}

bool has_pages(const PagedKVCache& cache) { return cache.layer_pages().keys.data != nullptr; }

}  // namespace

std::string word(int64_t value) { return std::to_string(value); }
std::string flag_word(bool value) { return value ? "true" : "false"; }

std::string list_word(std::span<const std::string> words) {
  std::string text(1, '[');
  for (const std::string& each : words) {
    if (text.size() > 1) text += ',';
    text += each;
  }
  text += ']';
  return text;
}

std::string shape_word(std::initializer_list<int64_t> shape) {
  std::vector<std::string> words;
  for (const int64_t n : shape) words.push_back(std::to_string(n));
  return list_word(words);
}

std::string meta_word(const std::array<std::string, 3>& meta) {
  return list_word(std::array{quote(meta[0]), quote(meta[1]), quote(meta[2])});
}

std::string hash_word(std::span<const std::byte> bytes, std::string_view dtype,
                      std::initializer_list<int64_t> shape) {
  std::string text(1, '#');
  return text.append(sha256(bytes)).append(":").append(dtype).append(shape_word(shape));
}

std::string tensor_word(const Tensor& t) {
  if (t.empty()) return "null";
  return hash_word(t.bytes, dtype_name(t.dtype), {1, t.num_heads, t.num_tokens, t.head_dim});
}

Words seen_sizes(const PagedKVCache& cache, const std::optional<int>& sliding_window) {
  const PagedKVCacheStats stats = cache.stats();
  Words words = {
      {"offset", word(cache.offset())},
      {"size", word(cache.offset())},
      {"capacity", word(cache.capacity())},
      {"num_blocks", word(stats.num_blocks)},
      {"block_size", word(cache.block_size())},
      {"allocated_blocks", has_pages(cache) ? word(stats.num_blocks) : "null"},
      {"nbytes", word(cache.size_bytes())},
      {"empty", flag_word(cache.empty())},
      {"meta_state", meta_word(cache.meta_state())},
      {"stats.mode", quote(cache.quant().enabled() ? "vllm_metal_paged_kv_" + cache.quant().mode()
                                                   : "vllm_metal_paged")},
      {"stats.block_size", word(stats.block_size)},
      {"stats.num_blocks", word(stats.num_blocks)},
      {"stats.capacity", word(stats.capacity)}};
  // The seed's statistics leave out what is 0.
  const auto add = [&](const std::string& name, int64_t value) {
    if (value != 0) words["stats." + name] = word(value);
  };
  const int64_t attended = attention_calls(stats);
  add("sliding_window", sliding_window.value_or(-1));
  add("offset", stats.offset);
  add("bytes", stats.bytes_committed);
  add("updates", stats.updates);
  add("grow_events", stats.grow_events);
  add("active_array_calls", stats.reads);
  add("kv_quant_dequant_calls", stats.dequant_reads);
  add("kv_quant_dequant_tokens", stats.dequant_tokens);
  add("paged_attention_calls", attended);
  add("kv_quant", cache.quant().enabled() ? 1 : 0);
  add("kv_quant_attention_calls", cache.quant().enabled() ? attended : 0);
  if (cache.quant().enabled()) words["stats.kv_quant_mode"] = quote(cache.quant().mode());
  return words;
}

Words seen(const PagedKVCache& cache, const std::optional<int>& sliding_window) {
  Words words = seen_sizes(cache, sliding_window);
  if (cache.empty()) return words;
  const Tensor keys = cache.keys(), values = cache.values();
  for (const auto& [name, tensor] : {std::pair{"k", &keys}, std::pair{"v", &values}}) {
    const std::string suffix = std::string("_") + name;
    words["content.shape" + suffix] =
        shape_word({1, tensor->num_heads, tensor->num_tokens, tensor->head_dim});
    words["content.dtype" + suffix] = quote(dtype_name(tensor->dtype));
    words["content.sha256" + suffix] = quote(sha256(tensor->bytes));
  }
  const LayerPages pages = cache.layer_pages();
  add_pages(pages.keys, "key", cache, pages.num_kv_heads, words);
  add_pages(pages.values, "value", cache, pages.num_kv_heads, words);
  return words;
}

std::vector<std::string> named_words(const std::string& text) {
  const auto words = [](const std::string& from) {
    static const std::regex kWord("(b?float)?[0-9]+");
    std::vector<std::string> found;
    for (std::sregex_iterator it(from.begin(), from.end(), kWord), end; it != end; ++it) {
      const auto at = static_cast<size_t>(it->position());
      const bool inside = at > 0 && std::isalpha(static_cast<unsigned char>(from[at - 1]));
      if (!inside) found.push_back(it->str());
    }
    return found;
  };
  const size_t had = text.find(": had "), got = text.find(", got ");
  if (had == std::string::npos || got == std::string::npos) return words(text);
  const std::vector<std::string> a = words(text.substr(had, got - had)),
                                 b = words(text.substr(got));
  std::vector<std::string> different;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (a[i] != b[i]) different.insert(different.end(), {a[i], b[i]});
  return different;
}

bool has_word(const std::string& text, const std::string& word) {
  const auto part_of_word = [&](size_t at) {
    return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at]));
  };
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1))
    if ((at == 0 || !part_of_word(at - 1)) && !part_of_word(at + word.size())) return true;
  return false;
}

}  // namespace pagedkv::testing
