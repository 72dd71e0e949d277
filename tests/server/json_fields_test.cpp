#include "server/json_fields.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "engine/engine_loop.h"
#include "pagedkv/base/error.h"

namespace pagedkv {
namespace {

// The error that `call` throws; a status of 0 where there is none.
ApiError error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ApiError& error) {
    return error;
  }
  return {0, ""};
}

TEST(JsonFields, NullIsAsAbsent) {
  const BodyJson body = parse_body(R"({"a": null})");
  Fields fields(body);
  EXPECT_FALSE(fields.has("a"));
  EXPECT_FALSE(fields.boolean("a"));
  EXPECT_FALSE(fields.integer("a", 1, 2));
  EXPECT_FALSE(fields.number("a", 1, 2));
  EXPECT_FALSE(fields.text("a"));
  EXPECT_EQ(fields.array("a"), nullptr);
  EXPECT_EQ(fields.object("b"), nullptr);
}

TEST(JsonFields, IntegersKeepToTheirRange) {
  const auto read = [](const std::string& value, int64_t least, int64_t most) {
    const BodyJson body = parse_body("{\"n\":" + value + "}");
    return *Fields(body).integer("n", least, most);
  };
  EXPECT_EQ(read("16", 1, 16), 16);
  EXPECT_EQ(read("16.0", 1, 16), 16);
  EXPECT_EQ(read("-9223372036854775808", INT64_MIN, INT64_MAX), INT64_MIN);
  EXPECT_EQ(read("9223372036854775807", INT64_MIN, INT64_MAX), INT64_MAX);
  for (const char* value : {"17", "0", "-1", "1.5", "1e30", "-1e300", "9223372036854775808",
                            "18446744073709551616", "\"2\"", "true", "[]", "{}"}) {
    const ApiError error = error_of([&] { read(value, 1, 16); });
    EXPECT_EQ(error.status, 400) << value;
    EXPECT_EQ(error.param, "n") << value;
    EXPECT_EQ(error.code, "invalid_value") << value;
    EXPECT_NE(error.message.find("1..16"), std::string::npos) << error.message;
  }
  EXPECT_EQ(error_of([&] { read("9223372036854775808", INT64_MIN, INT64_MAX); }).status, 400);
}

TEST(JsonFields, NumbersKeepToTheirRange) {
  const auto read = [](const std::string& value) {
    const BodyJson body = parse_body("{\"t\":" + value + "}");
    return *Fields(body).number("t", 0, 2);
  };
  EXPECT_EQ(read("2"), 2);
  EXPECT_EQ(read("0.5"), 0.5);
  for (const char* value : {"2.0001", "-1e-9", "1e30", "\"1\"", "true", "[1]"})
    EXPECT_EQ(error_of([&] { read(value); }).param, "t") << value;
}

TEST(JsonFields, FieldsOfObjectsAreNamedWithTheirPath) {
  const BodyJson body = parse_body(R"({"o": {"x": 1}, "s": "abc"})");
  Fields fields(body);
  Fields inner(*fields.object("o"), "o.");
  EXPECT_EQ(error_of([&] { inner.boolean("x"); }).param, "o.x");
  EXPECT_EQ(error_of([&] { Fields(*fields.any("s"), "s."); }).param, "s");
  EXPECT_EQ(error_of([&] { fields.text("s", 2); }).param, "s");
  EXPECT_EQ(error_of([&] { inner.missing("y"); }).code, "missing_required_parameter");
}

TEST(JsonFields, BodiesMustBeObjectsOfBoundedDepth) {
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("nul"),
        std::string("{\"a\":NaN}"), std::string("{\"a\":1e999}"), std::string("{\"a\":\"\xff\"}"),
        std::string("{\"a\":\"\\ud800\"}"), std::string("{}{}"),
        "{\"a\":" + std::string(200, '[') + std::string(200, ']') + "}",
        std::string(100000, '[')}) {
    const ApiError error = error_of([&] { parse_body(text); });
    EXPECT_EQ(error.status, 400) << text.substr(0, 40);
    EXPECT_EQ(error.code, "invalid_json") << text.substr(0, 40);
    EXPECT_LT(error.message.size(), 300u);
  }
  EXPECT_EQ(parse_body(R"({"a":1,"a":2})")["a"], 2);
}

TEST(ApiError, BodiesHaveAllFourFields) {
  const Json body = error_body({400, "text \xff", "invalid_value", "n"});
  EXPECT_EQ(body.dump(),
            "{\"error\":{\"message\":\"text \xef\xbf\xbd\",\"type\":\"invalid_request_error\","
            "\"param\":\"n\",\"code\":\"invalid_value\"}}");
  const Json empty = error_body({404, "x"});
  EXPECT_TRUE(empty["error"]["param"].is_null());
  EXPECT_TRUE(empty["error"]["code"].is_null());
}

TEST(ApiError, ExceptionsHaveTheirStatus) {
  const auto status = [](auto exception) {
    return to_api_error(std::make_exception_ptr(exception));
  };
  EXPECT_EQ(status(CapacityError("x")).status, 400);
  EXPECT_EQ(status(CapacityError("x")).code, "context_length_exceeded");
  EXPECT_EQ(status(MemoryError("x")).status, 507);
  EXPECT_EQ(status(MemoryError("x")).headers.at("x-should-retry"), "false");
  EXPECT_EQ(status(std::bad_alloc()).status, 507);
  EXPECT_EQ(status(QueueFullError("x")).status, 429);
  EXPECT_EQ(status(QueueFullError("x")).headers.count("retry-after"), 1u);
  EXPECT_EQ(status(DrainingError("x")).status, 503);
  EXPECT_EQ(status(std::invalid_argument("x")).status, 400);
  EXPECT_EQ(status(7).status, 500);
  const ApiError secret = status(std::runtime_error("/home/me/model.gguf at 0x7ffd"));
  EXPECT_EQ(secret.status, 500);
  EXPECT_EQ(secret.message.find("model.gguf"), std::string::npos);
}

TEST(ApiError, QuotesEndAtWholeCharacters) {
  EXPECT_EQ(in_quotes("abc"), "\"abc\"");
  EXPECT_EQ(in_quotes("a\n\"", 9), "\"a\\n\\\"\"");
  EXPECT_EQ(in_quotes("ab\xf0\x9f\xa6\x99", 4), "\"ab\"...");
}

}  // namespace
}  // namespace pagedkv
