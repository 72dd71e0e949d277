#include "pagedkv/core/paged_kv_cache.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "core/environment.h"
#include "core/kv_storage.h"
#include "pagedkv/kernels/attention.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("paged KV cache: " + text);
}

std::string str(int64_t value) { return std::to_string(value); }

// Adds the time it lives to a counter.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds), start_(Clock::now()) {}
  ~Timer() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& seconds_;
  Clock::time_point start_;
};

// That keys and values are rows of the same tokens and kv heads.
void check_rows(const TensorView& keys, const TensorView& values) {
  check_tensor(keys, "keys");
  check_tensor(values, "values");
  if (keys.num_heads < 1 || keys.num_heads > 65536)
    fail("keys have " + str(keys.num_heads) + " heads: must be in 1..65536");
  if (values.num_heads != keys.num_heads)
    fail("values have " + str(values.num_heads) + " heads, keys have " + str(keys.num_heads));
  if (values.num_tokens != keys.num_tokens)
    fail("values have " + str(values.num_tokens) + " tokens, keys have " + str(keys.num_tokens));
  for (const int64_t dim : {keys.head_dim, values.head_dim})
    if (dim < 1 || dim > 512) fail("head_dim " + str(dim) + ": must be in 1..512");
}

bool is_nothing(const TensorView& view) { return view.num_tokens == 0 || view.num_heads == 0; }

int64_t parse_meta(const std::string& text, const char* what) {
  const auto value = parse_integer(text);
  if (!value) fail(std::string("meta_state ") + what + " \"" + text + "\": must be a whole number");
  return *value;
}

}  // namespace

struct PagedKVCache::Impl {
  explicit Impl(PagedKVCacheOptions o);

  void check_layer(int layer) const {
    if (layer < 0 || layer >= options.num_layers)
      fail("layer " + str(layer) + ": must be in 0.." + str(options.num_layers - 1));
  }
  void check_one_layer(const char* call) const {
    if (options.num_layers != 1)
      fail(std::string(call) + " is for a cache of one layer; this has " + str(options.num_layers));
  }
  void check_queries(const TensorView& queries, int layer) const;
  KvShape shape_of(const TensorView& keys, const TensorView& values) const;
  std::shared_ptr<KvStorage> new_storage(const KvShape& shape) const;
  void write(KvStorage& into, int layer, const TensorView& keys, const TensorView& values);
  std::pair<Tensor, Tensor> read(int layer, bool want_keys, bool want_values);
  void replace(std::shared_ptr<KvStorage> next);
  void count_attention(int64_t num_queries);
  Executor& executor() { return options.executor != nullptr ? *options.executor : own_executor; }
  int64_t capacity() const noexcept {
    return storage ? storage->capacity() : int64_t{geometry.num_blocks} * geometry.block_size;
  }

  PagedKVCacheOptions options;
  PagedKVQuantConfig quant;
  KvGeometry geometry;  // num_blocks: what the next allocation begins with
  ThreadPool own_executor{1};
  std::shared_ptr<KvStorage> storage;  // null before the first write; shared with pages_owner()

  PagedKVCacheStats counters;  // those that are counted here
  PagePoolStats past;          // of storages that are gone
  AttentionPlan plan;
  std::vector<float> queries, rows;  // attend's
};

