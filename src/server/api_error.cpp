#include "server/api_error.h"

#include <new>
#include <stdexcept>
#include <utility>

#include "engine/engine_loop.h"
#include "engine/text_stream.h"
#include "pagedkv/base/error.h"
#include "pagedkv/base/log.h"

namespace pagedkv {
namespace {

const char* type_of(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "unavailable_error";
    case 507:
      return "insufficient_memory_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

ApiError with_header(ApiError error, const char* name, const char* value) {
  error.headers[name] = value;
  return error;
}

}  // namespace

ApiError::ApiError(int s, std::string m, std::string c, std::string p)
    : status(s), type(type_of(s)), message(std::move(m)), code(std::move(c)), param(std::move(p)) {}

ApiError invalid_value(const std::string& param, const std::string& message) {
  return {400, message, "invalid_value", param};
}

ApiError unsupported_parameter(const std::string& param, const std::string& message) {
  return {400, message, "unsupported_parameter", param};
}

Json error_body(const ApiError& error) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  Json object{{"message", valid_utf8(error.message)},
              {"type", error.type},
              {"param", or_null(error.param)},
              {"code", or_null(error.code)}};
  object.update(error.members);
  return {{"error", std::move(object)}};
}

ApiError to_api_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const ApiError& e) {
    return e;
  } catch (const CapacityError& e) {
    return {400, e.what(), "context_length_exceeded"};
  } catch (const MemoryError& e) {
    return with_header({507, e.what(), "kv_pool_exhausted"}, "x-should-retry", "false");
  } catch (const std::bad_alloc&) {
    return with_header({507, "out of memory", "kv_pool_exhausted"}, "x-should-retry", "false");
  } catch (const QueueFullError& e) {
    return with_header({429, e.what(), "queue_full"}, "retry-after", "1");
  } catch (const DrainingError& e) {
    return with_header({503, e.what(), "shutting_down"}, "retry-after", "5");
  } catch (const std::invalid_argument& e) {
    return {400, e.what(), "invalid_value"};
  } catch (const std::exception& e) {
    log(LogLevel::kError, std::string("a request failed: ") + e.what());
  } catch (...) {
    log(LogLevel::kError, "a request failed");
  }
  return {500, "the server failed to answer; its log says why", "internal_error"};
}

std::string in_quotes(std::string_view text, size_t most) {
  std::string cut(text.substr(0, most));
  cut.resize(whole_characters(cut));
  return Json(valid_utf8(cut)).dump() + (text.size() > most ? "..." : "");
}

}  // namespace pagedkv
