// Random operations on PagedKVCache against ContiguousCache, compared with == after each: sizes, counters, every byte of
// the pages, what reads and attention give. Calls that must fail, and commits refused at random, must change nothing.
// RapidCheck draws lists of operations and cuts a failing one down; RC_PARAMS="seed=…" draws others.
#include <bit>
#include <cstdio>
#include <limits>
#include <sstream>

#include "core/cache_testing.h"
#include "core/contiguous_cache.h"
#include "core/random_operations.h"
#include "pagedkv/base/executor.h"
#include "pagedkv/kernels/attention.h"

namespace pagedkv::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

DType draw_dtype(Draw& draw) { return draw.of({DType::kF32, DType::kF16, DType::kBF16}); }

PagedKVQuantMode draw_mode(Draw& draw) {
  return draw.of({PagedKVQuantMode::kOff, PagedKVQuantMode::kOff, PagedKVQuantMode::kQ8,
                  PagedKVQuantMode::kQ6, PagedKVQuantMode::kQ4});
}

// Rows in one of the layouts that callers have, and the memory they lie in.
struct Rows {
  std::vector<std::byte> memory;
  TensorView view;
};

// Values of one kind: plain, whole numbers and halves (ties), far apart, zeros.
float draw_value(Draw& draw, int kind) {
  switch (kind) {
    case 0:
      return static_cast<float>(draw(509) - 254) / 2;
    case 1:
      return std::ldexp(static_cast<float>(draw(2001) - 1000), draw(70) - 50);
    case 2:
      return draw.of({0.0f, -0.0f, 1e-7f, -1e-40f});
    default:
      return static_cast<float>(draw(1 << 24) - (1 << 23)) / (1 << 23);
  }
}

Rows draw_rows(Draw& draw, int64_t heads, int64_t tokens, int64_t dim, DType dtype,
               bool finite = true) {
  Rows rows;
  TensorView& view = rows.view;
  view = {nullptr, dtype, heads, tokens, dim, 0, 0};
  const int64_t pad = draw.of({0, 0, 3});
  if (draw(2)) {
    view.token_stride = dim + pad;
    view.head_stride = tokens * view.token_stride + draw.of({0, 5});
  } else {
    view.head_stride = dim + pad;
    view.token_stride = heads * view.head_stride + draw.of({0, 5});
  }
  const int64_t elements =
      std::max<int64_t>(0, heads * view.head_stride + tokens * view.token_stride);
  rows.memory.resize(static_cast<size_t>(elements * dtype_bytes(dtype)), std::byte{0xff});
  view.data = rows.memory.data();
  std::vector<float> values(static_cast<size_t>(heads * tokens * dim));
  const int kind = draw(6);
  for (float& x : values) x = draw_value(draw, kind);
  if (kind == 0 && !values.empty()) values[0] = 127;  // q8's scale is 1
  if (!finite && !values.empty())
    values[static_cast<size_t>(draw(static_cast<int>(values.size())))] =
        draw.of({kInf, -kInf, std::numeric_limits<float>::quiet_NaN()});
  from_floats(values.data(),
              {rows.memory.data(), dtype, heads, tokens, dim, view.head_stride, view.token_stride});
  if (dtype == DType::kF16 && finite)  // no value beyond f16's range
    for (size_t i = 0; i + 1 < rows.memory.size(); i += 2)
      if ((rows.memory[i + 1] & std::byte{0x7c}) == std::byte{0x7c})
        rows.memory[i + 1] &= std::byte{0xbf};
  return rows;
}

// Refuses commits when told to, and knows whether it was asked.
struct Machine {
  bool refuses = false, asked = false;
};

class Session {
 public:
  explicit Session(uint32_t seed)
      : draw_(seed), threads_(two_threads()), cache_(draw_options(draw_)), model_(options_) {}

  // Empty, or how the cache and the model came apart.
  std::string step(const Op& op) {
    Draw draw(op.seed);
    op_ = &op;
    machine_.refuses = draw.one_in(12);
    machine_.asked = false;
    what_.clear();
    problem_.clear();
    (this->*kind_of(op.kind))(draw);
    machine_.refuses = false;
    if (problem_.empty()) compare();
    return problem_.empty() ? "" : what_ + ": " + problem_;
  }

  std::string finish() {
    what_ = "at the end";
    problem_.clear();
    for (int layer = 0; layer < cache_.num_layers(); ++layer) check_read(layer, 2);
    compare();
    return problem_.empty() ? "" : what_ + ": " + problem_;
  }

 private:
  using Kind = void (Session::*)(Draw&);
  struct Weight {
    int below;
    Kind kind;
  };

