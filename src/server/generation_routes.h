// /v1/chat/completions and /v1/completions: whole answers and streams.
#pragma once

#include "server/http_server.h"
#include "server/served.h"

namespace pagedkv {

// Both must outlive http.run().
void add_generation_routes(HttpServer& http, Served& served);

}  // namespace pagedkv
