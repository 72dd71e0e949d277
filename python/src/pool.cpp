// pagedkv._pagedkv.PagePool, BlockTable and Batch: many sequences over one pool. Calls release the GIL; those on one
// pool, its tables and its batches take turns.
#include "pagedkv/core/page_pool.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>

#include "arrays.h"
#include "bindings.h"
#include "gil.h"
#include "pagedkv/core/batch_tables.h"
#include "pagedkv/core/block_table.h"
#include "pagedkv/kernels/attention.h"
#include "threads.h"

namespace pagedkv::python {
namespace {

std::string str(int64_t value) { return std::to_string(value); }

LayerSpec layer_spec(int num_kv_heads, int head_dim, const std::string& format,
                     std::optional<int> value_head_dim,
                     const std::optional<std::string>& value_format) {
  const PageFormat keys = parse_page_format(format);
  const PageFormat values = value_format ? parse_page_format(*value_format) : keys;
  if (num_kv_heads < 1 || num_kv_heads > 65536)
    throw std::invalid_argument("num_kv_heads " + str(num_kv_heads) + ": must be in 1..65536");
  check_head_dim(keys, head_dim);
  check_head_dim(values, value_head_dim.value_or(head_dim));
  return {num_kv_heads, head_dim, value_head_dim.value_or(head_dim), keys, values};
}

struct Pool {
  explicit Pool(PagePoolOptions options) : pages(std::move(options)), executor(shared_executor()) {}
  void check_layer(int layer) const {
    if (layer < 0 || layer >= pages.num_layers())
      throw std::invalid_argument("layer " + str(layer) + ": must be in 0.." +
                                  str(pages.num_layers() - 1));
  }
  void check_group(int group) const {
    if (group < 0 || group >= pages.num_groups())
      throw std::invalid_argument("layer group " + str(group) + ": must be in 0.." +
                                  str(pages.num_groups() - 1));
  }
  PagePool pages;
  std::shared_ptr<Executor> executor;
  std::mutex mutex;
  Exports exports;
};

class PoolHandle {
 public:
  PoolHandle(const std::vector<std::pair<int, std::vector<LayerSpec>>>& groups, int page_size,
             int32_t num_pages, bool dynamic, int64_t max_bytes, int64_t headroom_bytes,
             int32_t max_pages)
      : pool([&] {
          PagePoolOptions o;
          for (const auto& [window, layers] : groups) o.groups.push_back({window, layers});
          o.page_size = page_size;
          o.num_pages = num_pages;
          o.dynamic = dynamic;
          o.max_bytes = max_bytes;
          o.headroom_bytes = headroom_bytes;
          o.max_pages = max_pages;
          return std::make_shared<Pool>(std::move(o));
        }()) {}

  template <class F>
  auto locked(F&& f) {
    const GilRelease release;
    const std::lock_guard lock(pool->mutex);
    return f(pool->pages);
  }

  void grow(int64_t num_pages, int group) {
    pool->check_group(group);
    if (num_pages < 0 || num_pages > INT32_MAX)
      throw std::invalid_argument("num_pages " + str(num_pages) + ": must be in 0.." +
                                  str(INT32_MAX));
    locked([&](PagePool& p) {
      if (p.try_grow(group, num_pages)) return;
      if (p.refusal() == PagePool::Refusal::kCapacity) throw CapacityError(p.refusal_text());
      throw MemoryError(p.refusal_text());
    });
  }

  nb::tuple views(int layer) {
    pool->check_layer(layer);
    struct Seen {
      LayerPages pages;
      int64_t extent;
      std::unique_ptr<Exports::View> view;
    };
    Seen seen = locked([&](PagePool& p) {
      return Seen{p.layer_pages(layer), p.extent(p.group_of_layer(layer)), pool->exports.add(pool)};
    });
    const nb::object owner = to_object(std::move(seen.view));
    const auto both = [&](const PageArray& array) {
      return page_views(array, seen.extent, seen.pages.page_size, seen.pages.num_kv_heads, owner);
    };
    return nb::make_tuple(both(seen.pages.keys), both(seen.pages.values));
  }