PagedKVCache::Impl::Impl(PagedKVCacheOptions o) : options(std::move(o)) {
  kernels();  // a bad PAGEDKV_KERNELS shows here: kernel calls cannot throw
  quant = options.quant.value_or(PagedKVQuantConfig());
  geometry.block_size = options.block_size.value_or(16);
  geometry.num_blocks = options.num_blocks.value_or(1024);
  geometry.dynamic = options.dynamic.value_or(true);
  geometry.context_window = options.context_window.value_or(0);
  geometry.max_bytes = options.max_bytes.value_or(0);
  geometry.num_layers = options.num_layers;
  geometry.commit_hook = options.commit_hook;
  if (geometry.block_size < 1 || geometry.block_size > 256)
    fail("block_size " + str(geometry.block_size) + ": must be in 1..256");
  if (geometry.num_blocks < 1)
    fail("num_blocks " + str(geometry.num_blocks) + ": must be at least 1");
  if (geometry.context_window < 0)
    fail("context_window " + str(geometry.context_window) + ": must be at least 0 (0: none)");
  if (options.sliding_window.value_or(0) < 0)
    fail("sliding_window " + str(*options.sliding_window) + ": must be at least 0 (0: none)");
  if (geometry.max_bytes < 0)
    fail("max_bytes " + str(geometry.max_bytes) +
         ": must be at least 0 (0: what the machine allows)");
  if (options.num_layers < 1 || options.num_layers > 65536)
    fail("num_layers " + str(options.num_layers) + ": must be in 1..65536");
}

// ---- writing

KvShape PagedKVCache::Impl::shape_of(const TensorView& keys, const TensorView& values) const {
  KvShape shape;
  shape.num_kv_heads = static_cast<int>(keys.num_heads);
  shape.key_head_dim = static_cast<int>(keys.head_dim);
  shape.value_head_dim = static_cast<int>(values.head_dim);
  shape.key_dtype = options.dtype.value_or(keys.dtype);
  shape.value_dtype = options.dtype.value_or(values.dtype);
  shape.key_format = page_format(quant.keys(), shape.key_dtype);
  shape.value_format = page_format(quant.values(), shape.value_dtype);
  check_head_dim(shape.key_format, shape.key_head_dim);
  check_head_dim(shape.value_format, shape.value_head_dim);
  return shape;
}

std::shared_ptr<KvStorage> PagedKVCache::Impl::new_storage(const KvShape& shape) const {
  return std::make_shared<KvStorage>(shape, geometry);
}

// Rows that were checked, into a storage of their shape.
void PagedKVCache::Impl::write(KvStorage& into, int layer, const TensorView& keys,
                               const TensorView& values) {
  const Timer timer(counters.write_seconds);
  if (!into.can_store(keys, values))
    fail("a row has an infinity or a NaN, which " + quant.mode() + " pages cannot hold");
  into.append(layer, keys, values, executor());
  ++counters.updates;
}

void PagedKVCache::update(const TensorView& keys, const TensorView& values, int layer) {
  Impl& p = *impl_;
  p.check_layer(layer);
  check_rows(keys, values);
  const KvShape shape = p.shape_of(keys, values);
  if (p.storage) {
    if (shape != p.storage->shape())
      fail("shape/dtype changed: had " + p.storage->shape().text() + ", got " + shape.text());
    p.write(*p.storage, layer, keys, values);
    return;
  }
  auto storage = p.new_storage(shape);
  p.write(*storage, layer, keys, values);
  p.storage = std::move(storage);
}

std::pair<Tensor, Tensor> PagedKVCache::update_and_fetch(const TensorView& keys,
                                                         const TensorView& values, int layer) {
  Impl& p = *impl_;
  p.check_layer(layer);
  const auto before = p.storage ? std::optional(p.storage->mark(layer)) : std::nullopt;
  update(keys, values, layer);
  try {
    return state(layer);
  } catch (...) {
    if (before)
      p.storage->go_back(layer, *before);
    else
      p.storage.reset();
    --p.counters.updates;
    throw;
  }
}

PagedKVCache PagedKVCache::from_arrays(const TensorView& keys, const TensorView& values,
                                       int64_t offset, PagedKVCacheOptions options) {
  PagedKVCache cache(std::move(options));
  const int64_t count = std::clamp<int64_t>(offset, 0, std::max<int64_t>(0, keys.num_tokens));
  if (count == 0 || is_nothing(keys) || is_nothing(values)) return cache;
  if (values.num_tokens < count)
    fail("values have " + str(values.num_tokens) + " tokens, " + str(count) + " are needed");
  check_tensor(keys, "keys");
  check_tensor(values, "values");
  cache.update(keys.tokens(0, count), values.tokens(0, count));
  return cache;
}

