// What the server shows of itself: the chat page at / and its OpenAPI document at /openapi.json, both from memory.
#pragma once

#include "server/http_server.h"

namespace pagedkv {

// The page is public, as a browser cannot send a key with the address that it opens; it holds nothing secret and asks for
// the key itself.
void add_web_routes(HttpServer& http);

}  // namespace pagedkv
