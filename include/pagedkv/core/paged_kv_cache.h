// The keys and values of one sequence, in pages, for one layer or many: the seed's cache.
//
//   PagedKVCache cache({.block_size = 16, .num_blocks = 1024});
//   cache.update(keys, values);                     // [num_kv_heads, num_new_tokens, head_dim]
//   Tensor out = cache.attend(queries);             // [num_q_heads, num_new_tokens, value_head_dim]
//
// Pages are [num_blocks, block_size, num_kv_heads, head_dim] (docs/page-format.md); tokens are
// addressed contiguously from 0 through a block table. Shapes and, unless given, dtypes are those of
// the first write; nothing is allocated before it. Growth neither moves nor copies a byte.
//
// A call that throws has changed nothing: std::invalid_argument for wrong arguments (a shape or dtype
// that differs from the first write's, a head_dim that the format cannot store, values that do not
// match their keys, a row with an infinity or NaN where pages are quantised), CapacityError (growth is
// off), MemoryError (the machine or max_bytes refuses). Not thread-safe.
//
// Source: MTPLX 2.12.2 mtplx/cache_state.py, VllmMetalPagedKVCache; docs/mtplx.md says what differs.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pagedkv/base/error.h"
#include "pagedkv/base/executor.h"
#include "pagedkv/base/tensor.h"
#include "pagedkv/core/kv_quant.h"
#include "pagedkv/kernels/pages.h"

namespace [[gnu::visibility("default")]] pagedkv {

// What is left unset takes the default named beside it.
struct PagedKVCacheOptions {
  std::optional<int> block_size = std::nullopt;      // 16; tokens of a page, 1..256
  std::optional<int32_t> num_blocks = std::nullopt;  // 1024; pages before any growth, at least 1
  std::optional<DType> dtype = std::nullopt;  // the first write's; given: what is not quantised is
                                              // stored and read back so, whatever comes in
  std::optional<PagedKVQuantConfig> quant = std::nullopt;  // off
  std::optional<bool> dynamic = std::nullopt;              // true: grow beyond num_blocks
  std::optional<int64_t> context_window =
      std::nullopt;  // 0 (none); tokens: growth stops there unless more
                     // are needed
  std::optional<int> sliding_window =
      std::nullopt;  // none; given, it replaces attend's (0: no window)
  std::optional<int64_t> max_bytes = std::nullopt;  // 0: what the machine allows
  int num_layers = 1;
  Executor* executor = nullptr;  // null: the calling thread; must outlive the cache
  // Asked before memory is committed, with its bytes; false refuses. For tests of failure.
  std::function<bool(int64_t bytes)> commit_hook = nullptr;

  // `given`, with what it leaves unset taken from the environment; what is unset there too stays
  // unset. Ours win over the seed's:
  //   block_size      PAGEDKV_BLOCK_SIZE             MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE
  //   num_blocks      PAGEDKV_NUM_BLOCKS             MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS, raised where
  //                                                  growth is on as initial_num_blocks() says
  //   quant, dtype    PAGEDKV_CACHE_TYPE_K and _V, PAGEDKV_KV_CACHE_DTYPE (a page format)
  //                                                  MTPLX_VLLM_METAL_PAGED_KV_QUANT,
  //                                                  MTPLX_PAGED_KV_QUANT
  //   dynamic         PAGEDKV_DYNAMIC                MTPLX_DYNAMIC_PAGED_KV
  //   context_window  PAGEDKV_CTX_SIZE               MTPLX_CONTEXT_WINDOW_TOKENS
  //   sliding_window  PAGEDKV_SLIDING_WINDOW         MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW
  //   max_bytes       PAGEDKV_KV_CACHE_MEMORY_BYTES
  // An empty or blank variable counts as unset. Throws std::invalid_argument naming the variable and
  // its value where it cannot be read; where the seed takes its default then, so do we, with a warning.
  static PagedKVCacheOptions from_environment(PagedKVCacheOptions given);
  static PagedKVCacheOptions from_environment();
};

// How many blocks a dynamic cache starts with (the seed's rule for a request about to come).
struct InitialSize {
  int64_t configured = 1024;  // blocks
  int block_size = 16;
  std::optional<int64_t> min_blocks;  // unset: configured
  int64_t tokens = 0;                 // that the coming request may need
  int64_t previous_high_water = 0;    // tokens
  int64_t margin = 128;               // tokens

