// What tools/embed_web.py makes of web/index.html and docs/openapi.yaml.
#pragma once

#include <string_view>

namespace pagedkv {

extern const std::string_view kChatPage;
extern const std::string_view kChatPagePolicy;  // its Content-Security-Policy
extern const std::string_view kOpenApi;         // JSON

}  // namespace pagedkv
