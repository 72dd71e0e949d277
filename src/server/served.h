// What the routes serve: one model with its engine, and what the command line says of requests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine_loop.h"
#include "engine/kv_settings.h"
#include "engine/metrics.h"
#include "models/model.h"
#include "models/text.h"
#include "pagedkv/core/page_events.h"
#include "server/text_workers.h"

namespace pagedkv {

struct Served {
  EngineLoop& loop;
  const Engine& engine;  // what changes of it, and `pool`, only within loop.call()
  PagePool& pool;
  const ModelInfo& info;
  const Tokenizer& tokenizer;
  const ChatTemplate& chat_template;
  TextWorkers& text;  // tokenizer and chat template run there
  const Metrics& metrics;
  const PageEventQueue& events;  // of the engine's prefix index
  KvSettings kv = {};
  int64_t context = 0;             // tokens of prompt and answer together
  int64_t pool_tokens = 0;         // the largest request that fits into the pool, context aside
  std::vector<std::string> names;  // of the model: the first is its id, the others are aliases
  bool any_name = false;           // any other name is taken for it too
  int max_n = 16;
  bool prefix_cache = true;
  bool metrics_public = false;  // without a key
  int ping_seconds = 10;        // a stream is never silent for longer
  int64_t created = 0;          // seconds since 1970
  std::string fingerprint = {};
};

// Changes with the build, the arithmetic, the page format and the page size: what `seed` needs to repeat an answer.
std::string system_fingerprint(const ModelInfo& info, const KvSettings& kv);

// Throws ApiError 404 model_not_found.
void check_model(const Served& served, const std::string& name);

}  // namespace pagedkv