  // The same with what MTPLX_DYNAMIC_PAGED_KV_{MIN_BLOCKS,TOKENS,PREVIOUS_HIGH_WATER,MARGIN} say.
  InitialSize with_environment() const;
};
//   floor = max(configured, min_blocks), need = max(tokens, (3 high_water + 1) / 2) + margin;
//   floor where need <= margin, else max(floor, ceil(need / block_size)).
int64_t initial_num_blocks(const InitialSize& size) noexcept;

enum class AttentionPhase : uint8_t { kPrefill, kDecode };  // more than one query token, or one

struct PagedKVCacheStats {
  std::string key_format, value_format;  // page formats; empty before the first write
  std::string kernel_set;
  int num_layers = 1, block_size = 0;
  int64_t num_blocks = 0;            // of capacity
  int64_t capacity = 0, offset = 0;  // tokens
  int64_t updates = 0;               // writes of a layer, restores included
  int64_t allocation_events = 0;     // times pages were taken
  int64_t grow_events = 0, shrink_events = 0;
  int64_t reads = 0;                              // of keys, values or both
  int64_t dequant_reads = 0, dequant_tokens = 0;  // of those, from quantised pages; rows of a layer
  int64_t pages_in_use = 0, pages_peak = 0, pages_capacity = 0;
  double block_utilization = 0;  // offset / (pages_in_use * block_size)
  int64_t bytes_reserved = 0, bytes_committed = 0, bytes_resident = 0, bytes_in_use = 0;
  int64_t bytes_moved = 0;  // by growth: always 0
  struct AttentionCalls {
    std::string kernel_set;
    std::array<int64_t, 2> by_phase{};  // [AttentionPhase]
  };
  std::vector<AttentionCalls> attention_calls = {};
  struct Fallback {
    std::string reason;
    int64_t calls = 0;
  };
  std::vector<Fallback> fallbacks = {};  // calls that no fast kernel served
  double commit_seconds = 0;             // making room: of which touching new pages
  double touch_seconds = 0;
  double write_seconds = 0, attention_seconds = 0, read_seconds = 0;
};

// One JSON object, keys as the fields above.
std::string to_json(const PagedKVCacheStats& stats);

struct AttendOptions {
  int layer = 0;
  std::optional<float> scale;    // 1 / sqrt(head_dim)
  bool causal = true;            // the queries are the newest tokens; false: all see all tokens
  int sliding_window = 0;        // > 0: a query sees the last `sliding_window` tokens up to its own
  float logit_softcap = 0;       // > 0: scores become cap * tanh(score / cap)
  std::span<const float> sinks;  // [num_q_heads]
  std::span<const uint8_t> mask;  // [num_queries, offset]; 0 hides, beside the rules above
  std::span<const float> bias;    // [num_queries, offset]; added to scaled scores, -inf hides
  float* log_sum_exp = nullptr;   // [num_queries, num_q_heads]
};

// Which keys the next queries may see, as mlx-lm's create_attention_mask gives it.
struct CacheMask {
  enum class Kind : uint8_t { kNone, kCausal, kArray } kind = Kind::kNone;
  int64_t rows = 0, columns = 0;
  std::vector<uint8_t> array;  // [rows, columns], 1: visible
};

class PagedKVCache {
 public:
  // Reads no environment but PAGEDKV_KERNELS. Throws std::invalid_argument naming an option and its
  // limits. A cache that was moved from may be assigned to or destroyed, no more.
  explicit PagedKVCache(PagedKVCacheOptions options = {});
  PagedKVCache(PagedKVCache&&) noexcept;
  PagedKVCache& operator=(PagedKVCache&&) noexcept;
  ~PagedKVCache();

  // A cache that holds a copy of the first `offset` tokens of `entry`: anything with keys, values and
  // offset, as members (tensors or views; empty ones hold nothing) or as another PagedKVCache. A
  // negative offset counts as 0, one beyond the rows as all of them.
  template <class Entry>
  static PagedKVCache from_cache(const Entry& entry, PagedKVCacheOptions options = {}) {
    return from_arrays(entry.keys, entry.values, entry.offset, std::move(options));
  }
  static PagedKVCache from_cache(const PagedKVCache& source, PagedKVCacheOptions options = {});
  static PagedKVCache from_arrays(const TensorView& keys, const TensorView& values, int64_t offset,
                                  PagedKVCacheOptions options = {});