PagedKVCache PagedKVCache::from_cache(const PagedKVCache& source, PagedKVCacheOptions options) {
  options.num_layers = source.num_layers();
  PagedKVCache cache(std::move(options));
  const int64_t count = source.offset();
  if (count == 0) return cache;
  const KvStorage& from = *source.impl_->storage;
  Impl& p = *cache.impl_;
  KvShape shape = from.shape();
  shape.key_dtype = p.options.dtype.value_or(shape.key_dtype);
  shape.value_dtype = p.options.dtype.value_or(shape.value_dtype);
  shape.key_format = page_format(p.quant.keys(), shape.key_dtype);
  shape.value_format = page_format(p.quant.values(), shape.value_dtype);
  if (shape != from.shape()) {  // another format: through the dtype that reads give
    for (int layer = 0; layer < source.num_layers(); ++layer) {
      const auto [keys, values] = source.state(layer);
      cache.update(keys.view().tokens(0, count), values.view().tokens(0, count), layer);
    }
    return cache;
  }
  auto storage = p.new_storage(shape);
  for (int layer = 0; layer < source.num_layers(); ++layer) {
    const Timer timer(p.counters.write_seconds);
    storage->copy_rows(from, layer, count);
    ++p.counters.updates;
  }
  p.storage = std::move(storage);
  return cache;
}

// ---- attention

void PagedKVCache::Impl::check_queries(const TensorView& queries, int layer) const {
  check_layer(layer);
  check_tensor(queries, "queries");
  if (!storage) fail("attention over an empty cache: update first");
  const KvShape& shape = storage->shape();
  if (queries.num_tokens > storage->offset(layer))
    fail(str(queries.num_tokens) + " queries, but the layer holds " + str(storage->offset(layer)) +
         " tokens: queries are its newest tokens");
  if (queries.head_dim != shape.key_head_dim)
    fail("queries have head_dim " + str(queries.head_dim) + ", keys have " +
         str(shape.key_head_dim));
  if (queries.num_heads < 1 || queries.num_heads > INT32_MAX ||
      queries.num_heads % shape.num_kv_heads != 0)
    fail(str(queries.num_heads) + " query heads: must be a multiple of " + str(shape.num_kv_heads) +
         " kv heads");
}

Tensor PagedKVCache::attend(const TensorView& queries, const AttendOptions& options) {
  impl_->check_queries(queries, options.layer);
  Tensor out(queries.dtype, queries.num_heads, queries.num_tokens,
             impl_->storage->shape().value_head_dim);
  attend(queries, out.view(), options);
  return out;
}

