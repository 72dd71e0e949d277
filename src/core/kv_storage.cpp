#include "core/kv_storage.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace pagedkv {
namespace {

// Tokens that are converted at a time: enough for every thread, little enough to stay in L2.
constexpr int64_t kRun = 128;

PagePoolOptions pool_options(const KvShape& shape, const KvGeometry& geometry) {
  const LayerSpec layer{shape.num_kv_heads, shape.key_head_dim, shape.value_head_dim,
                        shape.key_format, shape.value_format};
  PagePoolOptions options;
  options.groups = {{0, std::vector<LayerSpec>(static_cast<size_t>(geometry.num_layers), layer)}};
  options.page_size = geometry.block_size;
  options.num_pages = geometry.num_blocks;
  options.dynamic = geometry.dynamic;
  options.max_bytes = geometry.max_bytes;
  options.commit_hook = geometry.commit_hook;
  return options;
}

int64_t blocks_for(int64_t tokens, int64_t block_size) noexcept {
  return tokens / block_size + (tokens % block_size != 0);
}

// [num_tokens, num_heads, head_dim] floats of a view: the view itself where it has that form.
const float* float_rows(const TensorView& view, std::vector<float>& scratch) {
  if (view.dtype == DType::kF32 && view.head_stride == view.head_dim &&
      view.token_stride == view.num_heads * view.head_dim)
    return static_cast<const float*>(view.data);
  scratch.resize(static_cast<size_t>(view.num_heads * view.num_tokens * view.head_dim));
  to_floats(view, scratch.data());
  return scratch.data();
}

}  // namespace

std::string KvShape::text() const {
  return std::to_string(num_kv_heads) + " kv heads, head_dim " + std::to_string(key_head_dim) +
         " (K) and " + std::to_string(value_head_dim) + " (V), " +
         std::string(dtype_name(key_dtype)) + " (K) and " + std::string(dtype_name(value_dtype)) +
         " (V)";
}

KvStorage::KvStorage(const KvShape& shape, const KvGeometry& geometry)
    : shape_(shape),
      geometry_(geometry),
      pool_(pool_options(shape, geometry)),
      table_(pool_),
      offsets_(static_cast<size_t>(geometry.num_layers)) {}

int64_t KvStorage::offset() const noexcept {
  return *std::min_element(offsets_.begin(), offsets_.end());
}

int64_t KvStorage::window_pages(int64_t context_window) const noexcept {
  return blocks_for(context_window, geometry_.block_size);
}

void KvStorage::fail() const {
  if (pool_.refusal() == PagePool::Refusal::kCapacity) throw CapacityError(pool_.refusal_text());
  throw MemoryError(pool_.refusal_text());
}

void KvStorage::make_room(int layer, int64_t num_tokens) {
  if (num_tokens > INT32_MAX - offsets_[layer])  // positions are int32 in the kernels
    throw CapacityError("paged KV cache capacity exceeded: " + std::to_string(offsets_[layer]) +
                        " + " + std::to_string(num_tokens) + " tokens > " +
                        std::to_string(INT32_MAX));
  const int64_t length = offsets_[layer] + num_tokens;
  if (length <= table_.length()) return;
  if (length > capacity()) {
    if (!geometry_.dynamic)
      throw CapacityError("paged KV cache capacity exceeded: " + std::to_string(length) + " > " +
                          std::to_string(capacity()) + " tokens, and growth is off");
    if (!pool_.try_grow(0, blocks_for(length, geometry_.block_size),
                        window_pages(geometry_.context_window)))
      fail();
  }
  table_.append(length - table_.length());
}

void KvStorage::append(int layer, const TensorView& keys, const TensorView& values,
                       Executor& executor) {
  const Mark before = mark(layer);
  try {
    make_room(layer, keys.num_tokens);
    write(layer, keys, values, executor);
  } catch (...) {
    go_back(layer, before);
    throw;
  }
}

void KvStorage::go_back(int layer, const Mark& mark) {
  offsets_[layer] = mark.offset;
  table_.trim_to(mark.length);
  pool_.shrink_to(0, mark.capacity / pool_.page_size());
}

// Runs of at most kRun tokens from `first` on: visit(tokens before this run, count). slots_ holds theirs.
template <class Visit>
void KvStorage::for_each_run(int64_t first, int64_t count, const Visit& visit) const {
  for (int64_t done = 0; done < count; done += kRun) {
    const int64_t n = std::min(kRun, count - done);
    slots_.resize(static_cast<size_t>(n));
    table_.slot_mapping(0, first + done, slots_);
    visit(done, n);
  }
}

