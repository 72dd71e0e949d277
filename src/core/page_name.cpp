#include "pagedkv/core/page_name.h"

#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "core/sha256.h"

namespace pagedkv {
namespace {

// CBOR of the few types that a name needs. Canonical: each number and length in the fewest bytes.
class Cbor {
 public:
  void number(int32_t value) {
    if (value >= 0)
      head(0, static_cast<uint32_t>(value));
    else
      head(1, static_cast<uint32_t>(-1 - value));
  }
  void byte_string(std::span<const uint8_t> value) {
    head(2, value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  void text(std::string_view value) {
    head(3, value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  void array(size_t length) { head(4, length); }  // that many items follow
  void null() { bytes_.push_back(0xf6); }

  void reserve(size_t num_bytes) { bytes_.reserve(num_bytes); }
  std::span<const uint8_t> bytes() const noexcept { return bytes_; }

 private:
  // A major type, and its value in the same byte or in the 1, 2, 4 or 8 bytes after it, big endian.
  void head(int major, uint64_t value) {
    const int log2_bytes = value <= 0xff ? 0 : value <= 0xffff ? 1 : value <= 0xffffffff ? 2 : 3;
    const bool inside = value < 24;
    bytes_.push_back(
        static_cast<uint8_t>(major << 5 | (inside ? static_cast<int>(value) : 24 + log2_bytes)));
    if (inside) return;
    for (int shift = (8 << log2_bytes) - 8; shift >= 0; shift -= 8)
      bytes_.push_back(static_cast<uint8_t>(value >> shift));
  }

  std::vector<uint8_t> bytes_;
};

void put_scope(Cbor& cbor, const PrefixScope& scope) {
  std::vector<std::pair<std::string_view, std::string_view>> keys;
  const auto add = [&](std::string_view key, std::string_view value) {
    if (!value.empty()) keys.emplace_back(key, value);
  };
  add("cache_salt", scope.salt);
  add("model", scope.model);
  add("kv_format", scope.kv_format);
  add("arithmetic_id", scope.arithmetic_id);
  if (keys.empty()) return cbor.null();
  cbor.array(keys.size());
  for (const auto& [key, value] : keys) {
    cbor.array(2);
    cbor.text(key);
    cbor.text(value);
  }
}

// All of a page but what ends the array of three.
Cbor begin_page(const PageName& parent, std::span<const int32_t> tokens) {
  Cbor cbor;
  cbor.reserve(sizeof(PageName) + 16 + 5 * tokens.size());
  cbor.array(3);
  cbor.byte_string(parent);
  cbor.array(tokens.size());
  for (const int32_t token : tokens) cbor.number(token);
  return cbor;
}

}  // namespace

PageName root_name() {
  static const PageName root = [] {
    Cbor cbor;
    cbor.text("vllm-none-hash");
    return sha256(cbor.bytes());
  }();
  return root;
}

PageName first_page_name(std::span<const int32_t> tokens, const PrefixScope& scope) {
  Cbor cbor = begin_page(root_name(), tokens);
  put_scope(cbor, scope);
  return sha256(cbor.bytes());
}

PageName page_name(const PageName& parent, std::span<const int32_t> tokens) {
  Cbor cbor = begin_page(parent, tokens);
  cbor.null();
  return sha256(cbor.bytes());
}

uint64_t short_name(const PageName& name) noexcept {
  uint64_t value = 0;
  for (size_t i = name.size() - 8; i < name.size(); ++i) value = value << 8 | name[i];
  return value;
}

std::string hex(const PageName& name) {
  std::string text;
  for (const uint8_t byte : name) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace pagedkv
