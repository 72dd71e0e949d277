// pagedkv._pagedkv.PagedKVCache. Calls release the GIL and take turns on one cache.
#include "pagedkv/core/paged_kv_cache.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "threads.h"

namespace pagedkv::python {
namespace {

std::optional<DType> dtype_of(const std::optional<std::string>& word) {
  if (!word) return std::nullopt;
  return parse_dtype(*word);
}

class Cache {
 public:
  Cache(std::optional<int> block_size, std::optional<int32_t> num_blocks,
        std::optional<std::string> dtype, std::optional<std::string> quant,
        std::optional<bool> dynamic, std::optional<int64_t> context_window,
        std::optional<int> sliding_window, std::optional<int64_t> max_bytes, int num_layers,
        bool environment)
      : Cache([&] {
          PagedKVCacheOptions o;
          o.block_size = block_size;
          o.num_blocks = num_blocks;
          o.dtype = dtype_of(dtype);
          if (quant) o.quant = PagedKVQuantConfig(*quant);
          o.dynamic = dynamic;
          o.context_window = context_window;
          o.sliding_window = sliding_window;
          o.max_bytes = max_bytes;
          o.num_layers = num_layers;
          return environment ? PagedKVCacheOptions::from_environment(std::move(o)) : o;
        }()) {}

  explicit Cache(PagedKVCacheOptions options)
      : executor_(shared_executor()),
        options_([&] {
          options.executor = executor_.get();
          return std::move(options);
        }()),
        cache_(options_) {}

  // The call, without the GIL, one at a time.
  template <class F>
  auto locked(F&& f) {
    const GilRelease release;
    const std::lock_guard lock(mutex_);
    return f(cache_);
  }

  void update(nb::handle keys, nb::handle values, int layer) {
    const FloatArray k(keys, "keys"), v(values, "values");
    const TensorView kv = k.heads_first(), vv = v.heads_first();
    locked([&](PagedKVCache& c) { c.update(kv, vv, layer); });
  }

  nb::object attend(nb::handle queries, int layer, std::optional<float> scale, bool causal,
                    int sliding_window, float logit_softcap, nb::handle sinks, nb::handle mask,
                    nb::handle bias, bool log_sum_exp) {
    const FloatArray q(queries, "queries");
    const TensorView view = q.heads_first();
    const int64_t held = locked([&](PagedKVCache& c) { return c.offset(layer); });
    AttendOptions o;
    o.layer = layer;
    o.scale = scale;
    o.causal = causal;
    o.sliding_window = sliding_window;
    o.logit_softcap = logit_softcap;
    std::vector<float> sink_values, bias_values;
    std::vector<uint8_t> mask_values;
    if (sliding_window < 0)
      throw std::invalid_argument("sliding_window " + std::to_string(sliding_window) +
                                  ": must be at least 0 (0: none)");
    if (!sinks.is_none())
      o.sinks = sink_values = FloatArray(sinks, "sinks").floats(0, view.num_heads);
    if (!bias.is_none())
      o.bias = bias_values = FloatArray(bias, "bias").floats(view.num_tokens, held);
    if (!mask.is_none()) o.mask = mask_values = mask_bytes(mask, view.num_tokens, held, "mask");
    const auto heads = static_cast<size_t>(view.num_heads);
    const auto tokens = static_cast<size_t>(view.num_tokens);
    std::vector<float> lse(log_sum_exp ? heads * tokens : 0);
    if (log_sum_exp) o.log_sum_exp = lse.data();
    Tensor out = locked([&](PagedKVCache& c) { return c.attend(view, o); });
    std::vector<size_t> shape{heads, tokens, static_cast<size_t>(out.head_dim)};
    if (q.ndim() == 4) shape.insert(shape.begin(), 1);
    nb::object array = to_array(std::move(out), shape);
    if (!log_sum_exp) return array;
    return nb::make_tuple(array, to_array(std::move(lse), {tokens, heads}));
  }

  nb::object state(int layer) {
    auto [keys, values] = locked([&](PagedKVCache& c) { return c.state(layer); });
    if (keys.empty() || values.empty()) return nb::make_tuple(nb::none(), nb::none());
    const auto shape = [](const Tensor& t) {
      return std::vector<size_t>{static_cast<size_t>(t.num_heads),
                                 static_cast<size_t>(t.num_tokens),
                                 static_cast<size_t>(t.head_dim)};
    };
    const auto key_shape = shape(keys), value_shape = shape(values);
    return nb::make_tuple(to_array(std::move(keys), key_shape),
                          to_array(std::move(values), value_shape));
  }

