// Texts and tokens without an answer: /tokenize, /detokenize, /apply-template, /v1/chat/completions/input_tokens.
#pragma once

#include "server/http_server.h"
#include "server/served.h"

namespace pagedkv {

// Both must outlive http.run().
void add_text_routes(HttpServer& http, Served& served);

}  // namespace pagedkv
