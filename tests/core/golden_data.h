// The golden vectors of the seed, as tools/convert_golden.py writes them (tests/data/golden/README.md),
// and what the tests that replay them share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/base/tensor.h"

namespace pagedkv::testing {

// An array of a group's .bin file: little-endian, C order.
struct GoldenArray {
  std::string dtype;           // "float32", "float16", "bfloat16", "bool"
  std::vector<int64_t> shape;  // of K, V and Q: [1, heads, tokens, head_dim]
  std::vector<std::byte> bytes;

  int64_t size() const;
  // Batch of 1 only. The array must outlive the view.
  TensorView view() const;
  std::vector<float> floats() const;  // in the array's order
};

// Its elements in its order, [num_heads, num_tokens, head_dim].
std::vector<float> floats(const Tensor& tensor);

// A result that is known by its hash.
struct GoldenHash {
  std::string sha256, dtype;
  std::vector<int64_t> shape;
};

// One line: a word, then fields. The file and line number are kept for messages. Asking for a field
// that is absent or of another kind throws std::runtime_error naming it.
class GoldenLine {
 public:
  GoldenLine(std::string text, std::string place, std::span<const std::byte> blob);

  const std::string& word() const { return word_; }
  const std::string& place() const { return place_; }
  const std::map<std::string, std::string>& fields() const { return fields_; }
  const std::vector<std::string>& gone() const { return gone_; }  // fields written "-name"
  // Fields named `prefix`.NAME, by NAME.
  std::map<std::string, std::string> under(const std::string& prefix) const;

  bool has(const std::string& name) const { return fields_.contains(name); }
  bool has_under(const std::string& prefix) const { return !under(prefix).empty(); }
  bool is_null(const std::string& name) const { return field(name) == "null"; }
  std::string text(const std::string& name) const;  // of a string
  int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  bool flag(const std::string& name) const;
  std::vector<std::string> list(const std::string& name) const;  // strings unquoted
  std::vector<int64_t> integers(const std::string& name) const;
  GoldenArray array(const std::string& name) const;
  GoldenHash hash(const std::string& name) const;

 private:
  const std::string& field(const std::string& name) const;

  std::string word_, place_;
  std::map<std::string, std::string> fields_;
  std::vector<std::string> gone_;
  std::span<const std::byte> blob_;
};

// A string as the files write it, and back: "q8%20" with its quotes is q8 and a blank.
std::string quote(std::string_view text);
std::string unquote(std::string_view word);

// The lines of a group ("tables", "traces", "attention") with its arrays.
class GoldenFile {
 public:
  explicit GoldenFile(const std::string& group);
  const std::vector<GoldenLine>& lines() const { return lines_; }

 private:
  std::vector<std::byte> blob_;
  std::vector<GoldenLine> lines_;
};

// Lower-case hexadecimal SHA-256 (FIPS 180-4).
std::string sha256(std::span<const std::byte> bytes);

// Environment variables of the process for as long as it lives: none of those that the cache reads is
// set at first, and all are again what they were in the end.
class GoldenEnvironment {
 public:
  GoldenEnvironment();
  ~GoldenEnvironment();
  GoldenEnvironment(const GoldenEnvironment&) = delete;
  GoldenEnvironment& operator=(const GoldenEnvironment&) = delete;

  void set(const std::string& name, const std::optional<std::string>& value);
  // Fields env.NAME of a line.
  void set_all(const GoldenLine& line);

 private:
  std::map<std::string, std::optional<std::string>> before_;
};

}  // namespace pagedkv::testing
