// The counters as JSON text, written by hand: the library has no JSON dependency.
#include <charconv>
#include <string_view>

#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv {
namespace {

class JsonObject {
 public:
  void add(std::string_view key, std::string_view text) { begin(key).append(quoted(text)); }
  void add(std::string_view key, int64_t value) { begin(key).append(std::to_string(value)); }
  void add(std::string_view key, double value) {  // the shortest decimal that reads back the same
    char text[32];
    begin(key).append(text, std::to_chars(text, text + sizeof text, value).ptr);
  }
  void add_object(std::string_view key, const JsonObject& object) {
    begin(key).append(object.text());
  }
  std::string text() const { return "{" + members_ + "}"; }

 private:
  std::string& begin(std::string_view key) {
    if (!members_.empty()) members_ += ",";
    members_ += quoted(key);
    return members_ += ":";
  }
  static std::string quoted(std::string_view text) {
    std::string out = "\"";
    for (char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      out += c;  // our names hold no control characters
    }
    return out += '"';
  }
  std::string members_;
};

}  // namespace

std::string to_json(const PagedKVCacheStats& s) {
  JsonObject json, calls, fallbacks;
  for (const auto& entry : s.attention_calls) {
    JsonObject phases;
    phases.add("prefill", entry.by_phase[static_cast<size_t>(AttentionPhase::kPrefill)]);
    phases.add("decode", entry.by_phase[static_cast<size_t>(AttentionPhase::kDecode)]);
    calls.add_object(entry.kernel_set, phases);
  }
  for (const auto& fallback : s.fallbacks) fallbacks.add(fallback.reason, fallback.calls);
  json.add("key_format", s.key_format);
  json.add("value_format", s.value_format);
  json.add("kernel_set", s.kernel_set);
  json.add("num_layers", int64_t{s.num_layers});
  json.add("block_size", int64_t{s.block_size});
  json.add("num_blocks", s.num_blocks);
  json.add("capacity", s.capacity);
  json.add("offset", s.offset);
  json.add("updates", s.updates);
  json.add("allocation_events", s.allocation_events);
  json.add("grow_events", s.grow_events);
  json.add("shrink_events", s.shrink_events);
  json.add("reads", s.reads);
  json.add("dequant_reads", s.dequant_reads);
  json.add("dequant_tokens", s.dequant_tokens);
  json.add("pages_in_use", s.pages_in_use);
  json.add("pages_peak", s.pages_peak);
  json.add("pages_capacity", s.pages_capacity);
  json.add("block_utilization", s.block_utilization);
  json.add("bytes_reserved", s.bytes_reserved);
  json.add("bytes_committed", s.bytes_committed);
  json.add("bytes_resident", s.bytes_resident);
  json.add("bytes_in_use", s.bytes_in_use);
  json.add("bytes_moved", s.bytes_moved);
  json.add_object("attention_calls", calls);
  json.add_object("fallbacks", fallbacks);
  json.add("commit_seconds", s.commit_seconds);
  json.add("touch_seconds", s.touch_seconds);
  json.add("write_seconds", s.write_seconds);
  json.add("attention_seconds", s.attention_seconds);
  json.add("read_seconds", s.read_seconds);
  return json.text();
}

}  // namespace pagedkv