  nb::dict stats() {
    const PagePoolStats s = locked([](PagePool& p) { return p.stats(); });
    nb::dict d;
    d["pages_capacity"] = s.pages_capacity;
    d["pages_committed"] = s.pages_committed;
    d["pages_held"] = s.pages_held;
    d["pages_peak"] = s.pages_peak;
    d["bytes_reserved"] = s.bytes_reserved;
    d["bytes_committed"] = s.bytes_committed;
    d["bytes_in_use"] = s.bytes_in_use;
    d["bytes_peak"] = s.bytes_peak;
    d["bytes_limit"] = s.bytes_limit;
    d["bytes_moved"] = s.bytes_moved;
    d["allocations"] = s.allocations;
    d["grow_events"] = s.grow_events;
    d["shrink_events"] = s.shrink_events;
    d["commit_events"] = s.commit_events;
    d["refusals"] = s.refusals;
    d["commit_seconds"] = s.commit_seconds;
    d["touch_seconds"] = s.touch_seconds;
    return d;
  }

  std::shared_ptr<Pool> pool;
};

// A block table and how often it has changed; its pages go back under the pool's lock.
struct Sequence {
  Sequence(std::shared_ptr<Pool> p, BlockTable t) : pool(std::move(p)), table(std::move(t)) {}
  ~Sequence() {
    const std::lock_guard lock(pool->mutex);
    table.reset();
  }
  std::shared_ptr<Pool> pool;
  std::optional<BlockTable> table;
  int64_t changes = 0;
};

class Table {
 public:
  Table(const PoolHandle& pool, int64_t context_window)
      : Table(pool.pool, BlockTable(pool.pool->pages, context_window)) {}
  Table(std::shared_ptr<Pool> pool, BlockTable table)
      : sequence(std::make_shared<Sequence>(std::move(pool), std::move(table))) {}

  template <class F>
  auto locked(F&& f) const {
    const GilRelease release;
    const std::lock_guard lock(sequence->pool->mutex);
    return f(*sequence->table);
  }
  int64_t length() const {
    return locked([](BlockTable& t) { return t.length(); });
  }

  void append(int64_t num_tokens) {
    locked([&](BlockTable& t) {
      t.append(num_tokens);
      ++sequence->changes;
    });
  }
  bool try_append(int64_t num_tokens) {
    return locked([&](BlockTable& t) {
      const bool done = t.try_append(num_tokens);
      sequence->changes += done ? 1 : 0;
      return done;
    });
  }
  void trim_to(int64_t length) {
    locked([&](BlockTable& t) {
      t.trim_to(length);
      ++sequence->changes;
    });
  }
  int64_t release_passed() {
    return locked([&](BlockTable& t) {
      const int64_t num_released = t.release_passed();
      sequence->changes += num_released > 0 ? 1 : 0;
      return num_released;
    });
  }
  std::unique_ptr<Table> share_prefix(int64_t num_pages) const {
    return locked([&](BlockTable& t) {
      return std::make_unique<Table>(sequence->pool, t.share_prefix(num_pages));
    });
  }
  std::unique_ptr<Table> fork() const {
    return locked([&](BlockTable& t) { return std::make_unique<Table>(sequence->pool, t.fork()); });
  }
  nb::object slot_mapping(int64_t first, std::optional<int64_t> count, int group) const {
    std::vector<int64_t> slots = locked([&](BlockTable& t) {
      sequence->pool->check_group(group);
      const int64_t n = count.value_or(t.length() - first);
      if (n < 0 || n > t.length())
        throw std::invalid_argument(str(n) + " slots from token " + str(first) +
                                    ": the sequence has " + str(t.length()));
      std::vector<int64_t> out(static_cast<size_t>(n));
      t.slot_mapping(group, first, out);
      return out;
    });
    const size_t n = slots.size();
    return to_array(std::move(slots), {n});
  }

