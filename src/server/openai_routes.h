// The routes of OpenAI's API, and those that scripts for other servers know beside them.
#pragma once

#include "server/http_server.h"
#include "server/served.h"

namespace pagedkv {

// Both must outlive http.run().
void add_openai_routes(HttpServer& http, Served& served);

}  // namespace pagedkv
