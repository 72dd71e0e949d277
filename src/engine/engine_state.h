// What an operator asks of a running engine, copied between two steps so that any thread can look at it.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/engine.h"

namespace pagedkv {

// A layer group's pages.
struct GroupState {
  int sliding_window = 0;  // 0: full attention
  int64_t page_bytes = 0;
  int64_t capacity = 0;   // usable without growth
  int64_t most = 0;       // there may ever be
  int64_t committed = 0;  // have memory: free(), held and cached ones
  int64_t held = 0;
  int64_t cached = 0;
  int64_t shared = 0;  // held by more than one
  int64_t peak = 0;    // most held at once
  int64_t free() const noexcept { return committed - held - cached; }
};

struct EngineState {
  int page_size = 0;  // tokens
  int64_t bytes_per_token = 0;
  std::vector<GroupState> groups;
  PagePoolStats pool;
  PrefixIndexStats prefix;
  EngineStats engine;
  int64_t num_running = 0, num_waiting = 0;  // requests

  // How much of what the pool may have is held, 0..1, in the group or the byte budget that is nearest to its limit.
  // Cached pages do not count: they make room.
  double usage() const noexcept;
};

// A pass over the reference counts of the pool, about 10 us for 100,000 pages. For EngineLoop::call().
EngineState engine_state(Engine& engine);

}  // namespace pagedkv