  std::shared_ptr<Sequence> sequence;
};

nb::tuple to_arrays(CsrTables csr) {
  const size_t bounds = csr.indptr.size(), pages = csr.indices.size(),
               seqs = csr.last_page_len.size();
  return nb::make_tuple(to_array(std::move(csr.indptr), {bounds}),
                        to_array(std::move(csr.indices), {pages}),
                        to_array(std::move(csr.last_page_len), {seqs}));
}

nb::tuple to_arrays(DenseTables dense) {
  const size_t seqs = dense.seq_lens.size();
  return nb::make_tuple(
      to_array(std::move(dense.block_table), {seqs, static_cast<size_t>(dense.stride)}),
      to_array(std::move(dense.seq_lens), {seqs}));
}

class Batch {
 public:
  Batch(const std::vector<Table*>& tables, const std::vector<int64_t>& query_lens) {
    if (tables.empty()) throw std::invalid_argument("a batch needs at least one sequence");
    for (const Table* table : tables)
      if (table == nullptr) throw nb::type_error("tables: None is no BlockTable");
    if (query_lens.size() != tables.size())
      throw std::invalid_argument(str(static_cast<int64_t>(query_lens.size())) +
                                  " query lengths for " + str(static_cast<int64_t>(tables.size())) +
                                  " sequences");
    pool_ = tables[0]->sequence->pool;
    for (const Table* table : tables) {
      if (table->sequence->pool != pool_)
        throw std::invalid_argument("sequences of a batch must share one pool");
      for (const auto& other : sequences_)
        if (other == table->sequence)
          throw std::invalid_argument("a sequence is in the batch twice");
      sequences_.push_back(table->sequence);
    }
    const GilRelease release;
    const std::lock_guard lock(pool_->mutex);
    query_start_.push_back(0);
    int64_t total = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const int64_t length = sequences_[s]->table->length(), queries = query_lens[s];
      if (queries < 0 || queries > length)
        throw std::invalid_argument("query length " + str(queries) + " of sequence " +
                                    str(static_cast<int64_t>(s)) + ": must be in 0.." +
                                    str(length) + ", its tokens");
      total += queries;
      if (total > INT32_MAX)
        throw std::invalid_argument("more than " + str(INT32_MAX) + " queries in a batch");
      query_start_.push_back(static_cast<int32_t>(total));
      changes_.push_back(sequences_[s]->changes);
    }
    const auto all = tables_of();
    for (int g = 0; g < pool_->pages.num_groups(); ++g) dense_.push_back(dense_tables(all, g));
    plans_.resize(dense_.size());
  }

  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  void store(nb::handle keys, nb::handle values, int layer) {
    const FloatArray k(keys, "keys"), v(values, "values");
    const TensorView kv = k.tokens_first(), vv = v.tokens_first();
    const GilRelease release;
    const std::lock_guard lock(pool_->mutex);
    check(layer);
    const LayerPages pages = pool_->pages.layer_pages(layer);
    check_rows(kv, "keys", pages.num_kv_heads, pages.keys.head_dim);
    check_rows(vv, "values", pages.num_kv_heads, pages.values.head_dim);
    keys_.resize(static_cast<size_t>(kv.num_tokens * kv.num_heads * kv.head_dim));
    values_.resize(static_cast<size_t>(vv.num_tokens * vv.num_heads * vv.head_dim));
    to_floats(kv, keys_.data());
    to_floats(vv, values_.data());
    const int group = pool_->pages.group_of_layer(layer);
    check_own(group);
    const std::vector<int64_t> slots = new_slots(group);
    StoreArgs args;
    args.keys = keys_.data();
    args.values = values_.data();
    args.pages = pages;
    args.slot_mapping = slots.data();
    args.num_tokens = static_cast<int>(slots.size());
    if (!storable(args))
      throw std::invalid_argument(
          "a row has an infinity or a NaN, which quantised pages cannot hold");
    if (!pagedkv::store(args, *pool_->executor)) throw std::logic_error("a row was not storable");
  }