  static Kind kind_of(int drawn) {
    static constexpr Weight kinds[] = {{30, &Session::update_one},
                                       {38, &Session::update_all},
                                       {42, &Session::update_and_fetch},
                                       {54, &Session::attend},
                                       {60, &Session::trim},
                                       {64, &Session::read},
                                       {66, &Session::reset},
                                       {69, &Session::set_state},
                                       {72, &Session::set_half},
                                       {74, &Session::save_and_restore},
                                       {77, &Session::meta},
                                       {81, &Session::grow},
                                       {84, &Session::shrink},
                                       {86, &Session::copy},
                                       {87, &Session::from_arrays},
                                       {89, &Session::begin_anew},
                                       {91, &Session::move},
                                       {93, &Session::mask},
                                       {100, &Session::misuse}};
    for (const Weight& weight : kinds)
      if (drawn < weight.below) return weight.kind;
    return &Session::misuse;
  }

  static Executor* two_threads() {
    static ThreadPool threads(2);
    return &threads;
  }

  // ---- options and shapes

  PagedKVCacheOptions draw_options(Draw& draw) {
    PagedKVCacheOptions o;
    o.block_size = draw.of({1, 2, 3, 4, 4, 8, 16, 16, 64});
    o.num_blocks = 1 + draw(6);
    if (draw(2)) o.dtype = draw_dtype(draw);
    if (draw(4)) o.quant = PagedKVQuantConfig(draw_mode(draw), draw_mode(draw));
    if (!draw.one_in(3)) o.dynamic = !draw.one_in(4);
    if (draw.one_in(3)) o.context_window = draw(120);
    if (draw.one_in(5)) o.sliding_window = draw(12);
    if (draw.one_in(8)) o.max_bytes = 1024 << draw(7);
    o.num_layers = draw.of({1, 1, 1, 2, 3});
    if (draw.one_in(12)) o.executor = threads_;
    o.commit_hook = [this](int64_t) {
      machine_.asked = true;
      return !machine_.refuses;
    };
    draw_shape(draw, o.quant.value_or(PagedKVQuantConfig()));
    return options_ = o;
  }

  static int draw_dim(Draw& draw, PagedKVQuantMode mode) {
    const int dim = draw.of({1, 2, 3, 4, 7, 8, 12, 16, 16, 20, 32, 33});
    return mode == PagedKVQuantMode::kOff || mode == PagedKVQuantMode::kQ8 ? dim
                                                                           : (dim + 3) / 4 * 4;
  }

  // What the next first write brings.
  void draw_shape(Draw& draw, const PagedKVQuantConfig& quant) {
    heads_ = 1 + draw(3);
    key_dim_ = draw_dim(draw, quant.keys());
    value_dim_ = draw_dim(draw, quant.values());
    key_dtype_ = draw_dtype(draw);
    value_dtype_ = draw(2) ? key_dtype_ : draw_dtype(draw);
  }

  DType incoming(Draw& draw, DType first) {  // a given dtype takes whatever comes
    return options_.dtype ? draw_dtype(draw) : first;
  }
  Rows keys_rows(Draw& draw, int64_t tokens, bool finite = true) {
    return draw_rows(draw, heads_, tokens, key_dim_, incoming(draw, key_dtype_), finite);
  }
  Rows value_rows(Draw& draw, int64_t tokens, bool finite = true) {
    return draw_rows(draw, heads_, tokens, value_dim_, incoming(draw, value_dtype_), finite);
  }

  int64_t held(int layer) const { return model_.layers[static_cast<size_t>(layer)].offset(); }
  int draw_layer(Draw& draw) { return draw(cache_.num_layers()); }
  // Few tokens mostly; a long cache grows no further.
  int64_t draw_tokens(Draw& draw, int layer) {
    if (held(layer) > 200) return draw(2);
    return draw.one_in(3) ? 1 : draw.one_in(12) ? 3 * op_->size : op_->size % 9;
  }

  // ---- calling and comparing

  template <class... Parts>
  void fail(const Parts&... parts) {
    if (!problem_.empty()) return;
    std::ostringstream text;
    (text << ... << parts);
    problem_ = text.str();
  }

  template <class A, class B>
  void equal(const char* name, const A& got, const B& wanted) {
    if (!(got == wanted)) fail(name, " is ", got, ", must be ", wanted);
  }

  void equal(const char* name, const Tensor& got, const Tensor& wanted) {
    if (!same(got, wanted)) fail(name, " differs");
  }

  template <class... Parts>
  void what(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    what_ = text.str();
  }

  template <class F>
  static Outcome outcome_of(F&& call, std::string* text) {
    try {
      call();
      return Outcome::kDone;
    } catch (const CapacityError& error) {
      *text = error.what();
      return Outcome::kCapacity;
    } catch (const MemoryError& error) {
      *text = error.what();
      return Outcome::kMemory;
    } catch (const std::invalid_argument& error) {
      *text = error.what();
      return Outcome::kInvalid;
    }
  }

