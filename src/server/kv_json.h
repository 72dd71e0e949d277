// The bodies of the routes that show the cache to an operator. All of it may be called by any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/engine_state.h"
#include "engine/kv_settings.h"
#include "models/text.h"
#include "pagedkv/core/page_events.h"
#include "pagedkv/core/prefix_index.h"
#include "server/api_error.h"

namespace pagedkv {

// PagePool::page_map() as runs of equal pages from id 0 on, "3h,h2,12c,f": a count, 1 where there is none; then f (free),
// c (cached), n (free, without memory) or h (held), and behind h by how many, 1 where there is no number.
std::string page_runs(std::span<const int32_t> map);

// A salt as it is shown: what tells it from others, and not what it is. Null where there is none.
Json shown_salt(const std::string& salt);

Json pool_json(const EngineState& state, const KvSettings& kv);
Json request_json(const RequestState& request, int64_t context,
                  RequestProgress::Clock::time_point now);
Json prefix_json(const KnownPrefix& prefix, const Tokenizer& tokenizer);
Json pin_json(const PinnedPrefix& pin, const Tokenizer& tokenizer);
Json explanation_json(const PrefixExplanation& explanation);
// One event of number `sequence`, with vLLM's names.
Json event_json(const PageEvent& event, uint64_t sequence);

}  // namespace pagedkv
