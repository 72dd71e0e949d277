// What a client did wrong, or the server cannot do, as OpenAI's clients read it:
//   {"error":{"message":"...","type":"invalid_request_error","param":"messages","code":"invalid_value"}}
// with `param` and `code` null where they are empty.
#pragma once

#include <exception>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace pagedkv {

using Json = nlohmann::ordered_json;

struct ApiError : std::exception {
  ApiError(int status, std::string message, std::string code = "", std::string param = "");
  const char* what() const noexcept override { return message.c_str(); }

  int status;
  std::string type;  // as the status says
  std::string message, code, param;
  Json members = Json::object();               // more of the error object
  std::map<std::string, std::string> headers;  // more of the answer
};

// 400s that name a field.
ApiError invalid_value(const std::string& param, const std::string& message);
ApiError unsupported_parameter(const std::string& param, const std::string& message);

// {"error": {...}}
Json error_body(const ApiError& error);

// The answer to any exception. What is not known becomes a 500 without its text, which is logged: it may name files.
ApiError to_api_error(std::exception_ptr error);

// `text` for a message: as JSON, cut to so many bytes at a whole character.
std::string in_quotes(std::string_view text, size_t most = 100);

}  // namespace pagedkv