  // Makes the call and, on a model of its own, what must come of it; keeps that model where it is done.
  template <class Call, class Expect>
  bool both(Call&& call, Expect&& expect) {
    static constexpr const char* kNames[] = {"done", "invalid", "beyond capacity", "out of memory"};
    ContiguousCache next = model_;
    Outcome wanted = expect(next);
    std::string text;
    const Outcome got = outcome_of(call, &text);
    if (machine_.refuses && machine_.asked) wanted = Outcome::kMemory;
    // The address space that a budget leaves may be what ends first.
    if (got == Outcome::kCapacity && wanted == Outcome::kMemory) wanted = got;
    if (got != wanted)
      fail("came to ", kNames[static_cast<int>(got)], " (", text, "), must be ",
           kNames[static_cast<int>(wanted)]);
    if (got != Outcome::kDone && text.empty()) fail("an error without a text");
    if (got != Outcome::kDone) return false;
    model_ = std::move(next);
    return true;
  }

  template <class Call>
  void refused(Call&& call, Outcome wanted = Outcome::kInvalid) {
    both(call, [&](ContiguousCache&) { return wanted; });
  }

  // With a byte budget growth may stop short of the formula.
  void settle_capacity() {
    if (model_.max_bytes() == 0) return;
    const int64_t blocks = cache_.capacity() / model_.block_size;
    if (blocks > model_.blocks || blocks * model_.block_size < model_.length)
      fail("capacity ", cache_.capacity(), " with a budget, by the formula ", model_.capacity());
    model_.blocks = blocks;
  }

  void compare() {
    settle_capacity();
    const PagedKVCacheStats s = cache_.stats();
    equal("offset()", cache_.offset(), model_.offset());
    equal("capacity()", cache_.capacity(), model_.capacity());
    equal("block_size()", cache_.block_size(), model_.block_size);
    equal("empty()", cache_.empty(), model_.offset() == 0);
    for (int layer = 0; layer < cache_.num_layers(); ++layer)
      equal("offset(layer)", cache_.offset(layer), held(layer));
    const auto& shape = model_.layers[0];
    equal("key_format", s.key_format, model_.has_pages ? shape.keys.format() : "");
    equal("value_format", s.value_format, model_.has_pages ? shape.values.format() : "");
    equal("stats offset", s.offset, model_.offset());
    equal("stats capacity", s.capacity, model_.capacity());
    equal("num_blocks", s.num_blocks, model_.blocks);
    equal("updates", s.updates, model_.updates);
    equal("allocation_events", s.allocation_events, model_.allocation_events);
    if (model_.max_bytes() == 0) equal("grow_events", s.grow_events, model_.grow_events);
    equal("shrink_events", s.shrink_events, model_.shrink_events);
    equal("reads", s.reads, model_.reads);
    equal("dequant_reads", s.dequant_reads, model_.dequant_reads);
    equal("dequant_tokens", s.dequant_tokens, model_.dequant_tokens);
    equal("pages_in_use", s.pages_in_use, model_.pages_in_use());
    equal("pages_peak", s.pages_peak, model_.pages_peak);
    equal("pages_capacity", s.pages_capacity, model_.blocks);
    equal("bytes_moved", s.bytes_moved, 0);
    const int64_t page_bytes = model_.has_pages ? model_.page_bytes() : 0;
    equal("bytes_in_use", s.bytes_in_use, model_.pages_in_use() * page_bytes);
    equal("size_bytes()", cache_.size_bytes(), s.bytes_committed);
    if (s.bytes_committed < s.bytes_in_use || s.bytes_committed > model_.blocks * page_bytes)
      fail("bytes_committed ", s.bytes_committed, ", in use ", s.bytes_in_use);
    if (s.bytes_reserved < s.bytes_committed || s.bytes_resident < s.bytes_committed)
      fail("reserved ", s.bytes_reserved, ", resident ", s.bytes_resident, ", committed ",
           s.bytes_committed);
    if (model_.max_bytes() > 0 && s.bytes_committed > model_.max_bytes())
      fail("bytes_committed ", s.bytes_committed, " beyond max_bytes ", model_.max_bytes());
    const double utilization =
        model_.length == 0 ? 0.0
                           : static_cast<double>(model_.offset()) /
                                 static_cast<double>(model_.pages_in_use() * model_.block_size);
    equal("block_utilization", s.block_utilization, utilization);
    std::array<int64_t, 2> calls{};
    for (const auto& entry : s.attention_calls)
      for (size_t phase = 0; phase < 2; ++phase) calls[phase] += entry.by_phase[phase];
    equal("prefill calls", calls[0], model_.attention_calls[0]);
    equal("decode calls", calls[1], model_.attention_calls[1]);
    for (int layer = 0; layer < cache_.num_layers(); ++layer) compare_pages(layer);
  }

