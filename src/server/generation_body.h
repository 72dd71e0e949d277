// The bodies of /v1/chat/completions and /v1/completions, as requests to the engine and as what the client wants to see.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "server/json_fields.h"
#include "server/served.h"

namespace pagedkv {

struct GenerationBody {
  bool chat = true;
  std::string model;                        // as the client names it
  std::vector<GenerationRequest> requests;  // one for each prompt
  std::vector<std::string> prompt_texts;    // of each; with echo alone
  int n = 1;                                // answers to each prompt
  bool stream = false, include_usage = false;
  bool logprobs = false;
  bool echo = false;  // the answer's text begins with the prompt
  bool return_token_ids = false;
};

// Throw ApiError for what is wrong with a body. `salt`: what the client's key adds (key_salt()).
GenerationBody read_chat_body(const BodyJson& body, Served& served, const std::string& salt);
GenerationBody read_completion_body(const BodyJson& body, Served& served, const std::string& salt);

// The prompt of a body with `messages`, as text and as tokens.
struct ChatPrompt {
  std::string text;
  std::vector<int32_t> tokens;
};
ChatPrompt read_messages(Fields& fields, Served& served);

// The salt of a request: the key's and the body's `cache_salt` together.
std::string read_salt(Fields& fields, const std::string& key_salt);

// The model that a body names, or the server's own name for it.
std::string read_model(Fields& fields, const Served& served);

// An array of tokens, each 0..vocab_size-1.
std::vector<int32_t> read_tokens(const BodyJson& list, const std::string& param,
                                 const Served& served);

}  // namespace pagedkv
