// Our own routes below /v1/kv: what the pool holds, which prefixes are known and why a prompt is not, pins, events.
//
// Who has one of several keys is a tenant: it sees its own prefixes, pins and requests, and learns nothing of what other
// keys have stored. Everybody else is an operator.
#pragma once

#include "server/http_server.h"
#include "server/served.h"

namespace pagedkv {

// Both must outlive http.run().
void add_kv_routes(HttpServer& http, Served& served);

bool is_tenant(const httplib::Response& response);

// Writes the queue's events from number `next` on, until the client or `is_over` ends it:
//   id: 17
//   data: {"type":"BlockStored",...,"sequence":17}
// What was dropped before it could be read is told as one event named "lost". A ping after so many silent seconds.
void follow_events(const PageEventQueue& queue, uint64_t next, int ping_seconds,
                   const std::function<bool()>& is_over, EventWriter& out);

}  // namespace pagedkv