  // Every byte that the pages hold for tokens, and that growth moved none.
  void compare_pages(int layer) {
    const std::span<const PageId> table = cache_.block_table();
    equal("block_table size", static_cast<int64_t>(table.size()), model_.pages_in_use());
    const LayerPages pages = cache_.layer_pages(layer);
    if (layer == 0) {
      if (first_keys_ != nullptr && pages.keys.data != first_keys_) fail("the pages moved");
      first_keys_ = pages.keys.data;
    }
    if (!model_.has_pages || !problem_.empty()) return;
    const auto& rows = model_.layers[static_cast<size_t>(layer)];
    const auto side = [&](const char* name, const PageArray& array, const ContiguousRows& wanted) {
      const auto bytes = static_cast<size_t>(wanted.heads * wanted.row_size());
      for (int64_t t = 0; t < wanted.tokens(); ++t) {
        const int64_t slot =
            table[static_cast<size_t>(t / pages.page_size)] * int64_t{pages.page_size} +
            t % pages.page_size;
        const auto at = static_cast<size_t>(t);
        if (std::memcmp(array.data + static_cast<size_t>(slot) * bytes,
                        wanted.codes.data() + at * bytes, bytes) != 0)
          return fail(name, " of layer ", layer, ", token ", t, ": bytes differ");
        if (wanted.quantised() &&
            std::memcmp(array.scales + slot * wanted.heads, wanted.scales.data() + t * wanted.heads,
                        static_cast<size_t>(wanted.heads) * sizeof(float)) != 0)
          return fail(name, " of layer ", layer, ", token ", t, ": scales differ");
      }
    };
    side("keys", pages.keys, rows.keys);
    side("values", pages.values, rows.values);
  }

  void count_read(int layer, bool keys, bool values) {
    ++model_.reads;
    const auto& rows = model_.layers[static_cast<size_t>(layer)];
    if (rows.offset() == 0) return;
    if ((keys && rows.keys.quantised()) || (values && rows.values.quantised())) {
      ++model_.dequant_reads;
      model_.dequant_tokens += rows.offset();
    }
  }

  // which: 0 keys, 1 values, 2 both
  void check_read(int layer, int which) {
    const auto& rows = model_.layers[static_cast<size_t>(layer)];
    count_read(layer, which != 1, which != 0);
    if (which == 0) return equal("keys()", cache_.keys(layer), rows.keys.tensor());
    if (which == 1) return equal("values()", cache_.values(layer), rows.values.tensor());
    const auto [keys, values] = cache_.state(layer);
    equal("state() keys", keys, rows.keys.tensor());
    equal("state() values", values, rows.values.tensor());
  }

  // ---- operations

  bool write(Draw& draw, int layer, int64_t tokens) {
    const bool finite = !draw.one_in(20);
    const Rows k = keys_rows(draw, tokens, finite || draw(2)), v = value_rows(draw, tokens, finite);
    const bool had_pages = model_.has_pages;
    const bool done = both([&] { cache_.update(k.view, v.view, layer); },
                           [&](ContiguousCache& m) { return m.update(k.view, v.view, layer); });
    if (done && !had_pages) first_keys_ = nullptr;
    return done;
  }

  void update_one(Draw& draw) {
    const int layer = draw_layer(draw);
    const int64_t tokens = draw_tokens(draw, layer);
    what("update of ", tokens, " tokens, layer ", layer);
    write(draw, layer, tokens);
  }

  void update_all(Draw& draw) {
    const int64_t tokens = draw_tokens(draw, 0);
    what("update of ", tokens, " tokens, every layer");
    for (int layer = 0; layer < cache_.num_layers(); ++layer)
      if (!write(draw, layer, tokens)) return;
  }

  void update_and_fetch(Draw& draw) {
    const int layer = draw_layer(draw);
    const int64_t tokens = draw_tokens(draw, layer);
    what("update_and_fetch of ", tokens, " tokens, layer ", layer);
    const Rows k = keys_rows(draw, tokens), v = value_rows(draw, tokens);
    std::pair<Tensor, Tensor> got;
    const bool done = both([&] { got = cache_.update_and_fetch(k.view, v.view, layer); },
                           [&](ContiguousCache& m) { return m.update(k.view, v.view, layer); });
    if (!done) return;
    count_read(layer, true, true);
    const auto& rows = model_.layers[static_cast<size_t>(layer)];
    equal("fetched keys", got.first, rows.keys.tensor());
    equal("fetched values", got.second, rows.values.tensor());
  }

