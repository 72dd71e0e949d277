// Reads the fields of a request's body. A field that is absent and one that is null are the same; one of the wrong type or
// outside its range is a 400 that names the field, the value and the limit.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "server/api_error.h"

namespace pagedkv {

// Objects by key, in a tree: what a client sends must not cost quadratic time.
using BodyJson = nlohmann::json;

// A body that is one JSON object. Throws ApiError: invalid_json (also where it is nested deeper than kMostJsonDepth, is not
// UTF-8, or has a number that no double holds).
BodyJson parse_body(const std::string& text);

class Fields {
 public:
  // `where` stands before the names in errors: "stream_options.". Throws where it is no object.
  explicit Fields(const BodyJson& object, std::string where = "");

  bool has(const char* name);  // and is not null
  std::optional<bool> boolean(const char* name);
  std::optional<int64_t> integer(const char* name, int64_t least = INT64_MIN,
                                 int64_t most = INT64_MAX);
  std::optional<double> number(const char* name, double least, double most);
  std::optional<std::string> text(const char* name, size_t most_bytes = SIZE_MAX);
  const BodyJson* array(const char* name);   // null where absent
  const BodyJson* object(const char* name);  // null where absent
  const BodyJson* any(const char* name);     // null where absent
  [[noreturn]] void missing(const char* name) const;
  [[noreturn]] void refuse(const char* name, const std::string& why) const;  // invalid_value
  [[noreturn]] void unsupported(const char* name, const std::string& why) const;
  std::string path(const char* name) const { return where_ + name; }

  // Logs the fields that nobody asked for, each name once per process, and no more than 64 names.
  void log_unknown() const;

 private:
  [[noreturn]] void wrong(const char* name, const BodyJson& value, const std::string& want) const;

  const BodyJson& object_;
  const std::string where_;
  std::set<std::string_view> known_;
};

// Of a number that is whole, written as 16 or 16.0, and that 64 bits hold.
std::optional<int64_t> whole_number(const BodyJson& value);

// A value as the messages quote it.
std::string described(const BodyJson& value);

}  // namespace pagedkv