  // Stores new tokens behind those that the layer has; both views have the same tokens and heads. No
  // token is legal: the first write sets shapes all the same.
  void update(const TensorView& keys, const TensorView& values, int layer = 0);
  // The same, then what the layer holds: state().
  std::pair<Tensor, Tensor> update_and_fetch(const TensorView& keys, const TensorView& values,
                                             int layer = 0);

  // Attention of queries [num_q_heads, num_queries, head_dim], the layer's newest tokens (update
  // first). The result [num_q_heads, num_queries, value_head_dim] has their dtype.
  Tensor attend(const TensorView& queries, const AttendOptions& options = {});
  void attend(const TensorView& queries, const MutableTensorView& out,
              const AttendOptions& options = {});

  // Contiguous copies [num_kv_heads, offset, head_dim] in the dtype they came in; empty where nothing
  // is held. Quantised pages are read as code * scale, rounded to that dtype.
  Tensor keys(int layer = 0) const;
  Tensor values(int layer = 0) const;
  std::pair<Tensor, Tensor> state(int layer = 0) const;

  // Replaces everything, one pair (keys, values) of equally many tokens for each layer; shapes and
  // dtypes may change. Empty views empty the cache. set_keys and set_values (one layer only) keep the
  // other half, cut to as many tokens; they throw std::invalid_argument where it has fewer.
  using Pair = std::pair<TensorView, TensorView>;
  void set_state(std::span<const Pair> layers);
  void set_state(const TensorView& keys, const TensorView& values);
  void set_keys(const TensorView& keys);
  void set_values(const TensorView& values);

  // {block_size, num_blocks, offset} as decimals. Setting it: nothing where empty; a cache without
  // pages takes the geometry; one with pages keeps its own and forgets tokens beyond the offset. An
  // offset beyond the tokens held is CapacityError where it exceeds the capacity, else
  // std::invalid_argument; so are texts that are no numbers, and fewer than three.
  std::array<std::string, 3> meta_state() const;
  void set_meta_state(std::span<const std::string> meta);

  // Forgets the last num_tokens tokens, of every layer alike (trim(0) undoes a step that not every
  // layer finished); returns how many it forgot. Negative: std::invalid_argument.
  int64_t trim(int64_t num_tokens);
  // Forgets all tokens, shapes and dtypes, and gives the memory back. Capacity stays.
  void reset() noexcept;

  int64_t offset() const noexcept;  // tokens held, in every layer
  int64_t offset(int layer) const;
  bool empty() const noexcept { return offset() == 0; }
  int64_t capacity() const noexcept;  // tokens that fit without growth: of the pages there are
  // Raises capacity to at least num_tokens, by the growth rule, with `context_window` in place of the
  // option's where it is given. Where there are pages the memory is there on return; before the first
  // write, which sets shapes, none is.
  void grow_to_capacity(int64_t num_tokens, std::optional<int64_t> context_window = std::nullopt);
  // Gives back the pages beyond those in use, and beyond num_tokens of capacity. Returns the capacity.
  int64_t shrink_to_capacity(int64_t num_tokens);
  int64_t size_bytes() const noexcept;  // memory behind the pages: committed, scales included

  CacheMask make_mask(int64_t num_queries, bool return_array = false,
                      std::optional<int64_t> window_size = std::nullopt) const;

  PagedKVCacheStats stats() const;
  int num_layers() const noexcept;
  int block_size() const noexcept;
  const PagedKVQuantConfig& quant() const noexcept;
  // The layer's pages and the block table, for kernels of the caller's. Empty before the first write.
  // The views stay valid across growth, until reset or set_state; those of the pages as long as what
  // pages_owner() returned is held. Of the pages the first committed_blocks() have their memory, in
  // which shrink_to_capacity() leaves no more than it keeps.
  LayerPages layer_pages(int layer = 0) const;
  int64_t committed_blocks() const noexcept;
  std::shared_ptr<const void> pages_owner() const noexcept;
  std::span<const PageId> block_table() const noexcept;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