  void attend(Draw& draw) {
    AttendOptions o;
    o.layer = draw_layer(draw);
    const int64_t tokens = held(o.layer);
    const int64_t count = draw(2) ? std::min<int64_t>(1, tokens)
                                  : draw(static_cast<int>(std::min<int64_t>(tokens, 9)) + 1);
    const int64_t num_heads = heads_ * draw.of({1, 2, 3});
    what("attend of ", count, " queries, layer ", o.layer);
    const Rows q = draw_rows(draw, num_heads, count, key_dim_, draw_dtype(draw));
    if (!model_.has_pages) return refused([&] { cache_.attend(q.view, o); });
    if (draw(2)) o.scale = static_cast<float>(draw(100)) / 50;
    o.causal = !draw.one_in(4);
    if (draw.one_in(4)) o.sliding_window = draw(20);
    if (draw.one_in(4)) o.logit_softcap = 1.0f + draw(30);
    std::vector<float> sinks, bias, lse(static_cast<size_t>(count * num_heads), -7),
        expected_lse = lse;
    std::vector<uint8_t> hidden;
    const auto cells = static_cast<size_t>(count * tokens);
    if (draw.one_in(5))
      for (int64_t h = 0; h < num_heads; ++h) sinks.push_back(static_cast<float>(draw(9) - 4));
    if (draw.one_in(5))
      for (size_t i = 0; i < cells; ++i) hidden.push_back(static_cast<uint8_t>(draw(4) != 0));
    if (draw.one_in(5))
      for (size_t i = 0; i < cells; ++i)
        bias.push_back(draw.one_in(6) ? -kInf : static_cast<float>(draw(100)) / 25);
    o.sinks = sinks;
    o.mask = hidden;
    o.bias = bias;
    const bool wants_lse = draw(2);
    const Tensor expected = model_.attend(q.view, o, wants_lse ? expected_lse.data() : nullptr);
    o.log_sum_exp = wants_lse ? lse.data() : nullptr;
    Tensor got(q.view.dtype, num_heads, count, value_dim_);
    if (draw(2)) {
      got = cache_.attend(q.view, o);
    } else {  // the caller's memory, tokens first
      std::vector<std::byte> memory(got.bytes.size());
      MutableTensorView out = got.view();
      out.data = memory.data();
      out.head_stride = value_dim_;
      out.token_stride = num_heads * value_dim_;
      cache_.attend(q.view, out, o);
      from_floats(to_rows(out).data(), got.view());
    }
    same_numbers("attention", to_rows(got), to_rows(expected));
    same_numbers("log_sum_exp", lse, expected_lse);
    if (count > 0) ++model_.attention_calls[count > 1 ? 0 : 1];
  }