  void set_state(const std::vector<std::pair<nb::object, nb::object>>& layers) {
    std::vector<FloatArray> arrays;
    arrays.reserve(2 * layers.size());
    std::vector<PagedKVCache::Pair> views;
    for (const auto& [keys, values] : layers) {
      const FloatArray& k = arrays.emplace_back(keys, "keys");
      const FloatArray& v = arrays.emplace_back(values, "values");
      views.emplace_back(k.heads_first(), v.heads_first());
    }
    locked([&](PagedKVCache& c) { c.set_state(views); });
  }

  // The same tokens in the source's geometry and format, but for what is given.
  static std::unique_ptr<Cache> from_cache(Cache& source, std::optional<int> block_size,
                                           std::optional<int32_t> num_blocks,
                                           std::optional<std::string> quant,
                                           std::optional<bool> dynamic) {
    PagedKVCacheOptions o = source.options_;
    const auto [size, capacity] =
        source.locked([](PagedKVCache& c) { return std::pair(c.block_size(), c.capacity()); });
    o.block_size = block_size.value_or(size);
    o.num_blocks =
        num_blocks.value_or(static_cast<int32_t>((capacity + *o.block_size - 1) / *o.block_size));
    if (quant) o.quant = PagedKVQuantConfig(*quant);
    if (dynamic) o.dynamic = dynamic;
    auto copy = std::make_unique<Cache>(std::move(o));
    source.locked(
        [&](PagedKVCache& c) { copy->cache_ = PagedKVCache::from_cache(c, copy->options_); });
    return copy;
  }

  nb::tuple pages(int layer) {
    struct Seen {
      LayerPages pages;
      int64_t committed;
      std::unique_ptr<Exports::View> view;
    };
    Seen seen = locked([&](PagedKVCache& c) {
      return Seen{c.layer_pages(layer), c.committed_blocks(), exports_.add(c.pages_owner())};
    });
    if (seen.view->pages == nullptr) return nb::make_tuple(nb::none(), nb::none());
    const nb::object owner = to_object(std::move(seen.view));
    const auto views = [&](const PageArray& array) {
      return page_views(array, seen.committed, seen.pages.page_size, seen.pages.num_kv_heads,
                        owner);
    };
    return nb::make_tuple(views(seen.pages.keys), views(seen.pages.values));
  }

  int64_t shrink_to_capacity(int64_t num_tokens) {
    return locked([&](PagedKVCache& c) {
      exports_.check_none("shrink_to_capacity");
      return c.shrink_to_capacity(num_tokens);
    });
  }