void PagedKVCache::attend(const TensorView& queries, const MutableTensorView& out,
                          const AttendOptions& options) {
  Impl& p = *impl_;
  p.check_queries(queries, options.layer);
  check_tensor(out, "out");
  const KvShape& shape = p.storage->shape();
  const int64_t held = p.storage->offset(options.layer), count = queries.num_tokens;
  if (out.num_heads != queries.num_heads || out.num_tokens != count ||
      out.head_dim != shape.value_head_dim)
    fail("out is [" + str(out.num_heads) + ", " + str(out.num_tokens) + ", " + str(out.head_dim) +
         "]: must be [" + str(queries.num_heads) + ", " + str(count) + ", " +
         str(shape.value_head_dim) + "]");
  const auto check_size = [](size_t got, int64_t wanted, const char* what) {
    if (got != 0 && static_cast<int64_t>(got) != wanted)
      fail(std::string(what) + " has " + str(static_cast<int64_t>(got)) + " elements: must be " +
           str(wanted));
  };
  check_size(options.sinks.size(), queries.num_heads, "sinks");
  check_size(options.mask.size(), count * held, "mask");
  check_size(options.bias.size(), count * held, "bias");
  if (count == 0) return;

  const Timer timer(p.counters.attention_seconds);
  p.queries.resize(static_cast<size_t>(count * queries.num_heads * queries.head_dim));
  p.rows.resize(static_cast<size_t>(count * queries.num_heads * shape.value_head_dim));
  to_floats(queries, p.queries.data());
  const int32_t query_start[] = {0, static_cast<int32_t>(count)};
  const auto seq_len = static_cast<int32_t>(held);
  AttentionArgs args;
  args.queries = p.queries.data();
  args.out = p.rows.data();
  args.log_sum_exp = options.log_sum_exp;
  args.pages = p.storage->pool().layer_pages(options.layer);
  args.num_q_heads = static_cast<int>(queries.num_heads);
  args.num_seqs = 1;
  args.query_start = query_start;
  args.seq_lens = &seq_len;
  args.block_table = p.storage->pages().data();
  args.block_table_stride = static_cast<int64_t>(p.storage->pages().size());
  args.scale = options.scale.value_or(1.0f / std::sqrt(static_cast<float>(shape.key_head_dim)));
  args.causal = options.causal;
  args.sliding_window = p.options.sliding_window.value_or(std::max(0, options.sliding_window));
  args.logit_softcap = options.logit_softcap;
  if (!options.sinks.empty()) args.sinks = options.sinks.data();
  if (!options.mask.empty()) args.mask = options.mask.data(), args.mask_stride = held;
  if (!options.bias.empty()) args.bias = options.bias.data(), args.bias_stride = held;
  p.plan.prepare(args, p.executor().num_workers());
  pagedkv::attend(args, p.plan, p.executor());
  from_floats(p.rows.data(), out);
  p.count_attention(count);
}

void PagedKVCache::Impl::count_attention(int64_t num_queries) {
  const KernelSet& set = kernels();
  const auto phase = num_queries > 1 ? AttentionPhase::kPrefill : AttentionPhase::kDecode;
  auto& calls = counters.attention_calls;
  auto entry = std::find_if(calls.begin(), calls.end(),
                            [&](const auto& c) { return c.kernel_set == set.name; });
  if (entry == calls.end()) entry = calls.insert(entry, {set.name, {}});
  ++entry->by_phase[static_cast<size_t>(phase)];
}

// ---- reading and replacing

std::pair<Tensor, Tensor> PagedKVCache::Impl::read(int layer, bool want_keys, bool want_values) {
  check_layer(layer);
  const Timer timer(counters.read_seconds);
  ++counters.reads;
  if (!storage || storage->offset(layer) == 0) return {};
  const KvShape& s = storage->shape();
  const int64_t count = storage->offset(layer);
  std::pair<Tensor, Tensor> out;
  if (want_keys) out.first = Tensor(s.key_dtype, s.num_kv_heads, count, s.key_head_dim);
  if (want_values) out.second = Tensor(s.value_dtype, s.num_kv_heads, count, s.value_head_dim);
  storage->read(layer, want_keys ? out.first.view() : MutableTensorView(),
                want_values ? out.second.view() : MutableTensorView(), executor());
  if ((want_keys && has_scales(s.key_format)) || (want_values && has_scales(s.value_format))) {
    ++counters.dequant_reads;
    counters.dequant_tokens += count;
  }
  return out;
}

Tensor PagedKVCache::keys(int layer) const { return impl_->read(layer, true, false).first; }
Tensor PagedKVCache::values(int layer) const { return impl_->read(layer, false, true).second; }
std::pair<Tensor, Tensor> PagedKVCache::state(int layer) const {
  return impl_->read(layer, true, true);
}