  nb::object attend(nb::handle queries, int layer, std::optional<float> scale, bool causal,
                    std::optional<int> sliding_window, float logit_softcap, nb::handle sinks,
                    bool log_sum_exp) {
    const FloatArray q(queries, "queries");
    const TensorView view = q.tokens_first();
    std::vector<float> sink_values;
    if (!sinks.is_none()) sink_values = FloatArray(sinks, "sinks").floats(0, view.num_heads);
    Tensor out;
    std::vector<float> lse;
    {
      const GilRelease release;
      const std::lock_guard lock(pool_->mutex);
      check(layer);
      const LayerPages pages = pool_->pages.layer_pages(layer);
      if (view.num_heads < 1 || view.num_heads > INT32_MAX ||
          view.num_heads % pages.num_kv_heads != 0)
        throw std::invalid_argument(str(view.num_heads) + " query heads: must be a multiple of " +
                                    str(pages.num_kv_heads) + " kv heads");
      check_rows(view, "queries", view.num_heads, pages.keys.head_dim);
      const int group = pool_->pages.group_of_layer(layer);
      const DenseTables& dense = dense_[static_cast<size_t>(group)];
      keys_.resize(static_cast<size_t>(view.num_tokens * view.num_heads * view.head_dim));
      to_floats(view, keys_.data());
      std::vector<float> rows(
          static_cast<size_t>(view.num_tokens * view.num_heads * pages.values.head_dim));
      if (log_sum_exp) lse.resize(static_cast<size_t>(view.num_tokens * view.num_heads));
      AttentionArgs args;
      args.queries = keys_.data();
      args.out = rows.data();
      args.log_sum_exp = log_sum_exp ? lse.data() : nullptr;
      args.pages = pages;
      args.num_q_heads = static_cast<int>(view.num_heads);
      args.num_seqs = static_cast<int>(sequences_.size());
      args.query_start = query_start_.data();
      args.seq_lens = dense.seq_lens.data();
      args.block_table = dense.block_table.data();
      args.block_table_stride = dense.stride;
      args.scale = scale.value_or(1.0f / std::sqrt(static_cast<float>(pages.keys.head_dim)));
      args.causal = causal;
      args.sliding_window = sliding_window.value_or(pool_->pages.sliding_window(group));
      check_there(group, args.sliding_window);
      args.logit_softcap = logit_softcap;
      args.sinks = sink_values.empty() ? nullptr : sink_values.data();
      prepare(args, static_cast<size_t>(group));
      pagedkv::attend(args, plans_[static_cast<size_t>(group)].plan, *pool_->executor);
      out = Tensor(view.dtype, view.num_heads, view.num_tokens, pages.values.head_dim);
      // Tokens first, as it was asked for.
      from_floats(rows.data(), {out.bytes.data(), view.dtype, view.num_heads, view.num_tokens,
                                pages.values.head_dim, pages.values.head_dim,
                                view.num_heads * pages.values.head_dim});
    }
    const auto tokens = static_cast<size_t>(out.num_tokens),
               heads = static_cast<size_t>(out.num_heads), dim = static_cast<size_t>(out.head_dim);
    nb::object array = to_array(std::move(out), {tokens, heads, dim});
    if (!log_sum_exp) return array;
    return nb::make_tuple(array, to_array(std::move(lse), {tokens, heads}));
  }

  // f's result, under the pool's lock, of sequences that are as the batch has seen them.
  template <class F>
  auto locked(F&& f) const {
    const GilRelease release;
    const std::lock_guard lock(pool_->mutex);
    check_unchanged();
    return f();
  }

  nb::tuple csr(int group) {
    return to_arrays(locked([&] { return csr_tables(tables_of(), group); }));
  }
  nb::tuple dense(int group, int32_t padding) {
    return to_arrays(locked([&] { return dense_tables(tables_of(), group, padding); }));
  }
  nb::object slot_mapping(int group) {
    std::vector<int64_t> slots = locked([&] {
      pool_->check_group(group);
      return new_slots(group);
    });
    const size_t count = slots.size();
    return to_array(std::move(slots), {count});
  }
  int64_t num_seqs() const { return static_cast<int64_t>(sequences_.size()); }
  int64_t num_tokens() const { return query_start_.back(); }
  nb::object query_start() const {
    return to_array(std::vector<int32_t>(query_start_), {query_start_.size()});
  }

 private:
  struct Plan {
    AttentionPlan plan;
    int num_q_heads = 0;  // what it was prepared for; 0: not yet
    bool causal = true;
    int sliding_window = 0;
    LayerPages pages;
  };