bool KvStorage::can_store(const TensorView& keys, const TensorView& values) {
  if (!has_scales(shape_.key_format) && !has_scales(shape_.value_format)) return true;
  StoreArgs args;
  args.pages = pool_.layer_pages(0);
  const std::vector<int64_t> slots(static_cast<size_t>(std::min(kRun, keys.num_tokens)));
  args.slot_mapping = slots.data();  // any slot: nothing is stored
  for (int64_t done = 0; done < keys.num_tokens; done += kRun) {
    const int64_t n = std::min(kRun, keys.num_tokens - done);
    args.keys = float_rows(keys.tokens(done, n), keys_);
    args.values = float_rows(values.tokens(done, n), values_);
    args.num_tokens = static_cast<int>(n);
    if (!storable(args)) return false;
  }
  return true;
}

void KvStorage::write(int layer, const TensorView& keys, const TensorView& values,
                      Executor& executor) {
  for_each_run(offsets_[layer], keys.num_tokens, [&](int64_t done, int64_t n) {
    StoreArgs args;
    args.pages = pool_.layer_pages(layer);
    args.keys = float_rows(keys.tokens(done, n), keys_);
    args.values = float_rows(values.tokens(done, n), values_);
    args.slot_mapping = slots_.data();
    args.num_tokens = static_cast<int>(n);
    if (!store(args, executor)) throw std::logic_error("paged KV cache: a row was not storable");
  });
  offsets_[layer] += keys.num_tokens;
}

void KvStorage::read(int layer, const MutableTensorView& keys, const MutableTensorView& values,
                     Executor& executor) const {
  const auto rows = [](const MutableTensorView& view, int64_t count, std::vector<float>& scratch) {
    if (view.data == nullptr) return static_cast<float*>(nullptr);
    scratch.resize(static_cast<size_t>(view.num_heads * view.head_dim * count));
    return scratch.data();
  };
  for_each_run(0, offsets_[layer], [&](int64_t done, int64_t n) {
    FetchArgs args;
    args.pages = pool_.layer_pages(layer);
    args.slot_mapping = slots_.data();
    args.num_tokens = static_cast<int>(n);
    args.keys = rows(keys, n, keys_);
    args.values = rows(values, n, values_);
    fetch(args, executor);
    if (args.keys != nullptr) from_floats(args.keys, keys.tokens(done, n));
    if (args.values != nullptr) from_floats(args.values, values.tokens(done, n));
  });
}

void KvStorage::copy_rows(const KvStorage& from, int layer, int64_t num_tokens) {
  make_room(layer, num_tokens);
  const auto copy = [&](const PageArray& source, const PageArray& target, int64_t from_slot,
                        int64_t to_slot) {
    const int64_t heads = shape_.num_kv_heads;
    const int64_t bytes = heads * row_bytes(source.format, source.head_dim);
    std::memcpy(target.data + to_slot * bytes, source.data + from_slot * bytes,
                static_cast<size_t>(bytes));
    if (source.scales != nullptr)
      std::memcpy(target.scales + to_slot * heads, source.scales + from_slot * heads,
                  static_cast<size_t>(heads) * sizeof(float));
  };
  const LayerPages source = from.pool_.layer_pages(layer), target = pool_.layer_pages(layer);
  from.for_each_run(0, num_tokens, [&](int64_t done, int64_t n) {
    slots_.resize(static_cast<size_t>(n));
    table_.slot_mapping(0, done, slots_);
    for (int64_t t = 0; t < n; ++t) {
      copy(source.keys, target.keys, from.slots_[t], slots_[t]);
      copy(source.values, target.values, from.slots_[t], slots_[t]);
    }
  });
  offsets_[layer] = num_tokens;
}

void KvStorage::grow_to(int64_t num_tokens, int64_t context_window) {
  if (num_tokens > capacity() && !geometry_.dynamic)
    throw CapacityError("paged KV cache capacity " + std::to_string(capacity()) +
                        " tokens cannot grow to " + std::to_string(num_tokens) + ": growth is off");
  if (!pool_.try_grow(0, blocks_for(num_tokens, geometry_.block_size),
                      window_pages(context_window)))
    fail();
}

void KvStorage::shrink_to(int64_t num_tokens) {
  pool_.shrink_to(0, std::max<int64_t>(1, blocks_for(num_tokens, geometry_.block_size)));
}

void KvStorage::trim_to(int64_t num_tokens) {
  table_.trim_to(std::min(table_.length(), num_tokens));
  for (int64_t& offset : offsets_) offset = std::min(offset, num_tokens);
}

}  // namespace pagedkv