  // Bit for bit, any NaN being one.
  void same_numbers(const char* name, const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size())
      return fail(name, " has ", a.size(), " numbers, must have ", b.size());
    for (size_t i = 0; i < a.size(); ++i)
      if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]) &&
          !(std::isnan(a[i]) && std::isnan(b[i])))
        return fail(name, '[', i, "] is ", a[i], ", must be ", b[i]);
  }

  void trim(Draw& draw) {
    const int64_t tokens = draw.one_in(3) ? 0 : draw.one_in(8) ? 1 << 20 : op_->size;
    what("trim of ", tokens);
    equal("trim()", cache_.trim(tokens), model_.trim(tokens));
  }

  void read(Draw& draw) {
    what("read");
    check_read(draw_layer(draw), draw(3));
  }

  void forget_pages(Draw& draw) {
    model_.drop();
    first_keys_ = nullptr;
    draw_shape(draw, model_.quant);
  }

  void reset(Draw& draw) {
    what("reset");
    cache_.reset();
    forget_pages(draw);
  }

  void set_state(Draw& draw) {
    const int64_t tokens = draw.one_in(5) ? 0 : op_->size;
    what("set_state of ", tokens, " tokens");
    const int heads = heads_, key_dim = key_dim_, value_dim = value_dim_;
    const DType key_dtype = key_dtype_, value_dtype = value_dtype_;
    draw_shape(draw, model_.quant);
    std::vector<Rows> rows;
    std::vector<PagedKVCache::Pair> pairs;
    for (int layer = 0; layer < cache_.num_layers(); ++layer) {
      rows.push_back(draw_rows(draw, heads_, tokens, key_dim_, key_dtype_));
      rows.push_back(draw_rows(draw, heads_, tokens, value_dim_, value_dtype_, !draw.one_in(15)));
    }
    for (size_t i = 0; i < rows.size(); i += 2) pairs.emplace_back(rows[i].view, rows[i + 1].view);
    const bool done = both(
        [&] {
          if (pairs.size() == 1 && draw(2))
            cache_.set_state(pairs[0].first, pairs[0].second);
          else
            cache_.set_state(pairs);
        },
        [&](ContiguousCache& m) {
          if (tokens > 0) return m.set_state(pairs);
          m.drop();
          return Outcome::kDone;
        });
    if (done) {
      first_keys_ = nullptr;
      return;
    }
    heads_ = heads, key_dim_ = key_dim, value_dim_ = value_dim;
    key_dtype_ = key_dtype, value_dtype_ = value_dtype;
  }

  // set_keys or set_values, the other half staying.
  void set_half(Draw& draw) {
    const bool keys = draw(2);
    const int64_t tokens = op_->size % 12;
    what(keys ? "set_keys of " : "set_values of ", tokens, " tokens");
    const Rows rows = keys ? keys_rows(draw, tokens) : value_rows(draw, tokens);
    const auto call = [&] {
      if (keys)
        cache_.set_keys(rows.view);
      else
        cache_.set_values(rows.view);
    };
    if (cache_.num_layers() != 1) return refused(call);
    if (tokens > 0) count_read(0, !keys, keys);
    const bool done = both(call, [&](ContiguousCache& m) {
      if (tokens == 0) {
        m.drop();
        return Outcome::kDone;
      }
      if (tokens > m.layers[0].offset()) return Outcome::kInvalid;
      ContiguousRows other = keys ? m.layers[0].values : m.layers[0].keys;
      other.cut(tokens);
      const Tensor kept = other.tensor();
      PagedKVCache::Pair pair(rows.view, kept);
      if (!keys) std::swap(pair.first, pair.second);
      return m.set_state({&pair, 1});
    });
    if (!done) return;
    first_keys_ = nullptr;
    if (tokens == 0) draw_shape(draw, model_.quant);
  }

  // What a session bank does: state and meta_state out, a new cache of another geometry, both in again.
  void save_and_restore(Draw& draw) {
    what("save and restore");
    trim_to_whole_steps();
    const auto meta = cache_.meta_state();
    equal("meta block_size", meta[0], std::to_string(model_.block_size));
    equal("meta num_blocks", meta[1], std::to_string(model_.blocks));
    equal("meta offset", meta[2], std::to_string(model_.offset()));
    if (model_.offset() == 0 || options_.max_bytes) return;
    std::vector<std::pair<Tensor, Tensor>> saved;
    for (int layer = 0; layer < cache_.num_layers(); ++layer) {
      saved.push_back(cache_.state(layer));
      count_read(layer, true, true);
    }
    std::vector<PagedKVCache::Pair> pairs;
    for (const auto& [k, v] : saved) pairs.emplace_back(k.view(), v.view());
    PagedKVCacheOptions o = options_;
    o.block_size = 1 + draw(20);
    o.num_blocks = 1;
    PagedKVCache restored(o);
    ContiguousCache model(o);
    const std::array<std::string, 3> geometry = {meta[0], meta[1], "0"};
    restored.set_meta_state(geometry);
    model.block_size = model_.block_size;
    model.blocks = model_.blocks;
    ContiguousCache before = std::exchange(model_, std::move(model));
    std::swap(cache_, restored);
    if (!both([&] { cache_.set_state(pairs); },
              [&](ContiguousCache& m) { return m.set_state(pairs); })) {
      model_ = std::move(before);
      std::swap(cache_, restored);
      return;
    }
    cache_.set_meta_state(meta);
    first_keys_ = nullptr;
    options_ = o;
  }

  void trim_to_whole_steps() {
    cache_.trim(0);
    model_.trim(0);
  }

  void meta(Draw& draw) {
    const int64_t size = draw.of({1, 4, 5, 16, 256, 0, 257}),
                  blocks = draw.of({1, 2, 9, 0, 1 << 20}),
                  tokens = draw.one_in(4) ? 1000 : op_->size % 20 - draw.one_in(6);
    const std::vector<std::string> texts = {std::to_string(size), std::to_string(blocks),
                                            std::to_string(tokens)};
    what("set_meta_state ", size, ' ', blocks, ' ', tokens);
    both([&] { cache_.set_meta_state(texts); },
         [&](ContiguousCache& m) {
           if (size < 1 || size > 256 || blocks < 1 || tokens < 0) return Outcome::kInvalid;
           const int64_t room = m.has_pages ? m.capacity() : size * blocks;
           if (tokens > room) return Outcome::kCapacity;
           if (tokens > m.offset()) return Outcome::kInvalid;
           m.cut(tokens);
           if (!m.has_pages) m.block_size = size, m.blocks = std::min<int64_t>(blocks, 9);
           return Outcome::kDone;
         });
    // A claim of a million blocks is taken, and here taken back: not dynamic, it would be committed.
    if (!model_.has_pages && cache_.capacity() == model_.block_size * (1 << 20)) {
      cache_.shrink_to_capacity(model_.block_size * 9);
    }
  }

  void grow(Draw& draw) {
    const int64_t tokens = draw.of<int64_t>({0, op_->size, op_->size * 3, model_.capacity() + 1});
    what("grow_to_capacity ", tokens);
    if (model_.capacity() > 2000) return;
    both([&] { cache_.grow_to_capacity(tokens); },
         [&](ContiguousCache& m) { return m.grow_to(tokens); });
  }

  void shrink(Draw& draw) {
    const int64_t tokens = draw.of<int64_t>({0, op_->size, 1 << 30});
    what("shrink_to_capacity ", tokens);
    const int64_t committed = model_.has_pages ? cache_.size_bytes() / model_.page_bytes() : 0;
    model_.shrink_to(tokens);
    const int64_t kept = std::max<int64_t>({1, model_.pages_of(tokens), model_.pages_in_use()});
    if (committed > kept) ++model_.shrink_events;
    equal("shrink_to_capacity()", cache_.shrink_to_capacity(tokens), model_.capacity());
  }

  // Goes on with a copy, in formats and pages of its own.
  void copy(Draw& draw) {
    what("from_cache of a cache");
    const int heads = heads_, key_dim = key_dim_, value_dim = value_dim_;
    const DType key_dtype = key_dtype_, value_dtype = value_dtype_;
    const PagedKVCacheOptions before = options_;
    PagedKVCacheOptions o = draw_options(draw);
    o.num_layers = before.num_layers;
    heads_ = heads, key_dim_ = key_dim, value_dim_ = value_dim;
    key_dtype_ = key_dtype, value_dtype_ = value_dtype;
    const int64_t count = model_.offset();
    ContiguousCache target(o);
    bool same_formats = true;
    std::optional<PagedKVCache> result;
    const bool done =
        both([&] { result.emplace(PagedKVCache::from_cache(cache_, o)); },
             [&](ContiguousCache&) {
               Outcome outcome = Outcome::kDone;
               for (int layer = 0; layer < o.num_layers && count > 0; ++layer) {
                 ContiguousCache::Layer rows = model_.layers[static_cast<size_t>(layer)];
                 rows.keys.cut(count);
                 rows.values.cut(count);
                 const Tensor k = rows.keys.tensor(), v = rows.values.tensor();
                 const auto shape = target.shaped(k, v);
                 same_formats = shape && ContiguousCache::same_shape(*shape, rows);
                 outcome = same_formats ? target.copy(rows, layer) : target.update(k, v, layer);
                 if (outcome != Outcome::kDone) break;
               }
               return outcome;
             });
    if (!done) {
      // A source in another format was read before the copy was refused.
      model_.reads = cache_.stats().reads;
      model_.dequant_reads = cache_.stats().dequant_reads;
      model_.dequant_tokens = cache_.stats().dequant_tokens;
      options_ = before;
      key_dtype_ = key_dtype, value_dtype_ = value_dtype;
      return;
    }
    if (same_formats && cache_.stats().reads != model_.reads)
      fail("a copy of bytes counted as a read");
    compare_source_after_copy(same_formats, count);
    cache_ = std::move(*result);
    model_ = std::move(target);
    options_ = o;
    first_keys_ = nullptr;
    key_dtype_ = model_.layers[0].keys.dtype, value_dtype_ = model_.layers[0].values.dtype;
    if (!model_.has_pages) draw_shape(draw, model_.quant);
  }

  void compare_source_after_copy(bool same_formats, int64_t count) {
    if (!same_formats && count > 0)
      for (int layer = 0; layer < cache_.num_layers(); ++layer) count_read(layer, true, true);
    compare();
  }

  void from_arrays(Draw& draw) {
    const int64_t tokens = op_->size % 30, offset = op_->size - draw(20);
    what("from_arrays of ", tokens, " tokens, offset ", offset);
    PagedKVCacheOptions o = draw_options(draw);
    o.num_layers = 1;
    options_ = o;
    const Rows k = keys_rows(draw, tokens), v = value_rows(draw, tokens);
    const int64_t count = std::clamp<int64_t>(offset, 0, tokens);
    model_ = ContiguousCache(o);
    cache_ = PagedKVCache(o);
    first_keys_ = nullptr;
    struct {
      TensorView keys, values;
      int64_t offset;
    } const entry{k.view, v.view, offset};
    both([&] { cache_ = PagedKVCache::from_cache(entry, o); },
         [&](ContiguousCache& m) {
           return count == 0 ? Outcome::kDone
                             : m.update(k.view.tokens(0, count), v.view.tokens(0, count), 0);
         });
  }

  void begin_anew(Draw& draw) {
    what("a new cache");
    const PagedKVCacheOptions o = draw_options(draw);
    cache_ = PagedKVCache(o);
    model_ = ContiguousCache(o);
    first_keys_ = nullptr;
  }

  // What was moved from may be assigned to and destroyed.
  void move(Draw& draw) {
    what("move");
    PagedKVCache other(std::move(cache_));
    if (draw(2)) {
      cache_ = std::move(other);
    } else {
      PagedKVCache third(options_);
      third = std::move(other);
      cache_ = std::move(third);
      other = PagedKVCache(options_);
      equal("offset() of a new cache", other.offset(), 0);
    }
  }

  void mask(Draw& draw) {
    const int64_t rows = draw(6);
    std::optional<int64_t> window;
    if (draw(2)) window = draw(8);
    const bool array = draw(2);
    what("make_mask ", rows);
    const CacheMask got = cache_.make_mask(rows, array, window);
    if (!window && rows == 1) return equal("kind", got.kind == CacheMask::Kind::kNone, true);
    if (!window && !array) return equal("kind", got.kind == CacheMask::Kind::kCausal, true);
    const int64_t offset = model_.offset();
    equal("rows", got.rows, rows);
    equal("columns", got.columns, offset + rows);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < offset + rows; ++c) {
        const bool seen = c <= offset + r && (!window || c > offset + r - *window);
        if (got.array[static_cast<size_t>(r * got.columns + c)] != seen)
          return fail("mask[", r, "][", c, "] is wrong");
      }
  }

  // ---- calls that must fail

  void misuse(Draw& draw) {
    const int which = draw(20);
    what("misuse ", which);
    const int64_t tokens = 1 + op_->size % 5;
    Rows k = keys_rows(draw, tokens), v = value_rows(draw, tokens);
    AttendOptions o;
    o.layer = 0;
    Rows q = draw_rows(draw, heads_, std::min<int64_t>(1, held(0)), key_dim_, DType::kF32);
    const std::vector<float> three(3);
    const auto update = [&](int layer = 0) {
      refused([&] { cache_.update(k.view, v.view, layer); });
    };
    switch (which) {
      case 0:
        return update(cache_.num_layers());
      case 1:
        return update(-1);
      case 2:
        v = value_rows(draw, tokens + 1);
        return update();
      case 3:
        k.view.num_heads += draw.of({-1, 1, 100});
        if (k.view.num_heads > heads_) k.view.head_stride = 0;
        return update();
      case 4:
        k.view.data = nullptr;
        return update();
      case 5:
        v.view.head_dim = draw.of({0, -1, 513, 1 << 30});
        return update();
      case 6:
        k.view.num_tokens = v.view.num_tokens = -1;
        return update();
      case 7:
        k.view.num_heads = v.view.num_heads = draw.of({0, -2});
        return update();
      case 8:
        if (!model_.has_pages) return;
        k = draw_rows(draw, heads_, tokens, key_dim_ + 4, incoming(draw, key_dtype_));
        return update();
      case 9:
        if (!model_.has_pages || options_.dtype) return;
        v = draw_rows(draw, heads_, tokens, value_dim_,
                      value_dtype_ == DType::kF32 ? DType::kBF16 : DType::kF32);
        return update();
      case 10:
        k.view.token_stride = key_dim_ - 1;
        k.view.num_tokens = v.view.num_tokens = 2;
        v.view.head_dim = 1;
        v.view.head_stride = v.view.token_stride = 0;
        return update();
      case 11:
        return refused([&] { cache_.trim(-1 - op_->size); });
      case 12:
        return refused(
            [&] { cache_.grow_to_capacity(draw.of({int64_t{-1}, int64_t{1} << 31, INT64_MAX})); });
      case 13:
        return refused([&] { cache_.shrink_to_capacity(-1); });
      case 14: {
        const std::vector<std::string> texts =
            draw.of<std::vector<std::string>>({{"4", "4"},
                                               {"x", "1", "0"},
                                               {"4", "", "0"},
                                               {"4", "4", "0x1"},
                                               {"4", "99999999999999999999", "0"}});
        return refused([&] { cache_.set_meta_state(texts); });
      }
      case 15:
        q = draw_rows(draw, heads_, held(0) + 1, key_dim_, DType::kF32);
        return refused([&] { cache_.attend(q.view, o); });
      case 16:
        if (draw(2))
          q.view.head_dim = key_dim_ + 1;
        else
          q.view = {nullptr, DType::kF32, int64_t{1} << 61, held(0), 0, 0, 0};
        return refused([&] { cache_.attend(q.view, o); });
      case 17:
        if (held(0) == 0 || q.view.num_tokens * held(0) == 3) return;
        o.bias = three;
        return refused([&] { cache_.attend(q.view, o); });
      case 18:
        return refused([&] { cache_.make_mask(draw.of({int64_t{-1}, INT64_MAX}), true); });
      default: {
        std::vector<PagedKVCache::Pair> pairs(static_cast<size_t>(cache_.num_layers()) + 1,
                                              {k.view, v.view});
        return refused([&] { cache_.set_state(pairs); });
      }
    }
  }

  Draw draw_;
  Machine machine_;
  PagedKVCacheOptions options_;  // of the cache
  Executor* threads_ = nullptr;
  int heads_ = 1, key_dim_ = 1, value_dim_ = 1;
  DType key_dtype_ = DType::kF32, value_dtype_ = DType::kF32;
  PagedKVCache cache_;
  ContiguousCache model_;
  const std::byte* first_keys_ = nullptr;
  const Op* op_ = nullptr;
  std::string what_, problem_;
};

TEST(PagedKVCacheRandom, IsTheContiguousCache) {
  RandomCounts counts;
  run_random_sessions<Session>(
      "seed=20240607 max_size=300", [](Session& session) { return session.finish(); }, counts);
  std::printf("[ COUNT    ] %lld random operations on %lld caches\n",
              static_cast<long long>(counts.operations), static_cast<long long>(counts.sessions));
}

}  // namespace
}  // namespace pagedkv::testing