  std::vector<const BlockTable*> tables_of() const {
    std::vector<const BlockTable*> all;
    for (const auto& sequence : sequences_) all.push_back(&*sequence->table);
    return all;
  }
  void check_unchanged() const {
    for (size_t s = 0; s < sequences_.size(); ++s)
      if (sequences_[s]->changes != changes_[s])
        throw std::invalid_argument("sequence " + str(static_cast<int64_t>(s)) +
                                    " has changed since the batch was made: make another");
  }
  void check(int layer) const {
    pool_->check_layer(layer);
    check_unchanged();
  }
  void check_rows(const TensorView& rows, const char* name, int64_t heads, int64_t dim) const {
    if (rows.num_tokens == query_start_.back() && rows.num_heads == heads && rows.head_dim == dim)
      return;
    throw std::invalid_argument(std::string(name) + " are [" + str(rows.num_tokens) + ", " +
                                str(rows.num_heads) + ", " + str(rows.head_dim) + "]: must be [" +
                                str(query_start_.back()) + ", " + str(heads) + ", " + str(dim) +
                                "]");
  }
  // That no other sequence holds the pages which are about to be written.
  void check_own(int group) const {
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const BlockTable& table = *sequences_[s]->table;
      const int64_t first = table.length() - (query_start_[s + 1] - query_start_[s]);
      const auto pages = table.pages(group);
      for (int64_t i = first / table.page_size(); i < static_cast<int64_t>(pages.size()); ++i)
        if (first < table.length() &&
            pool_->pages.references(group, pages[static_cast<size_t>(i)]) > 1)
          throw std::invalid_argument("sequence " + str(static_cast<int64_t>(s)) +
                                      ": another holds the page of its tokens from " +
                                      str(i * table.page_size()) +
                                      " on; only tokens that were appended since can be stored");
    }
  }
  // That no sequence has given back what a window (0: none) lets its queries see.
  void check_there(int group, int window) const {
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const BlockTable& table = *sequences_[s]->table;
      const int64_t first_query = table.length() - (query_start_[s + 1] - query_start_[s]),
                    first_seen = window > 0 ? first_query + 1 - window : 0,
                    first_held = table.num_passed(group) * table.page_size();
      if (first_query < table.length() && std::max<int64_t>(0, first_seen) < first_held)
        throw std::invalid_argument("sequence " + str(static_cast<int64_t>(s)) + ": a window of " +
                                    str(window) + " tokens (0: none) sees from " +
                                    str(std::max<int64_t>(0, first_seen)) + " on, tokens before " +
                                    str(first_held) + " were given back");
    }
  }
  // The slots of every sequence's newest tokens.
  std::vector<int64_t> new_slots(int group) const {
    std::vector<int64_t> slots(static_cast<size_t>(query_start_.back()));
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const auto count = static_cast<size_t>(query_start_[s + 1] - query_start_[s]);
      const BlockTable& table = *sequences_[s]->table;
      table.slot_mapping(group, table.length() - static_cast<int64_t>(count),
                         std::span(slots).subspan(static_cast<size_t>(query_start_[s]), count));
    }
    return slots;
  }
  // Once for all layers of a group that are asked alike.
  void prepare(const AttentionArgs& args, size_t group) {
    Plan& p = plans_[group];
    const auto same = [](const PageArray& a, const PageArray& b) {
      return a.format == b.format && a.head_dim == b.head_dim;
    };
    if (p.num_q_heads == args.num_q_heads && p.causal == args.causal &&
        p.sliding_window == args.sliding_window &&
        p.pages.num_kv_heads == args.pages.num_kv_heads && same(p.pages.keys, args.pages.keys) &&
        same(p.pages.values, args.pages.values))
      return;
    p.num_q_heads = 0;
    p.plan.prepare(args, pool_->executor->num_workers());
    p.num_q_heads = args.num_q_heads;
    p.causal = args.causal;
    p.sliding_window = args.sliding_window;
    p.pages = args.pages;
  }

  std::shared_ptr<Pool> pool_;
  std::vector<std::shared_ptr<Sequence>> sequences_;
  std::vector<int64_t> changes_;
  std::vector<int32_t> query_start_;
  std::vector<DenseTables> dense_;  // [group]
  std::vector<Plan> plans_;         // [group]
  std::vector<float> keys_, values_;
};

}  // namespace

