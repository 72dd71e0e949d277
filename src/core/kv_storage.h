// What a PagedKVCache holds once its shapes are known: a pool of its own, the block table of its one
// sequence and how many tokens each layer has written. Knows no options and counts nothing that the
// pool does not count. Not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/base/tensor.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/core/page_pool.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv {

// Of every layer.
struct KvShape {
  int num_kv_heads = 0;
  int key_head_dim = 0, value_head_dim = 0;
  DType key_dtype = DType::kF32, value_dtype = DType::kF32;  // as they are read back
  PageFormat key_format = PageFormat::kF32, value_format = PageFormat::kF32;
  bool operator==(const KvShape&) const noexcept = default;
  std::string text() const;
};

struct KvGeometry {
  int block_size = 16;
  int32_t num_blocks = 1024;
  bool dynamic = true;
  int64_t context_window = 0;  // tokens: growth stops there unless more are needed
  int64_t max_bytes = 0;
  int num_layers = 1;
  std::function<bool(int64_t)> commit_hook;
};

class KvStorage {
 public:
  KvStorage(const KvShape& shape, const KvGeometry& geometry);

  const KvShape& shape() const noexcept { return shape_; }
  PagePool& pool() noexcept { return pool_; }
  const PagePool& pool() const noexcept { return pool_; }
  std::span<const PageId> pages() const noexcept { return table_.pages(0); }
  int64_t capacity() const noexcept { return pool_.capacity(0) * pool_.page_size(); }
  int64_t offset(int layer) const noexcept { return offsets_[layer]; }
  int64_t offset() const noexcept;  // tokens that every layer has

  // Whether pages can hold these rows: none is quantised, or all are finite.
  bool can_store(const TensorView& keys, const TensorView& values);
  // Stores rows behind the layer's tokens; can_store() first. Throws CapacityError or MemoryError; whatever it
  // throws, nothing has changed.
  void append(int layer, const TensorView& keys, const TensorView& values, Executor& executor);
  // What append() changes, to go back to: after it in the same layer, with no other call between.
  struct Mark {
    int64_t offset, length, capacity;
  };
  Mark mark(int layer) const noexcept { return {offsets_[layer], table_.length(), capacity()}; }
  void go_back(int layer, const Mark& mark);
  // Copies the layer's tokens out; a view without data is not wanted.
  void read(int layer, const MutableTensorView& keys, const MutableTensorView& values,
            Executor& executor) const;
  // Takes the first num_tokens tokens of another storage of the same shape, byte for byte. Throws as append(), but
  // room for some of them may have been made.
  void copy_rows(const KvStorage& from, int layer, int64_t num_tokens);

  // Capacity, with its memory; throws as append().
  void grow_to(int64_t num_tokens, int64_t context_window);
  void shrink_to(int64_t num_tokens);
  void trim_to(int64_t num_tokens);  // every layer, at most offset()

 private:
  void make_room(int layer, int64_t num_tokens);
  void write(int layer, const TensorView& keys, const TensorView& values, Executor& executor);
  template <class Visit>
  void for_each_run(int64_t first, int64_t count, const Visit& visit) const;
  int64_t window_pages(int64_t context_window) const noexcept;
  [[noreturn]] void fail() const;

  KvShape shape_;
  KvGeometry geometry_;
  PagePool pool_;
  BlockTable table_;
  std::vector<int64_t> offsets_;              // [layer]
  mutable std::vector<float> keys_, values_;  // rows of one run
  mutable std::vector<int64_t> slots_;
};

}  // namespace pagedkv
