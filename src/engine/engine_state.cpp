#include "engine/engine_state.h"

#include <algorithm>

namespace pagedkv {

double EngineState::usage() const noexcept {
  double usage = 0;
  const auto see = [&](int64_t used, int64_t most) {
    if (most > 0) usage = std::max(usage, static_cast<double>(used) / static_cast<double>(most));
  };
  for (const GroupState& group : groups) see(group.held, group.most);
  see(pool.bytes_in_use, pool.bytes_limit);
  return std::min(usage, 1.0);
}

EngineState engine_state(Engine& engine) {
  const PagePool& pool = engine.pool();
  EngineState state;
  state.page_size = pool.page_size();
  state.bytes_per_token = pool.bytes_per_token();
  for (int g = 0; g < pool.num_groups(); ++g)
    state.groups.push_back({.sliding_window = pool.sliding_window(g),
                            .page_bytes = pool.page_bytes(g),
                            .capacity = pool.capacity(g),
                            .most = pool.max_pages(g),
                            .committed = pool.committed(g),
                            .held = pool.pages_held(g),
                            .cached = pool.pages_cached(g),
                            .shared = pool.pages_shared(g),
                            .peak = pool.pages_peak(g)});
  state.pool = pool.stats();
  state.prefix = engine.prefix_index().stats();
  state.engine = engine.stats();
  state.num_running = engine.num_running();
  state.num_waiting = engine.num_waiting();
  return state;
}

}  // namespace pagedkv