void bind_pool(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<LayerSpec>(m, "LayerSpec", "What one layer stores for each token.")
      .def(
          "__init__",
          [](LayerSpec* self, int num_kv_heads, int head_dim, const std::string& format,
             std::optional<int> value_head_dim, const std::optional<std::string>& value_format) {
            new (self)
                LayerSpec(layer_spec(num_kv_heads, head_dim, format, value_head_dim, value_format));
          },
          "num_kv_heads"_a, "head_dim"_a, "format"_a = "f16", nb::kw_only(),
          "value_head_dim"_a.none() = nb::none(), "value_format"_a.none() = nb::none())
      .def("__repr__",
           [](const LayerSpec& s) {
             std::string text = "LayerSpec(" + str(s.num_kv_heads) + ", " + str(s.key_head_dim) +
                                ", \"" + std::string(page_format_name(s.key_format)) + "\"";
             if (s.value_head_dim != s.key_head_dim)
               text += ", value_head_dim=" + str(s.value_head_dim);
             if (s.value_format != s.key_format)
               text += ", value_format=\"" + std::string(page_format_name(s.value_format)) + "\"";
             return text + ")";
           })
      .def(
          "__eq__",
          [](const LayerSpec& a, const LayerSpec& b) {
            return a.num_kv_heads == b.num_kv_heads && a.key_head_dim == b.key_head_dim &&
                   a.value_head_dim == b.value_head_dim && a.key_format == b.key_format &&
                   a.value_format == b.value_format;
          },
          nb::is_operator(), nb::sig("def __eq__(self, other: object) -> bool"))
      .def_ro("num_kv_heads", &LayerSpec::num_kv_heads)
      .def_ro("key_head_dim", &LayerSpec::key_head_dim)
      .def_ro("value_head_dim", &LayerSpec::value_head_dim)
      .def_prop_ro("key_format",
                   [](const LayerSpec& s) { return std::string(page_format_name(s.key_format)); })
      .def_prop_ro("value_format", [](const LayerSpec& s) {
        return std::string(page_format_name(s.value_format));
      });

  nb::class_<PoolHandle>(m, "PagePool", "Pages of many sequences; see pagedkv.PagePool.")
      .def(nb::init<const std::vector<std::pair<int, std::vector<LayerSpec>>>&, int, int32_t, bool,
                    int64_t, int64_t, int32_t>(),
           "groups"_a, nb::kw_only(), "page_size"_a = 16, "num_pages"_a = 1024, "dynamic"_a = true,
           "max_bytes"_a = 0, "headroom_bytes"_a = int64_t{256} << 20, "max_pages"_a = 0)
      .def_prop_ro("num_groups", [](PoolHandle& h) { return h.pool->pages.num_groups(); })
      .def_prop_ro("num_layers", [](PoolHandle& h) { return h.pool->pages.num_layers(); })
      .def_prop_ro("page_size", [](PoolHandle& h) { return h.pool->pages.page_size(); })
      .def_prop_ro(
          "bytes_per_token", [](PoolHandle& h) { return h.pool->pages.bytes_per_token(); },
          "Bytes of K and V, scales included, over all layers.")
      .def(
          "sliding_window",
          [](PoolHandle& h, int group) {
            h.pool->check_group(group);
            return h.pool->pages.sliding_window(group);
          },
          "group"_a = 0, "The group's window in tokens; 0: full attention.")
      .def(
          "group_of_layer",
          [](PoolHandle& h, int layer) {
            h.pool->check_layer(layer);
            return h.pool->pages.group_of_layer(layer);
          },
          "layer"_a)
      .def(
          "capacity",
          [](PoolHandle& h, int group) {
            h.pool->check_group(group);
            return h.locked([&](PagePool& p) { return p.capacity(group); });
          },
          "group"_a = 0, "Pages usable without growth.")
      .def(
          "pages_free",
          [](PoolHandle& h, int group) {
            h.pool->check_group(group);
            return h.locked([&](PagePool& p) { return p.pages_free(group); });
          },
          "group"_a = 0, "Pages of capacity() that nobody holds.")
      .def("grow", &PoolHandle::grow, "num_pages"_a, "group"_a = 0,
           "Raises a group's capacity to at least num_pages, with their memory.\n\n"
           "Raises CapacityError or PageMemoryError; then nothing has changed.")
      .def(
          "shrink_to",
          [](PoolHandle& h, int64_t num_pages, int group) {
            h.pool->check_group(group);
            h.locked([&](PagePool& p) {
              h.pool->exports.check_none("shrink_to");
              p.shrink_to(group, num_pages);
            });
          },
          "num_pages"_a, "group"_a = 0,
          "Gives the memory of free pages beyond num_pages back. BufferError while views of pages "
          "live.")
      .def("views", &PoolHandle::views, "layer"_a = 0,
           nb::sig("def views(self, layer: int = 0) -> tuple[typing.Any, typing.Any]"))
      .def("stats", &PoolHandle::stats, nb::sig("def stats(self) -> dict[str, int | float]"),
           "Counters over all groups; bytes of pages and scales.")
      .def(
          "bytes_resident",
          [](PoolHandle& h) { return h.locked([](PagePool& p) { return p.bytes_resident(); }); },
          "Bytes that the kernel really holds. Slow.")
      .def(
          "verify", [](PoolHandle& h) { h.locked([](PagePool& p) { p.verify(); }); },
          "Recounts every page; RuntimeError naming the first fault.");

  nb::class_<Table>(m, "BlockTable",
                    "Which pages hold a sequence's tokens. They go back when it is deleted.")
      .def(nb::init<const PoolHandle&, int64_t>(), "pool"_a, "context_window"_a = 0)
      .def("__repr__",
           [](Table& t) {
             return t.locked([](BlockTable& b) {
               return "<BlockTable of " + str(b.length()) + " tokens in " +
                      str(static_cast<int64_t>(b.pages(0).size()) - b.num_passed(0)) + " pages>";
             });
           })
      .def_prop_ro("length", &Table::length, "Tokens.")
      .def("__len__", &Table::length)
      .def_prop_ro(
          "capacity", [](Table& t) { return t.locked([](BlockTable& b) { return b.capacity(); }); },
          "Tokens that fit without another page.")
      .def_prop_ro("page_size", [](Table& t) { return t.sequence->pool->pages.page_size(); })
      .def("append", &Table::append, "num_tokens"_a,
           "Makes room for num_tokens more and counts them as held; all or nothing.\n\n"
           "Raises CapacityError or PageMemoryError.")
      .def("try_append", &Table::try_append, "num_tokens"_a,
           "append(), answering whether there was room.")
      .def("trim_to", &Table::trim_to, "length"_a,
           "Forgets the last tokens down to `length`; pages go back. ValueError where "
           "can_trim_to(length) is false; then nothing has changed.")
      .def(
          "can_trim_to",
          [](Table& t, int64_t length) {
            return t.locked([&](BlockTable& b) { return b.can_trim_to(length); });
          },
          "length"_a,
          "Whether it has so many tokens and no page that the next one then sees was given back.")
      .def("release_passed", &Table::release_passed,
           "After a step: gives back, in groups with a window, the pages that no later token sees. "
           "Their entries in dense() become -1. Returns how many.")
      .def("share_prefix", &Table::share_prefix, "num_pages"_a,
           "A table that holds the first num_pages full pages together with this one; no byte is "
           "copied.")
      .def("fork", &Table::fork,
           "Another branch: a table of the same tokens in the same pages. No byte is copied; who "
           "appends first "
           "while a partly filled last page is shared gets a copy of it.")
      .def("slot_mapping", &Table::slot_mapping, "first"_a = 0, "count"_a.none() = nb::none(),
           "group"_a = 0,
           nb::sig(
               "def slot_mapping(self, first: int = 0, count: int | None = None, group: int = 0) "
               "-> numpy.ndarray"),
           "Slots of `count` tokens from `first` on (to the end where None), int64: page * "
           "page_size + offset.")
      .def(
          "csr",
          [](Table& t, int group) {
            return to_arrays(t.locked([&](BlockTable& b) {
              const BlockTable* const one = &b;
              return csr_tables({&one, 1}, group);
            }));
          },
          "group"_a = 0,
          nb::sig("def csr(self, group: int = 0) -> tuple[numpy.ndarray, numpy.ndarray, "
                  "numpy.ndarray]"),
          "FlashInfer's kv_indptr [2], kv_page_indices [pages], kv_last_page_len [1], int32; "
          "without the pages that were given back.")
      .def(
          "dense",
          [](Table& t, int group, int32_t padding) {
            return to_arrays(t.locked([&](BlockTable& b) {
              const BlockTable* const one = &b;
              return dense_tables({&one, 1}, group, padding);
            }));
          },
          "group"_a = 0, "padding"_a = 0,
          nb::sig("def dense(self, group: int = 0, padding: int = 0) -> tuple[numpy.ndarray, "
                  "numpy.ndarray]"),
          "vLLM's block_table [1, pages] and seq_lens [1], int32; -1: given back.");

  nb::class_<Batch>(m, "Batch",
                    "Sequences of one pool that take a step together: tables, and how many of the "
                    "newest tokens of each "
                    "are new in this step (query_lens). Belongs to the step: once a table has "
                    "changed it is refused.")
      .def(nb::init<const std::vector<Table*>&, const std::vector<int64_t>&>(), "tables"_a,
           "query_lens"_a)
      .def("__repr__",
           [](Batch& b) {
             return "<Batch of " + str(b.num_seqs()) + " sequences, " + str(b.num_tokens()) +
                    " new tokens>";
           })
      .def("store", &Batch::store, "keys"_a.none(), "values"_a.none(), "layer"_a = 0,
           nb::sig("def store(self, keys: object, values: object, layer: int = 0) -> None"),
           "Writes keys and values [tokens, num_kv_heads, head_dim] of the newest tokens, sequence "
           "after sequence.\n\n"
           "float32, float16 or bfloat16. ValueError for other shapes, and for a row with an "
           "infinity or a NaN where "
           "pages are quantised, or where another sequence holds a page that would be written: "
           "then nothing is stored.")
      .def(
          "attend", &Batch::attend, "queries"_a.none(), nb::kw_only(), "layer"_a = 0,
          "scale"_a.none() = nb::none(), "causal"_a = true, "sliding_window"_a.none() = nb::none(),
          "logit_softcap"_a = 0.0f, "sinks"_a.none() = nb::none(), "log_sum_exp"_a = false,
          nb::sig(
              "def attend(self, queries: object, *, layer: int = 0, scale: float | None = None, "
              "causal: bool = True, sliding_window: int | None = None, logit_softcap: float = 0.0, "
              "sinks: object | None = None, log_sum_exp: bool = False) -> typing.Any"),
          "Attention of the newest tokens, queries [tokens, num_q_heads, head_dim] -> [tokens, "
          "num_q_heads, "
          "value_head_dim] in their dtype; with log_sum_exp a pair, its second [tokens, "
          "num_q_heads] float32.\n\n"
          "scale: 1 / sqrt(head_dim) where None. sliding_window: the layer group's where None, 0: "
          "none.")
      .def("csr", &Batch::csr, "group"_a = 0,
           nb::sig("def csr(self, group: int = 0) -> tuple[numpy.ndarray, numpy.ndarray, "
                   "numpy.ndarray]"),
           "FlashInfer's kv_indptr [B + 1], kv_page_indices, kv_last_page_len [B], int32.")
      .def("dense", &Batch::dense, "group"_a = 0, "padding"_a = 0,
           nb::sig("def dense(self, group: int = 0, padding: int = 0) -> tuple[numpy.ndarray, "
                   "numpy.ndarray]"),
           "vLLM's block_table [B, most pages] and seq_lens [B], int32.")
      .def("slot_mapping", &Batch::slot_mapping, "group"_a = 0,
           nb::sig("def slot_mapping(self, group: int = 0) -> numpy.ndarray"),
           "Slots of the newest tokens, int64.")
      .def_prop_ro("query_start", &Batch::query_start,
                   nb::sig("def query_start(self) -> numpy.ndarray"),
                   "query_start_loc [B + 1], int32.");
}

}  // namespace pagedkv::python