// The old pages go when the new ones hold everything.
void PagedKVCache::Impl::replace(std::shared_ptr<KvStorage> next) {
  if (storage) {
    const PagePoolStats s = storage->pool().stats();
    past.allocations += s.allocations;
    past.grow_events += s.grow_events;
    past.shrink_events += s.shrink_events;
    past.bytes_moved += s.bytes_moved;
    past.commit_seconds += s.commit_seconds;
    past.touch_seconds += s.touch_seconds;
    past.pages_peak = std::max(past.pages_peak, s.pages_peak);
    geometry.num_blocks = static_cast<int32_t>(storage->pool().capacity(0));
  }
  storage = std::move(next);
}

void PagedKVCache::set_state(std::span<const Pair> layers) {
  Impl& p = *impl_;
  if (static_cast<int>(layers.size()) != p.options.num_layers)
    fail("state of " + str(static_cast<int64_t>(layers.size())) + " layers, the cache has " +
         str(p.options.num_layers));
  const bool nothing = std::all_of(layers.begin(), layers.end(), [](const Pair& pair) {
    return is_nothing(pair.first) && is_nothing(pair.second);
  });
  if (nothing) return reset();
  for (const auto& [keys, values] : layers) check_rows(keys, values);
  const KvShape shape = p.shape_of(layers[0].first, layers[0].second);
  for (const auto& [keys, values] : layers) {
    if (p.shape_of(keys, values) != shape)
      fail("layers of different shapes: " + shape.text() + ", and " +
           p.shape_of(keys, values).text());
    if (keys.num_tokens != layers[0].first.num_tokens)
      fail("layers of " + str(layers[0].first.num_tokens) + " and " + str(keys.num_tokens) +
           " tokens");
  }
  if (p.storage)  // the claim is what the pages have grown to
    p.geometry.num_blocks = static_cast<int32_t>(p.storage->pool().capacity(0));
  auto storage = p.new_storage(shape);
  const int64_t updates = p.counters.updates;
  try {
    for (int layer = 0; layer < p.options.num_layers; ++layer)
      p.write(*storage, layer, layers[layer].first, layers[layer].second);
  } catch (...) {
    p.counters.updates = updates;
    throw;
  }
  p.replace(std::move(storage));
}

void PagedKVCache::set_state(const TensorView& keys, const TensorView& values) {
  impl_->check_one_layer("set_state(keys, values)");
  const Pair layer(keys, values);
  set_state({&layer, 1});
}

void PagedKVCache::set_keys(const TensorView& keys) {
  impl_->check_one_layer("set_keys");
  if (is_nothing(keys)) return reset();
  const Tensor values = this->values();
  if (values.num_tokens < keys.num_tokens)
    fail("keys have " + str(keys.num_tokens) + " tokens, the cache holds values of " +
         str(values.num_tokens));
  set_state(keys, values.view().tokens(0, keys.num_tokens));
}

void PagedKVCache::set_values(const TensorView& values) {
  impl_->check_one_layer("set_values");
  if (is_nothing(values)) return reset();
  const Tensor keys = this->keys();
  if (keys.num_tokens < values.num_tokens)
    fail("values have " + str(values.num_tokens) + " tokens, the cache holds keys of " +
         str(keys.num_tokens));
  set_state(keys.view().tokens(0, values.num_tokens), values);
}

std::array<std::string, 3> PagedKVCache::meta_state() const {
  return {str(block_size()), str(capacity() / block_size()), str(offset())};
}

