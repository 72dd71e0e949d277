// What the tests of sharing have in common: sequences whose pages tell from which tokens they were computed. Each slot of
// each group holds four bytes that depend on the scope and on every token up to it, so that a page in a wrong place shows.
#pragma once

#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/pool_testing.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/core/prefix_index.h"

namespace pagedkv::testing {

// A group of one layer of one f32 number a token.
inline LayerGroupSpec tiny_group(int window = 0) {
  return group(1, layer(1, 1, PageFormat::kF32), window);
}

// The content of each of the tokens' slots.
inline std::vector<uint32_t> contents(const PrefixScope& scope, std::span<const int32_t> tokens) {
  uint64_t h = 1469598103934665603u;
  const auto add = [&](uint64_t word) { h = (h ^ word) * 1099511628211u, h ^= h >> 29; };
  for (const std::string* part :
       {&scope.salt, &scope.model, &scope.kv_format, &scope.arithmetic_id}) {
    for (const char c : *part) add(static_cast<unsigned char>(c) + 1u);
    add(0);
  }
  std::vector<uint32_t> out;
  for (const int32_t token : tokens) {
    add(static_cast<uint32_t>(token) + 7u);
    out.push_back(static_cast<uint32_t>(h >> 32) | 1u);
  }
  return out;
}

inline uint32_t* slots_of(PagePool& pool, int group) {
  return reinterpret_cast<uint32_t*>(pool.layer_pages(group).keys.data);  // one layer a group
}

struct SharedSequence {
  BlockTable table;
  PrefixScope scope;
  std::vector<int32_t> tokens;  // at least table.length() of them
  PrefixIndex::Position position = {};

  // Computes the next tokens, as far as `tokens` has them. False where there is no room.
  bool compute(PagePool& pool, int64_t num_tokens) {
    const int64_t first = table.length();
    const auto all =
        contents(scope, std::span(tokens).first(static_cast<size_t>(first + num_tokens)));
    std::vector<int64_t> slots(static_cast<size_t>(num_tokens));
    if (!table.try_append(num_tokens)) return false;
    for (int g = 0; g < pool.num_groups(); ++g) {
      table.slot_mapping(g, first, slots);
      for (int64_t i = 0; i < num_tokens; ++i) slots_of(pool, g)[slots[i]] = all[first + i];
    }
    return true;
  }
  bool compute_all(PagePool& pool) {
    return compute(pool, static_cast<int64_t>(tokens.size()) - table.length());
  }

  // The first token whose slot, in a page that the table holds, has another content; -1: none.
  int64_t first_wrong(PagePool& pool) const {
    const auto all = contents(scope, std::span(tokens).first(static_cast<size_t>(table.length())));
    for (int g = 0; g < pool.num_groups(); ++g)
      for (int64_t i = 0; i < table.length(); ++i) {
        const PageId page = table.pages(g)[i / pool.page_size()];
        if (page != kNoPage &&
            slots_of(pool, g)[int64_t{page} * pool.page_size() + i % pool.page_size()] != all[i])
          return i;
      }
    return -1;
  }
};

// A sequence of these tokens that begins with what the index has of all but the last.
inline SharedSequence begin(PagePool& pool, PrefixIndex& index, std::vector<int32_t> tokens,
                            PrefixScope scope = {}) {
  SharedSequence s{BlockTable(pool), std::move(scope), std::move(tokens)};
  s.table = index.acquire(s.scope, std::span(s.tokens).first(s.tokens.size() - 1), 0, &s.position);
  return s;
}

// Computes a prompt, makes it known with its tail, and ends it. Returns how much of it had been known.
inline int64_t serve(PagePool& pool, PrefixIndex& index, std::vector<int32_t> tokens,
                     PrefixScope scope = {}, Retention retention = {}) {
  SharedSequence s = begin(pool, index, std::move(tokens), std::move(scope));
  const int64_t hit = s.table.length();
  if (!s.compute_all(pool)) return -1;
  index.insert(s.table, s.scope, s.tokens, true, &s.position, retention);
  return s.first_wrong(pool) >= 0 ? -2 : hit;
}

// `count` tokens from `first` on, ascending.
inline std::vector<int32_t> tokens_from(int32_t first, int64_t count) {
  std::vector<int32_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), first);
  return out;
}

inline std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace pagedkv::testing