 private:
  std::shared_ptr<Executor> executor_;
  const PagedKVCacheOptions options_;
  PagedKVCache cache_;
  std::mutex mutex_;
  Exports exports_;
};

}  // namespace

void bind_cache(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Cache>(m, "PagedKVCache",
                    "Keys and values of one sequence in pages; see pagedkv.PagedKVCache.")
      .def(nb::init<std::optional<int>, std::optional<int32_t>, std::optional<std::string>,
                    std::optional<std::string>, std::optional<bool>, std::optional<int64_t>,
                    std::optional<int>, std::optional<int64_t>, int, bool>(),
           nb::kw_only(), "block_size"_a.none() = nb::none(), "num_blocks"_a.none() = nb::none(),
           "dtype"_a.none() = nb::none(), "quant"_a.none() = nb::none(),
           "dynamic"_a.none() = nb::none(), "context_window"_a.none() = nb::none(),
           "sliding_window"_a.none() = nb::none(), "max_bytes"_a.none() = nb::none(),
           "num_layers"_a = 1, "environment"_a = false)
      .def_static("from_cache", &Cache::from_cache, "source"_a, nb::kw_only(),
                  "block_size"_a.none() = nb::none(), "num_blocks"_a.none() = nb::none(),
                  "quant"_a.none() = nb::none(), "dynamic"_a.none() = nb::none())
      .def("update", &Cache::update, "keys"_a.none(), "values"_a.none(), "layer"_a = 0,
           nb::sig("def update(self, keys: object, values: object, layer: int = 0) -> None"))
      .def("attend", &Cache::attend, "queries"_a.none(), nb::kw_only(), "layer"_a = 0,
           "scale"_a.none() = nb::none(), "causal"_a = true, "sliding_window"_a = 0,
           "logit_softcap"_a = 0.0f, "sinks"_a.none() = nb::none(), "mask"_a.none() = nb::none(),
           "bias"_a.none() = nb::none(), "log_sum_exp"_a = false,
           nb::sig(
               "def attend(self, queries: object, *, layer: int = 0, scale: float | None = None, "
               "causal: bool = True, sliding_window: int = 0, logit_softcap: float = 0.0, "
               "sinks: object | None = None, mask: object | None = None, bias: object | None = "
               "None, "
               "log_sum_exp: bool = False) -> typing.Any"))
      .def("state", &Cache::state, "layer"_a = 0,
           nb::sig("def state(self, layer: int = 0) -> tuple[numpy.ndarray | None, numpy.ndarray | "
                   "None]"))
      .def("set_state", &Cache::set_state, "layers"_a,
           nb::sig("def set_state(self, layers: list[tuple[object, object]]) -> None"))
      .def(
          "meta_state",
          [](Cache& c) {
            const auto meta = c.locked([](PagedKVCache& p) { return p.meta_state(); });
            return nb::make_tuple(meta[0], meta[1], meta[2]);
          },
          nb::sig("def meta_state(self) -> tuple[str, str, str]"))
      .def(
          "set_meta_state",
          [](Cache& c, const std::vector<std::string>& meta) {
            c.locked([&](PagedKVCache& p) { p.set_meta_state(meta); });
          },
          "meta"_a)
      .def(
          "trim",
          [](Cache& c, int64_t n) { return c.locked([&](PagedKVCache& p) { return p.trim(n); }); },
          "num_tokens"_a)
      .def("reset", [](Cache& c) { c.locked([](PagedKVCache& p) { p.reset(); }); })
      .def(
          "grow_to_capacity",
          [](Cache& c, int64_t tokens, std::optional<int64_t> window) {
            c.locked([&](PagedKVCache& p) { p.grow_to_capacity(tokens, window); });
          },
          "num_tokens"_a, "context_window"_a.none() = nb::none())
      .def("shrink_to_capacity", &Cache::shrink_to_capacity, "num_tokens"_a)
      .def(
          "offset",
          [](Cache& c, int layer) {
            return c.locked([&](PagedKVCache& p) { return p.offset(layer); });
          },
          "layer"_a = 0)
      .def("pages", &Cache::pages, "layer"_a = 0,
           nb::sig("def pages(self, layer: int = 0) -> tuple[typing.Any, typing.Any]"))
      .def(
          "make_mask",
          [](Cache& c, int64_t num_queries, bool return_array,
             std::optional<int64_t> window) -> nb::object {
            CacheMask mask = c.locked(
                [&](PagedKVCache& p) { return p.make_mask(num_queries, return_array, window); });
            if (mask.kind == CacheMask::Kind::kNone) return nb::none();
            if (mask.kind == CacheMask::Kind::kCausal) return nb::str("causal");
            return to_array(std::move(mask.array),
                            {static_cast<size_t>(mask.rows), static_cast<size_t>(mask.columns)},
                            true);
          },
          "num_queries"_a, "return_array"_a = false, "window_size"_a.none() = nb::none(),
          nb::sig("def make_mask(self, num_queries: int, return_array: bool = False, window_size: "
                  "int | None = None) "
                  "-> numpy.ndarray | str | None"))
      .def("stats_json",
           [](Cache& c) { return c.locked([](PagedKVCache& p) { return to_json(p.stats()); }); })
      .def(
          "block_table",
          [](Cache& c) {
            std::vector<int32_t> pages = c.locked([](PagedKVCache& p) {
              return std::vector<int32_t>(p.block_table().begin(), p.block_table().end());
            });
            const size_t count = pages.size();
            return to_array(std::move(pages), {count});
          },
          nb::sig("def block_table(self) -> numpy.ndarray"))
      .def_prop_ro("capacity",
                   [](Cache& c) { return c.locked([](PagedKVCache& p) { return p.capacity(); }); })
      .def_prop_ro(
          "committed_blocks",
          [](Cache& c) { return c.locked([](PagedKVCache& p) { return p.committed_blocks(); }); })
      .def_prop_ro(
          "size_bytes",
          [](Cache& c) { return c.locked([](PagedKVCache& p) { return p.size_bytes(); }); })
      .def_prop_ro(
          "num_layers",
          [](Cache& c) { return c.locked([](PagedKVCache& p) { return p.num_layers(); }); })
      .def_prop_ro(
          "block_size",
          [](Cache& c) { return c.locked([](PagedKVCache& p) { return p.block_size(); }); })
      .def_prop_ro("quant", [](Cache& c) {
        return c.locked([](PagedKVCache& p) { return p.quant().mode(); });
      });
}

}  // namespace pagedkv::python