void PagedKVCache::set_meta_state(std::span<const std::string> meta) {
  Impl& p = *impl_;
  if (meta.empty()) return;
  if (meta.size() < 3)
    fail("meta_state has " + str(static_cast<int64_t>(meta.size())) +
         " entries: block_size, num_blocks and offset are needed");
  const int64_t size = parse_meta(meta[0], "block_size"),
                blocks = parse_meta(meta[1], "num_blocks"), tokens = parse_meta(meta[2], "offset");
  if (size < 1 || size > 256) fail("meta_state block_size " + str(size) + ": must be in 1..256");
  if (blocks < 1 || blocks > INT32_MAX)
    fail("meta_state num_blocks " + str(blocks) + ": must be in 1.." + str(INT32_MAX));
  if (tokens < 0) fail("meta_state offset " + str(tokens) + ": must be at least 0");
  const int64_t room = p.storage ? capacity() : size * blocks;
  if (tokens > room)
    throw CapacityError("paged KV cache: restored offset " + str(tokens) +
                        " exceeds page capacity " + str(room));
  if (tokens > offset())
    fail("restored offset " + str(tokens) + " exceeds the " + str(offset()) +
         " tokens that are held");
  if (p.storage) {
    p.storage->trim_to(tokens);
  } else {
    p.geometry.block_size = static_cast<int>(size);
    p.geometry.num_blocks = static_cast<int32_t>(blocks);
  }
}

int64_t PagedKVCache::trim(int64_t num_tokens) {
  if (num_tokens < 0) fail("trim of " + str(num_tokens) + " tokens: must be at least 0");
  const int64_t dropped = std::min(num_tokens, offset());
  if (impl_->storage) impl_->storage->trim_to(offset() - dropped);
  return dropped;
}

void PagedKVCache::reset() noexcept { impl_->replace(nullptr); }

// ---- size

void PagedKVCache::grow_to_capacity(int64_t num_tokens, std::optional<int64_t> context_window) {
  Impl& p = *impl_;
  const int64_t most = int64_t{std::numeric_limits<int32_t>::max()};
  if (num_tokens < 0 || num_tokens > most)
    fail("capacity of " + str(num_tokens) + " tokens: must be in 0.." + str(most));
  const int64_t window = context_window.value_or(p.geometry.context_window);
  if (window < 0) fail("context_window " + str(window) + ": must be at least 0 (0: none)");
  if (p.storage) return p.storage->grow_to(num_tokens, window);
  if (num_tokens <= p.capacity()) return;
  if (!p.geometry.dynamic)
    throw CapacityError("paged KV cache capacity " + str(p.capacity()) + " tokens cannot grow to " +
                        str(num_tokens) + ": growth is off");
  const int64_t size = p.geometry.block_size;
  p.geometry.num_blocks = static_cast<int32_t>(
      std::min<int64_t>(most, grown_pages(p.geometry.num_blocks, (num_tokens + size - 1) / size,
                                          window / size + (window % size != 0))));
}

int64_t PagedKVCache::shrink_to_capacity(int64_t num_tokens) {
  Impl& p = *impl_;
  if (num_tokens < 0) fail("capacity of " + str(num_tokens) + " tokens: must be at least 0");
  const int64_t size = p.geometry.block_size;
  if (p.storage)
    p.storage->shrink_to(num_tokens);
  else
    p.geometry.num_blocks = static_cast<int32_t>(std::clamp<int64_t>(
        num_tokens / size + (num_tokens % size != 0), 1, p.geometry.num_blocks));
  return p.capacity();
}

int64_t PagedKVCache::size_bytes() const noexcept {
  return impl_->storage ? impl_->storage->pool().stats().bytes_committed : 0;
}

CacheMask PagedKVCache::make_mask(int64_t num_queries, bool return_array,
                                  std::optional<int64_t> window_size) const {
  if (num_queries < 0) fail("mask of " + str(num_queries) + " queries: must be at least 0");
  CacheMask mask;
  if (!window_size && num_queries == 1) return mask;
  mask.kind = CacheMask::Kind::kCausal;
  if (!window_size && !return_array) return mask;
  mask.kind = CacheMask::Kind::kArray;
  constexpr int64_t kMost = int64_t{1} << 40;
  if (num_queries > kMost - offset() ||
      num_queries > kMost / std::max<int64_t>(1, offset() + num_queries))
    fail("mask of " + str(num_queries) + " queries beside " + str(offset()) + " tokens: too large");
  mask.rows = num_queries;
  mask.columns = offset() + num_queries;
  mask.array.resize(static_cast<size_t>(mask.rows * mask.columns));
  for (int64_t r = 0; r < mask.rows; ++r) {
    const int64_t last = offset() + r;
    const int64_t first =
        window_size ? std::max<int64_t>(0, last - std::max<int64_t>(0, *window_size) + 1) : 0;
    for (int64_t c = first; c <= last; ++c) mask.array[r * mask.columns + c] = 1;
  }
  return mask;
}

