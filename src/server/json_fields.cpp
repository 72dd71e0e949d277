#include "server/json_fields.h"

#include <cmath>
#include <mutex>
#include <utility>

#include "base/bounded_text.h"
#include "engine/text_stream.h"
#include "pagedkv/base/log.h"

namespace pagedkv {
namespace {

std::string as_text(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

}  // namespace

BodyJson parse_body(const std::string& text) {
  if (const int64_t depth = json_depth(text); depth > kMostJsonDepth)
    throw ApiError(400,
                   "the body is nested " + std::to_string(depth) + " deep; the limit is " +
                       std::to_string(kMostJsonDepth),
                   "invalid_json");
  if (text.empty())
    throw ApiError(400, "the body is empty; it must be a JSON object", "invalid_json");
  BodyJson body;
  try {
    body = BodyJson::parse(text);
  } catch (const BodyJson::exception& e) {
    // "[json.exception...] parse error at line 1, column 2: ... last read: '...'", whose end quotes the body.
    std::string why = e.what();
    if (const size_t end = why.find("] "); end != std::string::npos) why.erase(0, end + 2);
    if (const size_t quote = why.find("; last read"); quote != std::string::npos) why.resize(quote);
    throw ApiError(400, "the body is no JSON: " + valid_utf8(why), "invalid_json");
  }
  if (!body.is_object())
    throw ApiError(
        400, std::string("the body is JSON of type ") + body.type_name() + "; it must be an object",
        "invalid_json");
  return body;
}

std::optional<int64_t> whole_number(const BodyJson& value) {
  if (value.is_number_unsigned()) {
    const auto u = value.get<uint64_t>();
    if (u <= static_cast<uint64_t>(INT64_MAX)) return static_cast<int64_t>(u);
  } else if (value.is_number_integer()) {
    return value.get<int64_t>();
  } else if (value.is_number_float()) {
    const double d = value.get<double>();
    if (std::fabs(d) < 9007199254740992.0 && d == std::floor(d)) return static_cast<int64_t>(d);
  }
  return std::nullopt;
}

std::string described(const BodyJson& value) {
  if (value.is_string()) return in_quotes(std::string_view(value.get_ref<const std::string&>()));
  if (value.is_structured())
    return value.is_array() ? "an array of " + std::to_string(value.size())
                            : std::string("an object");
  return value.dump();
}

Fields::Fields(const BodyJson& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (object.is_object()) return;
  std::string name = where_;
  if (name.ends_with('.')) name.pop_back();
  throw invalid_value(name, name + " is " + described(object) + ": must be an object");
}

const BodyJson* Fields::any(const char* name) {
  known_.insert(name);
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool Fields::has(const char* name) { return any(name) != nullptr; }

void Fields::missing(const char* name) const {
  throw ApiError(400, path(name) + " is missing", "missing_required_parameter", path(name));
}
void Fields::refuse(const char* name, const std::string& why) const {
  throw invalid_value(path(name), path(name) + " " + why);
}
void Fields::unsupported(const char* name, const std::string& why) const {
  throw unsupported_parameter(path(name), path(name) + ": " + why);
}
void Fields::wrong(const char* name, const BodyJson& value, const std::string& want) const {
  refuse(name, "is " + described(value) + ": must be " + want);
}

std::optional<bool> Fields::boolean(const char* name) {
  const BodyJson* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong(name, *value, "true or false");
  return value->get<bool>();
}

std::optional<int64_t> Fields::integer(const char* name, int64_t least, int64_t most) {
  const BodyJson* value = any(name);
  if (value == nullptr) return std::nullopt;
  const auto x = whole_number(*value);
  if (x && *x >= least && *x <= most) return x;
  std::string want = "an integer";
  if (least != INT64_MIN && most != INT64_MAX)
    want += " in " + std::to_string(least) + ".." + std::to_string(most);
  else if (least != INT64_MIN)
    want += " of at least " + std::to_string(least);
  wrong(name, *value, want + (least == INT64_MIN ? " of 64 bits" : ""));
}

std::optional<double> Fields::number(const char* name, double least, double most) {
  const BodyJson* value = any(name);
  if (value == nullptr) return std::nullopt;
  const double x = value->is_number() ? value->get<double>() : NAN;
  if (!(x >= least && x <= most))
    wrong(name, *value, "a number in " + as_text(least) + ".." + as_text(most));
  return x;
}

std::optional<std::string> Fields::text(const char* name, size_t most_bytes) {
  const BodyJson* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong(name, *value, "a string");
  const auto& s = value->get_ref<const std::string&>();
  if (s.size() > most_bytes)
    refuse(name, "has " + std::to_string(s.size()) + " bytes; the limit is " +
                     std::to_string(most_bytes));
  return s;
}

const BodyJson* Fields::array(const char* name) {
  const BodyJson* value = any(name);
  if (value && !value->is_array()) wrong(name, *value, "an array");
  return value;
}

const BodyJson* Fields::object(const char* name) {
  const BodyJson* value = any(name);
  if (value && !value->is_object()) wrong(name, *value, "an object");
  return value;
}

void Fields::log_unknown() const {
  constexpr size_t kMostNames = 64, kMostBytes = 64;
  static std::mutex mutex;
  static std::set<std::string> told;
  for (const auto& [key, value] : object_.items()) {
    if (known_.contains(key)) continue;
    const std::string name = where_ + key.substr(0, kMostBytes);
    const std::lock_guard lock(mutex);
    if (told.size() >= kMostNames || !told.insert(name).second) continue;
    log(LogLevel::kWarning, "a request has the field " + in_quotes(std::string_view(name)) +
                                ", which this server does not know and ignores");
  }
}

}  // namespace pagedkv
