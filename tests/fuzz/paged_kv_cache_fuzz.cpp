// libFuzzer over the public API: PagedKVCache with hostile options, shapes, strides, values and sizes; PagePool and
// BlockTable; the quantiser; texts and variables. What may come out is a result or one of the documented exceptions, and after an exception the cache is
// as it was. The first byte of an input chooses the part, the rest is read as arguments.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "pagedkv/base/log.h"
#include "pagedkv/base/quantize.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/core/page_pool.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv {
namespace {

[[noreturn]] void broken(const std::string& what) {
  std::fprintf(stderr, "broken promise: %s\n", what.c_str());
  std::abort();
}

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }

  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  int below(int n) { return byte() % n; }
  bool one_in(int n) { return below(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }
  template <class T>
  T raw() {
    T value{};
    for (size_t i = 0; i < sizeof(T); ++i) reinterpret_cast<uint8_t*>(&value)[i] = byte();
    return value;
  }
  std::string text() {
    std::string out;
    for (int n = below(24); n > 0; --n) out += static_cast<char>(byte());
    out.erase(std::remove(out.begin(), out.end(), '\0'), out.end());
    return out;
  }

  // Small mostly; else at a limit, or anything.
  int64_t size(int small) {
    switch (below(16)) {
      case 0:
        return of<int64_t>({-1, 0, 255, 256, 257, 511, 512, 513, 65535, 65536, 65537});
      case 1:
        return of<int64_t>({INT32_MAX, INT32_MAX - 1ll, INT32_MAX + 1ll, INT32_MIN, INT64_MAX,
                            INT64_MIN, INT64_MAX - 1, 1ll << 32, 1ll << 40, 1ll << 62});
      case 2:
        return raw<int64_t>();
      default:
        return below(small);
    }
  }
  int small_or_any_int(int small) {
    return static_cast<int>(std::clamp<int64_t>(size(small), INT32_MIN, INT32_MAX));
  }
  float number() {
    switch (below(12)) {
      case 0:
        return of({INFINITY, -INFINITY, NAN, -0.0f, 3.4e38f, -3.4e38f, 1e-45f, 65504.0f, 65536.0f});
      case 1:
        return raw<float>();
      default:
        return static_cast<float>(static_cast<int8_t>(byte())) / 8;
    }
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// What views point into: as large as any view that is let through with data.
constexpr int64_t kMemory = 1 << 18;

// Tame numbers, so that most rows can be quantised; spoil() puts others there.
class Memory {
 public:
  ~Memory() {
    for (const auto& [at, value] : spoilt_) std::memcpy(&shared()[at], &value, 4);
  }
  std::byte* data() { return shared().data(); }
  void spoil(size_t at, float x) {
    float before;
    std::memcpy(&before, &shared()[at], 4);
    spoilt_.insert(spoilt_.begin(), {at, before});
    std::memcpy(&shared()[at], &x, 4);
  }

 private:
  static std::vector<std::byte> tame() {
    std::vector<std::byte> bytes(kMemory);
    for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      const float x = static_cast<float>((i * 2654435761u >> 8) % 4001) / 1000 - 2;
      std::memcpy(&bytes[i], &x, 4);
    }
    return bytes;
  }
  static std::vector<std::byte>& shared() {
    static std::vector<std::byte> bytes = tame();
    return bytes;
  }
  std::vector<std::pair<size_t, float>> spoilt_;
};

DType any_dtype(Input& in) { return in.of({DType::kF32, DType::kF16, DType::kBF16}); }

// A view of the memory where it fits there. One that reaches further is a lie that no callee can see, so it gets no data
// at all: it must be refused unless it has no element.
TensorView any_view(Input& in, Memory& memory, int64_t heads, int64_t tokens, int64_t dim,
                    DType dtype) {
  TensorView view{memory.data(), dtype, heads, tokens, dim, 0, 0};
  const bool heads_first = in.below(2);
  using Wide = __int128;
  const auto narrow = [](Wide x) {
    return static_cast<int64_t>(std::clamp<Wide>(x, INT64_MIN, INT64_MAX));
  };
  view.token_stride = heads_first ? dim : narrow(Wide{heads} * dim);
  view.head_stride = heads_first ? narrow(Wide{tokens} * dim) : dim;
  if (in.one_in(8)) view.token_stride = in.size(64);
  if (in.one_in(8)) view.head_stride = in.size(64);
  Wide first = 0, last = 0;
  for (const auto& [count, stride] :
       {std::pair{heads, view.head_stride}, std::pair{tokens, view.token_stride}}) {
    const Wide reach = Wide{std::max<int64_t>(count, 1) - 1} * stride;
    (reach < 0 ? first : last) += reach;
  }
  const Wide end = last + std::max<int64_t>(dim, 0);
  if (first < 0 || end > kMemory / dtype_bytes(dtype)) view.data = nullptr;
  return view;
}

// ---- the cache

constexpr int64_t kMostCommitted = int64_t{4} << 20;

class CacheFuzzer {
  using Pair = PagedKVCache::Pair;

 public:
  explicit CacheFuzzer(Input& in) : in_(in) {}

  void run() {
    const PagedKVCacheOptions options = any_options();
    try {
      cache_.emplace(options);
    } catch (const std::invalid_argument&) {
      return;
    }
    heads_ = 1 + in_.below(4);
    key_dim_ = in_.of({4, 8, 16, 32, 64, 128, 1, 7, 36, 512});
    value_dim_ = in_.of({4, 8, 16, 32, 64, 128, 1, 7, 36, 512});
    key_dtype_ = any_dtype(in_);
    value_dtype_ = in_.below(2) ? key_dtype_ : any_dtype(in_);
    seen_ = seen();
    for (int calls = 0; calls < 60 && !in_.empty(); ++calls) call();
  }

 private:
  PagedKVCacheOptions any_options() {
    PagedKVCacheOptions o;
    if (in_.below(4)) o.block_size = in_.small_or_any_int(20);
    if (in_.below(4)) o.num_blocks = in_.small_or_any_int(40);
    if (in_.one_in(3)) o.dtype = any_dtype(in_);
    const auto mode = [&] {
      return in_.of({PagedKVQuantMode::kOff, PagedKVQuantMode::kQ8, PagedKVQuantMode::kQ6,
                     PagedKVQuantMode::kQ4});
    };
    if (in_.below(3)) o.quant = PagedKVQuantConfig(mode(), mode());
    if (in_.below(2)) o.dynamic = in_.below(3) != 0;
    if (in_.one_in(3)) o.context_window = in_.size(100);
    if (in_.one_in(4)) o.sliding_window = in_.small_or_any_int(20);
    if (in_.one_in(4)) o.max_bytes = in_.below(2) ? in_.size(256) : int64_t{in_.byte()} * 1024;
    o.num_layers =
        in_.one_in(16) ? in_.of({0, -1, 65537, INT32_MAX, INT32_MIN, 40}) : 1 + in_.below(3);
    o.commit_hook = [this](int64_t bytes) {
      if (cache_ && cache_->size_bytes() + bytes > kMostCommitted) return false;
      return bytes <= kMostCommitted && !refuse_;
    };
    return o;
  }

  struct Seen {
    std::array<std::string, 3> meta;
    int64_t capacity, bytes, updates;
    std::vector<int64_t> offsets;
    const void* keys;
    bool operator==(const Seen&) const = default;
  };
  Seen seen() const {
    const PagedKVCacheStats stats = cache_->stats();
    Seen s{
        cache_->meta_state(),           cache_->capacity(), cache_->size_bytes(), stats.updates, {},
        cache_->layer_pages().keys.data};
    for (int layer = 0; layer < cache_->num_layers(); ++layer)
      s.offsets.push_back(cache_->offset(layer));
    if (s.capacity < *std::max_element(s.offsets.begin(), s.offsets.end()))
      broken("more tokens than the capacity");
    if (stats.bytes_in_use > stats.bytes_committed || stats.bytes_committed > stats.bytes_reserved)
      broken("bytes in use, committed, reserved: " + to_json(stats));
    return s;
  }

  template <class F>
  void guarded(F&& f) {
    const auto refused = [&](const char* type) {
      if (!(seen() == seen_)) broken(std::string("changed by a call that throws ") + type);
    };
    try {
      f();
      seen_ = seen();
    } catch (const std::invalid_argument&) {
      refused("std::invalid_argument");
    } catch (const CapacityError&) {
      refused("CapacityError");
    } catch (const MemoryError&) {
      refused("MemoryError");
    }
  }

  int any_layer() {
    return in_.one_in(12) ? in_.small_or_any_int(5) : in_.below(cache_->num_layers());
  }
  int64_t any_tokens() { return in_.one_in(8) ? in_.size(300) : in_.below(20); }

  Pair any_rows(int64_t tokens) {
    spoil();
    TensorView k = any_view(in_, memory_, heads_, tokens, key_dim_, key_dtype_);
    TensorView v = any_view(in_, memory_, heads_, tokens, value_dim_, value_dtype_);
    if (in_.one_in(6)) {  // other shapes than the first
      const int64_t heads = in_.size(5);
      k = any_view(in_, memory_, in_.below(3) ? heads : in_.size(5),
                   in_.below(3) ? tokens : in_.size(20), in_.size(40), any_dtype(in_));
      v = any_view(in_, memory_, in_.below(3) ? heads : in_.size(5),
                   in_.below(3) ? tokens : in_.size(20), in_.size(40), any_dtype(in_));
    }
    return {k, v};
  }

  void spoil() {
    if (!in_.one_in(3)) return;
    const size_t at = in_.raw<uint16_t>() % (kMemory / 4) * 4;
    memory_.spoil(at, in_.number());
  }

  void attend() {
    AttendOptions o;
    o.layer = any_layer();
    if (in_.below(2)) o.scale = in_.number();
    o.causal = in_.below(3) != 0;
    if (in_.one_in(3)) o.sliding_window = in_.small_or_any_int(30);
    if (in_.one_in(4)) o.logit_softcap = in_.number();
    const int64_t held =
        o.layer >= 0 && o.layer < cache_->num_layers() ? cache_->offset(o.layer) : 0;
    const int64_t count = in_.one_in(6) ? in_.size(20) : std::min<int64_t>(held, in_.below(6));
    const int64_t num_heads = in_.one_in(8) ? in_.size(20) : heads_ * (1 + in_.below(4));
    const int64_t dim = in_.one_in(12) ? in_.size(70) : key_dim_;
    const TensorView q = any_view(in_, memory_, num_heads, count, dim, any_dtype(in_));
    std::vector<float> sinks, bias, lse;
    std::vector<uint8_t> mask;
    if (count >= 0 && count <= 64 && num_heads > 0 && num_heads <= 256 && held <= 4096) {
      const auto cells = static_cast<size_t>(count * held);
      if (in_.one_in(4))
        sinks.assign(static_cast<size_t>(in_.one_in(6) ? in_.below(40) : num_heads), in_.number());
      if (in_.one_in(4)) mask.assign(in_.one_in(6) ? static_cast<size_t>(in_.below(40)) : cells, 1);
      if (in_.one_in(4))
        bias.assign(in_.one_in(6) ? static_cast<size_t>(in_.below(40)) : cells, in_.number());
      for (size_t i = 0; i < mask.size(); i += 1 + in_.byte()) mask[i] = in_.byte() & 1;
      lse.resize(static_cast<size_t>(count * num_heads));
      if (in_.below(2)) o.log_sum_exp = lse.data();
    }
    o.sinks = sinks;
    o.mask = mask;
    o.bias = bias;
    if (in_.below(2)) return guarded([&] { cache_->attend(q, o); });
    std::vector<std::byte> room(1 << 16);
    MutableTensorView out{
        room.data(), q.dtype, num_heads, count, in_.one_in(10) ? in_.size(70) : int64_t{value_dim_},
        0,           0};
    out.head_stride = out.head_dim;
    out.token_stride = static_cast<int64_t>(std::clamp<__int128>(
        static_cast<__int128>(num_heads) * out.head_dim, INT64_MIN, INT64_MAX));
    const auto elements =
        static_cast<__int128>(std::max<int64_t>(count, 0)) * std::max<int64_t>(out.token_stride, 0);
    if (elements > static_cast<__int128>(room.size()) / dtype_bytes(out.dtype)) out.data = nullptr;
    guarded([&] { cache_->attend(q, out, o); });
  }

  void call() {
    refuse_ = in_.one_in(16);
    switch (in_.below(20)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4: {
        const Pair rows = any_rows(any_tokens());
        const int layer = any_layer();
        return guarded([&] { cache_->update(rows.first, rows.second, layer); });
      }
      case 5: {
        const Pair rows = any_rows(any_tokens());
        const int layer = any_layer();
        return guarded([&] { cache_->update_and_fetch(rows.first, rows.second, layer); });
      }
      case 6:
      case 7:
      case 8:
        return attend();
      case 9: {
        const int64_t tokens = in_.size(40);
        return guarded([&] {
          const int64_t before = cache_->offset(), dropped = cache_->trim(tokens);
          if (dropped != std::min(before, tokens) || cache_->offset() != before - dropped)
            broken("trim");
        });
      }
      case 10: {
        const int64_t tokens = in_.size(200);
        return guarded([&] {
          cache_->grow_to_capacity(tokens);
          if (cache_->capacity() < tokens) broken("grow_to_capacity");
        });
      }
      case 11: {
        const int64_t tokens = in_.size(200);
        return guarded([&] { cache_->shrink_to_capacity(tokens); });
      }
      case 12: {
        const int layer = any_layer();
        return guarded([&] {
          const auto [k, v] = cache_->state(layer);
          if (k.num_tokens != v.num_tokens) broken("state");
        });
      }
      case 13: {
        std::vector<std::string> meta;
        for (int n = in_.below(5); n > 0; --n)
          meta.push_back(in_.one_in(4) ? in_.text() : std::to_string(in_.size(40)));
        return guarded([&] { cache_->set_meta_state(meta); });
      }
      case 14: {
        std::vector<Pair> pairs;
        const int64_t tokens = any_tokens();
        for (int n = in_.one_in(8) ? in_.below(5) : cache_->num_layers(); n > 0; --n)
          pairs.push_back(any_rows(in_.one_in(8) ? any_tokens() : tokens));
        return guarded([&] { cache_->set_state(pairs); });
      }
      case 15: {
        const Pair rows = any_rows(any_tokens());
        if (in_.below(2)) return guarded([&] { cache_->set_keys(rows.first); });
        return guarded([&] { cache_->set_values(rows.second); });
      }
      case 16: {
        int64_t queries = in_.size(30);
        if (queries > 2000 && queries < (int64_t{1} << 41))
          queries = 2000;  // as large as asked for
        const bool array = in_.below(2);
        std::optional<int64_t> window;
        if (in_.below(2)) window = in_.size(30);
        return guarded([&] { cache_->make_mask(queries, array, window); });
      }
      case 17: {
        PagedKVCacheOptions o = any_options();
        return guarded([&] {
          PagedKVCache copy = PagedKVCache::from_cache(*cache_, o);
          if (copy.offset() != cache_->offset()) broken("from_cache");
        });
      }
      case 18: {
        const Pair rows = any_rows(any_tokens());
        const int64_t offset = in_.size(40);
        PagedKVCacheOptions o = any_options();
        return guarded([&] { PagedKVCache::from_arrays(rows.first, rows.second, offset, o); });
      }
      default:
        guarded([&] {
          if (in_.one_in(3)) return cache_->reset();
          PagedKVCache other(std::move(*cache_));
          *cache_ = std::move(other);
        });
    }
  }

  Input& in_;
  Memory memory_;
  std::optional<PagedKVCache> cache_;
  Seen seen_;  // after the last call
  bool refuse_ = false;
  int64_t heads_ = 1, key_dim_ = 1, value_dim_ = 1;
  DType key_dtype_ = DType::kF32, value_dtype_ = DType::kF32;
};

// ---- the pool and block tables

void fuzz_pool(Input& in) {
  PagePoolOptions options;
  int64_t committed = 0;
  for (int g = in.one_in(16) ? 0 : 1 + in.below(2); g > 0; --g) {
    LayerGroupSpec group;
    if (in.one_in(4)) group.sliding_window = in.small_or_any_int(40);
    for (int l = in.one_in(16) ? 0 : 1 + in.below(3); l > 0; --l) {
      const auto format = [&] {
        return in.of({PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16, PageFormat::kQ8,
                      PageFormat::kQ6, PageFormat::kQ4});
      };
      const auto dim = [&] { return in.one_in(8) ? in.small_or_any_int(70) : 8; };
      group.layers.push_back(
          {in.one_in(8) ? in.small_or_any_int(5) : 2, dim(), dim(), format(), format()});
    }
    options.groups.push_back(group);
  }
  options.page_size = in.one_in(8) ? in.small_or_any_int(40) : 4;
  options.num_pages = in.one_in(8) ? in.small_or_any_int(40) : 1 + in.below(20);
  options.dynamic = in.below(3) != 0;
  if (in.one_in(4)) options.max_bytes = in.below(2) ? in.size(256) : int64_t{in.byte()} * 1024;
  if (in.one_in(4)) options.headroom_bytes = in.size(256);
  if (in.one_in(4)) options.max_pages = in.small_or_any_int(60);
  if (in.one_in(4)) options.shuffle_seed = in.raw<uint64_t>();
  options.commit_hook = [&](int64_t bytes) {
    if (in.one_in(16) || bytes > kMostCommitted - committed) return false;
    committed += bytes;
    return true;
  };
  std::optional<PagePool> pool;
  try {
    pool.emplace(options);
  } catch (const std::invalid_argument&) {
    return;
  } catch (const MemoryError&) {
    return;
  }
  std::vector<BlockTable> tables;
  const auto table = [&]() -> BlockTable& {
    return tables[static_cast<size_t>(in.below(static_cast<int>(tables.size())))];
  };
  tables.emplace_back(*pool);
  for (int calls = 0; calls < 40 && !in.empty(); ++calls) {
    const int group = in.below(pool->num_groups());
    const auto any_page = [&] { return static_cast<PageId>(in.small_or_any_int(20)); };
    try {
      switch (in.below(9)) {
        case 0:
        case 1:
        case 2: {
          BlockTable& t = table();
          const int64_t tokens = in.size(40), before = t.length();
          if (t.try_append(tokens) ? t.length() - before != tokens : t.length() != before)
            broken("try_append() and length() disagree");
          break;
        }
        case 3:
          table().trim_to(in.size(60));
          break;
        case 4:
          if (tables.size() < 6) {
            BlockTable shared = table().share_prefix(in.size(6));
            tables.push_back(std::move(shared));
          }
          break;
        case 5:
          if (tables.size() < 6) tables.emplace_back(*pool, std::max<int64_t>(0, in.size(60)));
          break;
        case 6:
          if (tables.size() > 1) tables.pop_back();
          break;
        case 7:
          if (in.below(2))
            (void)pool->try_grow(group, in.size(60));
          else
            pool->shrink_to(group, in.size(60));
          break;
        default: {
          const PageId page = any_page();
          if (pool->references(group, page) > 0) break;
          pool->release(group, {&page, 1});
          broken("a page that nobody holds was released");
        }
      }
    } catch (const std::invalid_argument&) {
    }
    std::vector<std::vector<int32_t>> expected(static_cast<size_t>(pool->num_groups()));
    for (int g = 0; g < pool->num_groups(); ++g)
      for (const BlockTable& t : tables)
        for (PageId page : t.pages(g)) {
          auto& counts = expected[static_cast<size_t>(g)];
          if (static_cast<size_t>(page) >= counts.size())
            counts.resize(static_cast<size_t>(page) + 1);
          ++counts[static_cast<size_t>(page)];
        }
    pool->verify(&expected);
  }
}

// ---- the quantiser

template <class F>
bool accepted(F&& f) {
  try {
    f();
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

void fuzz_quantiser(Input& in) {
  const int bits = in.one_in(8) ? in.small_or_any_int(40) : in.of({8, 6, 4});
  const int dim = in.one_in(4) ? in.small_or_any_int(600) : 4 * (1 + in.below(128));
  int packed = 0;
  const bool fits = accepted([&] { packed = packed_dim(dim, bits); });
  accepted([&] { compression_ratio(dim, bits); });
  const size_t rows = static_cast<size_t>(in.below(5)),
               width = static_cast<size_t>(fits ? dim : in.below(64));
  std::vector<float> x(rows * width), scales(rows), back(x.size());
  for (float& v : x) v = in.number();
  std::vector<std::byte> codes(rows * static_cast<size_t>(packed));
  for (auto* floats : {&x, &scales, &back})
    if (in.one_in(24)) floats->resize(static_cast<size_t>(in.below(80)));
  if (in.one_in(24)) codes.resize(static_cast<size_t>(in.below(80)));
  if (accepted([&] { quantize_symmetric(x, dim, bits, codes, scales); })) {
    if (!accepted([&] { dequantize_symmetric(codes, scales, dim, bits, x); }))
      broken("quantised, but not the way back");
  }
  for (std::byte& b : codes) b = static_cast<std::byte>(in.byte());
  for (float& s : scales) s = in.number();
  accepted([&] { dequantize_symmetric(codes, scales, dim, bits, back); });
  std::vector<int8_t> unpacked(codes.size() * 8 / static_cast<size_t>(bits > 0 ? bits : 8));
  if (in.one_in(8)) unpacked.resize(static_cast<size_t>(in.below(99)));
  accepted([&] { unpack_codes(codes, bits, unpacked); });
  for (int8_t& c : unpacked) c = static_cast<int8_t>(in.byte());
  accepted([&] { pack_codes(unpacked, bits, codes); });
}

// ---- texts and variables

constexpr const char* kVariables[] = {"PAGEDKV_BLOCK_SIZE",
                                      "PAGEDKV_NUM_BLOCKS",
                                      "PAGEDKV_CACHE_TYPE_K",
                                      "PAGEDKV_CACHE_TYPE_V",
                                      "PAGEDKV_KV_CACHE_DTYPE",
                                      "PAGEDKV_DYNAMIC",
                                      "PAGEDKV_CTX_SIZE",
                                      "PAGEDKV_SLIDING_WINDOW",
                                      "PAGEDKV_KV_CACHE_MEMORY_BYTES",
                                      "MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE",
                                      "MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS",
                                      "MTPLX_VLLM_METAL_PAGED_KV_QUANT",
                                      "MTPLX_PAGED_KV_QUANT",
                                      "MTPLX_DYNAMIC_PAGED_KV",
                                      "MTPLX_DYNAMIC_PAGED_KV_MIN_BLOCKS",
                                      "MTPLX_DYNAMIC_PAGED_KV_TOKENS",
                                      "MTPLX_DYNAMIC_PAGED_KV_PREVIOUS_HIGH_WATER",
                                      "MTPLX_DYNAMIC_PAGED_KV_MARGIN",
                                      "MTPLX_CONTEXT_WINDOW_TOKENS",
                                      "MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW"};

std::string any_word(Input& in) {
  static constexpr const char* kWords[] = {"",
                                           " ",
                                           "q8",
                                           "Q4_0",
                                           "int6",
                                           "off",
                                           "none",
                                           "0",
                                           "1",
                                           "true",
                                           "f16",
                                           "bf16",
                                           "16",
                                           "-1",
                                           "1e9",
                                           "64MiB",
                                           "1.5",
                                           "k=q8",
                                           "k=q8,v=q4",
                                           "v=,k=",
                                           "9223372036854775807",
                                           "99999999999999999999",
                                           "1_000",
                                           "+7",
                                           "auto",
                                           "8 bit",
                                           "GiB"};
  std::string word =
      in.below(2) ? kWords[in.below(static_cast<int>(std::size(kWords)))] : in.text();
  if (in.one_in(4)) word += in.text();
  return word;
}

void fuzz_texts(Input& in) {
  for (int i = in.below(4); i >= 0; --i) {
    const std::string word = any_word(in);
    accepted([&] { parse_quant_mode(word); });
    accepted([&] {
      const PagedKVQuantConfig config(word);
      if (!(PagedKVQuantConfig(config.mode()) == config)) broken("mode() does not read back");
    });
    accepted([&] {
      const PageFormat format = parse_page_format(word);
      if (parse_page_format(page_format_name(format)) != format) broken("page_format_name()");
    });
    accepted([&] { parse_dtype(word); });
  }
  std::vector<const char*> set;
  for (int i = in.below(5); i >= 0; --i) {
    set.push_back(kVariables[in.below(static_cast<int>(std::size(kVariables)))]);
    setenv(set.back(), any_word(in).c_str(), 1);
  }
  accepted([&] { paged_kv_quant_mode_from_env(); });
  accepted([&] {
    const PagedKVCacheOptions options = PagedKVCacheOptions::from_environment();
    PagedKVCache cache(options);  // takes what the variables gave, or says why not
    const std::vector<std::string> meta = {any_word(in), any_word(in), any_word(in)};
    try {
      cache.set_meta_state(meta);
    } catch (const CapacityError&) {
    }
  });
  accepted([&] {
    InitialSize size;
    size.configured = in.size(2000);
    size.block_size = 1 + in.below(256);
    size.tokens = in.size(2000);
    size.previous_high_water = in.size(2000);
    size.margin = in.size(200);
    initial_num_blocks(size);
    initial_num_blocks(size.with_environment());
  });
  for (const char* name : set) unsetenv(name);
}

}  // namespace
}  // namespace pagedkv

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  pagedkv::set_log_sink({});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  pagedkv::Input in(data, size);
  switch (in.below(8)) {
    case 0:
      pagedkv::fuzz_quantiser(in);
      break;
    case 1:
      pagedkv::fuzz_texts(in);
      break;
    case 2:
      pagedkv::fuzz_pool(in);
      break;
    default:
      pagedkv::CacheFuzzer(in).run();
  }
  return 0;
}
