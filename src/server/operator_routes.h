// What whoever runs the server asks of it: /metrics, /props, /slots, /version, and what /health tells to those with a key.
#pragma once

#include "server/http_server.h"
#include "server/served.h"

namespace pagedkv {

// Both must outlive http.run().
void add_operator_routes(HttpServer& http, Served& served);

}  // namespace pagedkv