// ---- what there is

PagedKVCache::PagedKVCache(PagedKVCacheOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
PagedKVCache::PagedKVCache(PagedKVCache&&) noexcept = default;
PagedKVCache& PagedKVCache::operator=(PagedKVCache&&) noexcept = default;
PagedKVCache::~PagedKVCache() = default;

int64_t PagedKVCache::offset() const noexcept {
  return impl_->storage ? impl_->storage->offset() : 0;
}
int64_t PagedKVCache::offset(int layer) const {
  impl_->check_layer(layer);
  return impl_->storage ? impl_->storage->offset(layer) : 0;
}
int64_t PagedKVCache::capacity() const noexcept { return impl_->capacity(); }
int PagedKVCache::num_layers() const noexcept { return impl_->options.num_layers; }
int PagedKVCache::block_size() const noexcept { return impl_->geometry.block_size; }
const PagedKVQuantConfig& PagedKVCache::quant() const noexcept { return impl_->quant; }

LayerPages PagedKVCache::layer_pages(int layer) const {
  impl_->check_layer(layer);
  return impl_->storage ? impl_->storage->pool().layer_pages(layer) : LayerPages();
}
int64_t PagedKVCache::committed_blocks() const noexcept {
  return impl_->storage ? impl_->storage->pool().extent(0) : 0;
}
std::shared_ptr<const void> PagedKVCache::pages_owner() const noexcept { return impl_->storage; }
std::span<const PageId> PagedKVCache::block_table() const noexcept {
  return impl_->storage ? impl_->storage->pages() : std::span<const PageId>();
}

PagedKVCacheStats PagedKVCache::stats() const {
  const Impl& p = *impl_;
  PagedKVCacheStats s = p.counters;
  s.kernel_set = kernels().name;
  s.num_layers = num_layers();
  s.block_size = block_size();
  s.capacity = capacity();
  s.num_blocks = s.capacity / s.block_size;
  s.offset = offset();
  PagePoolStats pool;
  if (p.storage) {
    s.key_format = page_format_name(p.storage->shape().key_format);
    s.value_format = page_format_name(p.storage->shape().value_format);
    pool = p.storage->pool().stats();
    s.bytes_resident = p.storage->pool().bytes_resident();
  }
  s.allocation_events = p.past.allocations + pool.allocations;
  s.grow_events = p.past.grow_events + pool.grow_events;
  s.shrink_events = p.past.shrink_events + pool.shrink_events;
  s.bytes_moved = p.past.bytes_moved + pool.bytes_moved;
  s.commit_seconds = p.past.commit_seconds + pool.commit_seconds;
  s.touch_seconds = p.past.touch_seconds + pool.touch_seconds;
  s.pages_in_use = pool.pages_held;
  s.pages_peak = std::max(p.past.pages_peak, pool.pages_peak);
  s.pages_capacity = s.num_blocks;
  s.bytes_reserved = pool.bytes_reserved;
  s.bytes_committed = pool.bytes_committed;
  s.bytes_in_use = pool.bytes_in_use;
  if (s.pages_in_use > 0)
    s.block_utilization =
        static_cast<double>(s.offset) / static_cast<double>(s.pages_in_use * s.block_size);
  for (const auto& calls : s.attention_calls)
    if (calls.kernel_set == "reference")
      s.fallbacks.push_back({"reference kernels", calls.by_phase[0] + calls.by_phase[1]});
  return s;
}

}  // namespace pagedkv
