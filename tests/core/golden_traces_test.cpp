// Replays what the seed did (tests/data/golden/traces.txt) on PagedKVCache: after every operation its
// result or error, the state, the pages' bytes and the statistics must be the seed's, or the difference
// must be one of the listed deviations. Each of those must occur.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/golden_data.h"
#include "core/golden_deviations.h"
#include "core/golden_seen.h"
#include "pagedkv/core/paged_kv_cache.h"

namespace pagedkv::testing {
namespace {

// A field that the seed shows after an operation, and what it is here.
struct Counterpart {
  std::string_view field;  // its beginning, where it ends in "*"
  enum class Kind { kEqual, kCounter, kNone } kind;
  std::string_view ours;  // of kNone: why there is no such thing
};
using enum Counterpart::Kind;
constexpr Counterpart kCounterparts[] = {
    {"offset", kEqual, "offset()"},
    {"size", kEqual, "offset()"},
    {"capacity", kEqual, "capacity()"},
    {"num_blocks", kEqual, "stats().num_blocks"},
    {"block_size", kEqual, "block_size()"},
    {"allocated_blocks", kEqual, "stats().num_blocks where layer_pages() has any"},
    {"nbytes", kEqual, "size_bytes()"},
    {"empty", kEqual, "empty()"},
    {"meta_state", kEqual, "meta_state()"},
    {"content.*", kEqual, "keys(), values()"},
    {"pages.*", kEqual, "layer_pages(), block_table()"},
    {"stats.mode", kEqual, "quant().mode()"},
    {"stats.block_size", kEqual, "block_size"},
    {"stats.num_blocks", kEqual, "num_blocks"},
    {"stats.capacity", kEqual, "capacity"},
    {"stats.offset", kEqual, "offset"},
    {"stats.bytes", kEqual, "bytes_committed"},
    {"stats.kv_quant", kEqual, "quant().enabled()"},
    {"stats.kv_quant_mode", kEqual, "quant().mode()"},
    {"stats.sliding_window", kEqual, "the option"},
    {"stats.updates", kCounter, "updates"},
    {"stats.grow_events", kCounter, "grow_events"},
    {"stats.active_array_calls", kCounter, "reads"},
    {"stats.kv_quant_dequant_calls", kCounter, "dequant_reads"},
    {"stats.kv_quant_dequant_tokens", kCounter, "dequant_tokens"},
    {"stats.paged_attention_calls", kCounter, "attention_calls, summed"},
    {"stats.kv_quant_attention_calls", kCounter, "attention_calls, where pages are quantised"},
    {"is_trimmable", kNone, "always true; trim() has no condition"},
    {"working_rows", kNone, "attention reads quantised pages as they are: no mirror, no bank"},
    {"stats.kv_quant_dequant_memo_*", kNone, "no mirror"},
    {"stats.kv_quant_bank_*", kNone, "no bank"},
    {"stats.kv_quant_route*", kNone, "one route: the kernels read every format"},
    {"stats.large_q_split_sdpa_fallback_calls*", kNone, "one route, of any query length"},
    {"stats.prefill_large_q_split_sdpa_fallback_calls", kNone, "one route"},
    {"stats.decode_large_q_split_sdpa_fallback_calls", kNone, "one route"},
    {"stats.paged_attention_large_q_path", kNone, "one route"},
    {"stats.dense_fallback_calls", kNone, "attend() declines nothing"},
    {"stats.prefill_dense_fallback_calls", kNone, "attend() declines nothing"},
    {"stats.decode_dense_fallback_calls", kNone, "attend() declines nothing"},
    {"stats.ar_dense_fallback_calls", kNone, "attend() declines nothing"},
    {"stats.postcommit_dense_fallback_calls", kNone, "attend() declines nothing"},
    {"stats.paged_attention_bailouts_by_phase_reason*", kNone, "attend() declines nothing"},
};

const Counterpart* counterpart(const std::string& field) {
  for (const Counterpart& c : kCounterparts) {
    const bool prefix = c.field.back() == '*';
    if (prefix ? field.starts_with(c.field.substr(0, c.field.size() - 1)) : field == c.field)
      return &c;
  }
  return nullptr;
}

// Counters as they stand, of those that seen() shows.
Words counters(PagedKVCache& cache) {
  Words all = seen_sizes(cache, std::nullopt);
  std::erase_if(all, [](const auto& field) {
    const Counterpart* c = counterpart(field.first);
    return c == nullptr || c->kind != kCounter;
  });
  return all;
}

struct Error {
  std::string type, text;  // the type as the seed's language calls it
};

Error caught() {
  try {
    throw;
  } catch (const CapacityError& e) {  // a ValueError in the seed
    return {"ValueError", e.what()};
  } catch (const std::invalid_argument& e) {
    return {"ValueError", e.what()};
  } catch (const std::exception& e) {
    return {"RuntimeError", e.what()};
  }
}

struct Entry {  // what from_cache() takes
  GoldenArray key_array, value_array;
  TensorView keys, values;
  int64_t offset = 0;
};

struct Slot {
  std::unique_ptr<PagedKVCache> cache;  // null: we refused to make it
  std::optional<int> sliding_window;
  Words seed, ours;        // what was seen last
  Words counted;           // our counters since
  bool comparable = true;  // false: the two parted for a listed reason, and not to meet again
};

struct Snapshot {
  Tensor keys, values;
  std::array<std::string, 3> meta;
};

struct Outcome {
  Words returned;  // "returned", or its parts "returned.0", ...
  std::optional<Error> error;
};

constexpr char kNothing[] = "nothing";  // in place of a word that is not there

std::string word_of(const Words& words, const std::string& field) {
  const auto it = words.find(field);
  return it == words.end() ? kNothing : it->second;
}

int64_t count_of(const Words& words, const std::string& field) {
  const auto it = words.find(field);
  return it == words.end() ? 0 : std::stoll(it->second);
}

// What came of all traces.
struct Tally {
  Deviations deviations{Deviation::kTraces};
  std::set<std::string_view> fields_met;  // of kCounterparts
  int traces = 0, operations = 0, comparisons = 0, not_comparable = 0;
};

// One trace on its way.
class Replay {
 public:
  Replay(const GoldenLine& trace, Tally& tally);
  void run(const GoldenLine& op);
  void after(const GoldenLine& line);

 private:
  Words execute(const GoldenLine& op);
  PagedKVCacheOptions options(std::optional<int> block_size, std::optional<int32_t> num_blocks,
                              const std::string& quant) const;
  PagedKVCacheOptions options(const GoldenLine& op) const;
  void place(const std::string& slot, PagedKVCache cache, const PagedKVCacheOptions& options);
  void set_variable(const GoldenLine& op);
  void from_cache(const GoldenLine& op);
  void reinstall(const GoldenLine& op);
  Words attend(const GoldenLine& op);
  Words make_mask(const GoldenLine& op);
  bool not_expressible(const GoldenLine& op);

  void compare_outcome(const GoldenLine& op, const Outcome& ours);
  void compare_field(const std::string& field, const std::string& seed, const std::string& ours);
  void compare_observed(const Words& seed, const Words& ours);
  std::string_view deviation(const std::string& field, const std::string& seed,
                             const std::string& ours);
  std::string_view bytes_deviation(const std::string& seed, const std::string& ours);
  void expect_nothing_changed(const Slot& slot, const Words& now);
  Slot& slot() { return slots_.at(target_); }
  PagedKVCache& cache() { return *slot().cache; }

  Tally& tally_;
  std::string quant_;
  GoldenEnvironment environment_;
  std::map<std::string, Slot> slots_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, Snapshot> snapshots_;
  // Of the operation that runs:
  const GoldenLine* op_ = nullptr;
  std::string target_;    // its slot
  bool refused_ = false;  // by us
  bool parted_ = false;   // for good
};

Replay::Replay(const GoldenLine& trace, Tally& tally) : tally_(tally), quant_(trace.text("quant")) {
  ++tally_.traces;
  environment_.set_all(trace);
}

// ---- operations

PagedKVCacheOptions Replay::options(std::optional<int> block_size,
                                    std::optional<int32_t> num_blocks,
                                    const std::string& quant) const {
  PagedKVCacheOptions given;
  given.block_size = block_size;
  given.num_blocks = num_blocks;
  given.quant = PagedKVQuantConfig(quant);
  PagedKVCacheOptions options = PagedKVCacheOptions::from_environment(given);
  if (!options.dynamic) options.dynamic = false;  // the seed's default; ours is true
  return options;
}

PagedKVCacheOptions Replay::options(const GoldenLine& op) const {
  std::optional<int> block_size;
  std::optional<int32_t> num_blocks;
  if (op.has("args.block_size")) block_size = static_cast<int>(op.integer("args.block_size"));
  if (op.has("args.num_blocks")) num_blocks = static_cast<int32_t>(op.integer("args.num_blocks"));
  return options(block_size, num_blocks, op.has("args.quant") ? op.text("args.quant") : quant_);
}

void Replay::place(const std::string& name, PagedKVCache made, const PagedKVCacheOptions& options) {
  Slot& slot = slots_[name] = {};
  slot.cache = std::make_unique<PagedKVCache>(std::move(made));
  slot.sliding_window = options.sliding_window;
}

// A cache keeps the options that it was made with, so that a variable that the seed would read at its
// next call means a new cache here.
void Replay::set_variable(const GoldenLine& op) {
  static const std::set<std::string> kOptions = {"MTPLX_DYNAMIC_PAGED_KV",
                                                 "MTPLX_CONTEXT_WINDOW_TOKENS",
                                                 "MTPLX_VLLM_METAL_PAGED_SLIDING_WINDOW"};
  static const std::set<std::string> kRoutes = {"MTPLX_VLLM_METAL_PAGED_ATTN_IMPL",
                                                "MTPLX_VLLM_METAL_PAGED_ATTN_MAX_Q",
                                                "MTPLX_VLLM_METAL_PAGED_ATTN_2PASS_THRESHOLD",
                                                "MTPLX_VLLM_METAL_PAGED_LARGE_Q_CHUNK_SIZE",
                                                "MTPLX_VLLM_METAL_PAGED_LARGE_Q_KV_CHUNK_SIZE",
                                                "MTPLX_VLLM_METAL_PAGED_PARTITIONED_ATTN",
                                                "MTPLX_VLLM_METAL_PAGED_PARTITION_THRESHOLD"};
  static const std::set<std::string> kGuards = {
      "MTPLX_ASSERT_NO_PAGED_ACTIVE_ARRAYS", "MTPLX_ASSERT_NO_LARGE_Q_SPLIT_FALLBACK",
      "MTPLX_ALLOW_LONG_CONTEXT_DENSE_FALLBACK", "MTPLX_ALLOW_PAGED_ACTIVE_ARRAY_SNAPSHOT"};
  const std::string name = op.text("name");
  environment_.set(
      name, op.is_null("value") ? std::nullopt : std::optional<std::string>(op.text("value")));
  if (kRoutes.contains(name)) return tally_.deviations.met("one route");
  if (kGuards.contains(name)) return tally_.deviations.met("no guards");
  ASSERT_TRUE(kOptions.contains(name)) << "nobody knows " << name;
  for (auto& [key, slot] : slots_) {
    const PagedKVCache& old = *slot.cache;
    const PagedKVCacheOptions now =
        options(old.block_size(), static_cast<int32_t>(old.capacity() / old.block_size()), quant_);
    slot.cache = std::make_unique<PagedKVCache>(PagedKVCache::from_cache(old, now));
    slot.sliding_window = now.sliding_window;
    slot.counted = counters(*slot.cache);
  }
  if (!slots_.empty()) tally_.deviations.met("options at construction");
}

void Replay::from_cache(const GoldenLine& op) {
  const PagedKVCacheOptions made_with = options(op);
  const std::string from = op.has("cache") ? op.text("cache") : "c";
  const auto entry = entries_.find(from);
  place(op.text("to"),
        entry != entries_.end() ? PagedKVCache::from_cache(entry->second, made_with)
                                : PagedKVCache::from_cache(*slots_.at(from).cache, made_with),
        made_with);
}

// What the seed's installer does to a cache that is there: an empty one takes the geometry, one with
// tokens grows to it where growth is on.
void Replay::reinstall(const GoldenLine& op) {
  tally_.deviations.met("no installer");
  const int64_t block_size = op.integer("block_size"), num_blocks = op.integer("num_blocks");
  const std::array<std::string, 3> meta = {word(block_size), word(num_blocks), "0"};
  if (cache().empty())
    cache().set_meta_state(meta);
  else if (*options(std::nullopt, std::nullopt, quant_).dynamic)
    cache().grow_to_capacity(block_size * num_blocks);
}

Words Replay::attend(const GoldenLine& op) {
  const GoldenArray q = op.array("q");
  const TensorView queries = q.view();
  const int64_t offset = cache().offset(), count = queries.num_tokens;
  AttendOptions how;
  how.scale = static_cast<float>(op.number("scale"));
  if (op.has("mask") && op.text("mask") != "causal") ADD_FAILURE() << "mask " << op.text("mask");
  if (!op.has("mask") && quant_ == "q8" && count > 1) {
    how.causal = false;
    tally_.deviations.met("q8 without a mask");
  }
  const int window = op.has("sliding_window") ? static_cast<int>(op.integer("sliding_window")) : 0;
  std::vector<uint8_t> mask;
  if (window > 0 && count > 1) {
    mask.resize(static_cast<size_t>(count * offset));
    for (int64_t i = 0; i < count * offset; ++i) mask[i] = i % offset >= offset - window;
    how.mask = mask;
    tally_.deviations.met("windows of the context");
  } else {
    how.sliding_window = window;
  }
  const Tensor out = cache().attend(queries, how);

  if (!op.has("returned") || op.is_null("returned")) return {{"returned", "an array"}};
  const GoldenArray returned = op.array("returned");
  const std::vector<float> seed = returned.floats(), ours = floats(out);
  EXPECT_EQ(returned.dtype, dtype_name(out.dtype));
  EXPECT_EQ(returned.shape, (std::vector<int64_t>{1, out.num_heads, out.num_tokens, out.head_dim}));
  double worst = 0;
  for (size_t i = 0; i < seed.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(seed[i]) - ours[i]));
  EXPECT_LE(worst, 2e-6) << "attention of " << count << " queries over " << offset << " tokens";
  return {};
}

Words Replay::make_mask(const GoldenLine& op) {
  std::optional<int64_t> window;
  if (!op.is_null("window_size")) window = op.integer("window_size");
  const CacheMask mask = cache().make_mask(op.integer("N"), op.flag("return_array"), window);
  switch (mask.kind) {
    case CacheMask::Kind::kNone:
      return {{"returned", "null"}};
    case CacheMask::Kind::kCausal:
      return {{"returned", quote("causal")}};
    case CacheMask::Kind::kArray:
      break;
  }
  return {{"returned",
           hash_word(std::as_bytes(std::span(mask.array)), "bool", {mask.rows, mask.columns})}};
}

Words pair_words(const std::pair<Tensor, Tensor>& pair, const std::string& prefix) {
  return {{prefix + ".0", tensor_word(pair.first)}, {prefix + ".1", tensor_word(pair.second)}};
}

Words Replay::execute(const GoldenLine& op) {
  const std::string& what = op.word();
  const Words none = {{"returned", "null"}};
  if (what == "setenv") {
    set_variable(op);
  } else if (what == "construct") {
    const PagedKVCacheOptions made_with = options(op);
    slots_[target_];  // stays without a cache where we refuse to make one
    place(target_, PagedKVCache(made_with), made_with);
  } else if (what == "foreign") {
    Entry& entry = entries_[target_];
    entry = {op.array("k"), op.array("v"), {}, {}, op.integer("offset")};
    entry.keys = entry.key_array.view();
    entry.values = entry.value_array.view();
  } else if (what == "from_cache") {
    from_cache(op);
  } else if (what == "update_and_fetch") {
    const GoldenArray k = op.array("k"), v = op.array("v");
    return pair_words(cache().update_and_fetch(k.view(), v.view()), "returned");
  } else if (what == "update_without_fetch") {
    const GoldenArray k = op.array("k"), v = op.array("v");
    cache().update(k.view(), v.view());
  } else if (what == "get_state") {
    return pair_words(cache().state(), "returned");
  } else if (what == "set_state") {
    const GoldenArray k = op.array("k"), v = op.array("v");
    cache().set_state(k.view(), v.view());
  } else if (what == "set_state_none") {
    cache().set_state(TensorView(), TensorView());
  } else if (what == "set_keys" || what == "set_values") {
    GoldenArray x;
    TensorView view;
    if (op.has("x")) view = (x = op.array("x")).view();
    what == "set_keys" ? cache().set_keys(view) : cache().set_values(view);
  } else if (what == "set_meta_state") {
    cache().set_meta_state(op.list("value"));
  } else if (what == "snapshot") {
    const auto [keys, values] = cache().state();
    const Snapshot& s = snapshots_[op.text("slot")] = {keys, values, cache().meta_state()};
    Words words = pair_words({keys, values}, "returned.state");
    words["returned.meta_state"] = meta_word(s.meta);
    return words;
  } else if (what == "restore") {
    const Snapshot& s = snapshots_.at(op.text("slot"));
    cache().set_state(s.keys, s.values);
    cache().set_meta_state(s.meta);
  } else if (what == "trim") {
    const bool text = op.fields().at("n").front() == '"';
    if (text || op.fields().at("n").find('.') != std::string::npos)
      tally_.deviations.met("whole tokens");
    const double n = text ? std::stod(op.text("n")) : op.number("n");
    return {{"returned", word(cache().trim(static_cast<int64_t>(n)))}};
  } else if (what == "paged_attention") {
    return attend(op);
  } else if (what == "make_mask") {
    return make_mask(op);
  } else if (what == "reinstall") {
    reinstall(op);
    return {};
  } else if (what == "forbidden") {
    return {{"returned", "false"}};              // we have no guard
  } else if (what != "record_dense_fallback") {  // nothing to record: attend() declines nothing
    ADD_FAILURE() << "no operation " << what;
  }
  return none;
}

// A batch of two is not a thing that a TensorView can be.
bool Replay::not_expressible(const GoldenLine& op) {
  for (const char* name : {"k", "q"}) {
    if (!op.has(name) || op.array(name).shape[0] == 1) continue;
    tally_.deviations.met("one sequence");
    return true;
  }
  return false;
}

void Replay::run(const GoldenLine& op) {
  ++tally_.operations;
  op_ = &op;
  target_ = op.has("to") ? op.text("to") : op.has("cache") ? op.text("cache") : "c";
  refused_ = parted_ = false;
  const bool made = !slots_.contains(target_) || slots_[target_].cache != nullptr;
  if (!made) {
    tally_.deviations.met("checked geometry");
    ++tally_.not_comparable;
    return;
  }
  if (not_expressible(op)) return;
  Outcome ours;
  try {
    ours.returned = execute(op);
  } catch (...) {
    ours.error = caught();
    refused_ = true;
  }
  if (!slots_.contains(target_) || slot().comparable)
    compare_outcome(op, ours);
  else
    ++tally_.not_comparable;
}

// ---- comparing

void Replay::compare_outcome(const GoldenLine& op, const Outcome& ours) {
  const std::string seed_error = op.has("error.type") ? op.text("error.type") : kNothing;
  const std::string our_error = ours.error ? ours.error->type : kNothing;
  compare_field("error", seed_error, our_error);
  if (seed_error != kNothing || our_error != kNothing) {
    if (seed_error == kNothing || our_error == kNothing) return;
    if (op.word() == "set_state" && !cache().empty()) {
      tally_.deviations.met("a refused state changes nothing");
      parted_ = true;
    }
    const std::string text = op.text("error.text");
    if (op.flag("error.text_is_mlx") && text.find(", got ") == std::string::npos) return;
    for (const std::string& named : named_words(text)) {
      ++tally_.comparisons;
      EXPECT_TRUE(has_word(ours.error->text, named))
          << named << " of the seed's \"" << text << "\" is not in \"" << ours.error->text << '"';
    }
    return;
  }
  if (op.word() == "reinstall") return;
  Words expected;
  for (const auto& [name, value] : op.under("returned")) expected["returned." + name] = value;
  if (op.has("returned")) expected["returned"] = op.fields().at("returned");
  if (op.word() == "make_mask" && expected["returned"].front() == '@') {
    const GoldenArray mask = op.array("returned");
    expected["returned"] = hash_word(mask.bytes, "bool", {mask.shape[0], mask.shape[1]});
  }
  if (op.word() == "paged_attention" && expected["returned"].front() == '@') {
    ++tally_.comparisons;
    return;  // compared already
  }
  for (const auto& [field, value] : expected)
    compare_field(field, value, word_of(ours.returned, field));
  for (const auto& [field, value] : ours.returned)
    if (!expected.contains(field)) compare_field(field, kNothing, value);
}

void Replay::compare_field(const std::string& field, const std::string& seed,
                           const std::string& ours) {
  ++tally_.comparisons;
  if (seed == ours) return;
  const std::string_view name = deviation(field, seed, ours);
  if (name.empty())
    ADD_FAILURE() << op_->word() << ": " << field << " is " << ours << ", the seed has " << seed;
  else
    tally_.deviations.met(name);
}

void Replay::after(const GoldenLine& line) {
  const std::string name = line.text("cache");
  if (!slots_.contains(name) || slots_[name].cache == nullptr) return;
  target_ = name;
  Slot& slot = slots_[name];
  Words seed = slot.seed;
  for (const std::string& field : line.gone()) seed.erase(field);
  for (const auto& [field, value] : line.fields())
    if (field != "cache") seed[field] = value;

  const Words now = seen(*slot.cache, slot.sliding_window);
  if (refused_ && !slot.ours.empty()) expect_nothing_changed(slot, now);
  if (parted_) slot.comparable = false;
  if (slot.comparable) compare_observed(seed, now);
  slot.seed = seed;
  slot.ours = now;
  slot.counted = counters(*slot.cache);
}

void Replay::compare_observed(const Words& seed, const Words& ours) {
  std::set<std::string> fields;
  for (const Words* words : {&seed, &ours})
    for (const auto& field : *words) fields.insert(field.first);
  const bool no_stats = seed.contains("stats.error.type");
  if (no_stats) tally_.deviations.met("blank variable");
  for (const std::string& field : fields) {
    if (no_stats && field.starts_with("stats.")) continue;
    const Counterpart* c = counterpart(field);
    if (c == nullptr) {
      ADD_FAILURE() << "nobody knows " << field;
      continue;
    }
    tally_.fields_met.insert(c->field);
    if (c->kind == kEqual) {
      compare_field(field, word_of(seed, field), word_of(ours, field));
    } else if (c->kind == kCounter) {
      compare_field(field, word(count_of(seed, field) - count_of(slot().seed, field)),
                    word(count_of(ours, field) - count_of(slot().counted, field)));
    }
  }
}

void Replay::expect_nothing_changed(const Slot& slot, const Words& now) {
  for (const Words* words : {&slot.ours, &now})
    for (const auto& [field, value] : *words) {
      if (counterpart(field)->kind != kEqual) continue;
      EXPECT_EQ(word_of(slot.ours, field), word_of(now, field))
          << field << " changed in an operation that failed: " << op_->word();
    }
  for (const char* field : {"stats.updates", "stats.grow_events", "stats.paged_attention_calls"})
    EXPECT_EQ(count_of(slot.counted, field), count_of(now, field))
        << field << " changed in an operation that failed: " << op_->word();
}

bool shape_mismatch(const GoldenLine& op) {
  const TensorView k = op.array("k").view(), v = op.array("v").view();
  return k.num_heads != v.num_heads || k.num_tokens != v.num_tokens;
}

std::string_view Replay::bytes_deviation(const std::string& seed, const std::string& ours) {
  const int64_t seeds = seed == kNothing ? 0 : std::stoll(seed),
                our = ours == kNothing ? 0 : std::stoll(ours);
  if (our == 0 && refused_) return "a refusal changes nothing";
  if (our == 0 && cache().empty()) return "no token, no memory";
  const LayerPages pages = cache().layer_pages();
  int64_t token = 0;  // bytes
  for (const PageArray* array : {&pages.keys, &pages.values})
    token += pages.num_kv_heads *
             (row_bytes(array->format, array->head_dim) + (has_scales(array->format) ? 4 : 0));
  const int64_t whole = cache().capacity() * token;
  const bool dynamic = *options(std::nullopt, std::nullopt, quant_).dynamic;
  if (quant_ != "off" && seeds > whole) tally_.deviations.met("no working copies");
  if (quant_ != "off" && our == whole && seeds > whole) return "no working copies";
  if (dynamic && our < whole && our >= cache().offset() * token && seeds >= whole)
    return "memory follows use";
  return {};
}

// The listed deviation that explains why a field is not the seed's, or nothing.
std::string_view Replay::deviation(const std::string& field, const std::string& seed,
                                   const std::string& ours) {
  const std::string& op = op_->word();
  const auto part = [&](std::string_view name) {
    parted_ = true;
    return name;
  };
  const bool both_refused = op_->has("error.type") && refused_;
  const bool guarded = op_->has("error.type") && op_->text("error.type") == "RuntimeError";

  if (field == "error") {
    if (guarded && ours == kNothing) return "no guards";
    if (op == "construct" && ours == "ValueError") return "checked geometry";
    if (op == "trim" && op_->integer("n") < 0 && ours == "ValueError") return part("negative trim");
    if (op.starts_with("update") && ours == "ValueError" && shape_mismatch(*op_))
      return part("values match keys");
    if ((op == "set_keys" || op == "set_values") && cache().empty() && ours == "ValueError")
      return "half of an empty cache";
    if (seed == "ValueError" && op_->text("error.text").find("had None/None") != std::string::npos)
      return part("no half-made pages");
    if (op == "paged_attention" && op_->has("returned") && op_->is_null("returned") &&
        ours == "ValueError")
      return "nothing declined";
    return {};
  }
  if (field == "returned") {
    if (op == "forbidden" && seed == "true") return "no guards";
    if (op == "paged_attention" && seed == "null" && op_->array("q").size() == 0)
      return "nothing declined";
    return {};
  }
  const Counterpart* c = counterpart(field);
  if (c == nullptr) return {};
  const bool reads =
      field == "stats.active_array_calls" || field.starts_with("stats.kv_quant_dequant");
  if (guarded && (reads || field.ends_with("attention_calls"))) return "no guards";
  if (reads && op == "restore" && ours == "0") return "restoring is no read";
  if (reads && refused_ && op == "set_keys") return "half of an empty cache";
  if (reads && op == "paged_attention" && ours == "0") return "attention is no read";
  if (field == "stats.kv_quant_dequant_tokens" && quant_ == "q8" &&
      (ours == word(cache().offset()) || ours == slot().ours.at("offset")))
    return "every read counts";
  if (field == "allocated_blocks" && both_refused && ours == "null")
    return "a refusal changes nothing";
  if (field == "nbytes" || field == "stats.bytes") return bytes_deviation(seed, ours);
  return {};
}

TEST(GoldenTraces, EqualButForListedDeviations) {
  const GoldenFile file("traces");
  Tally tally;
  std::unique_ptr<Replay> replay;
  std::string id;
  for (const GoldenLine& line : file.lines()) {
    if (line.word() == "trace") {
      id = line.text("id");
      replay.reset();  // gives the environment back first
      replay = std::make_unique<Replay>(line, tally);
      continue;
    }
    SCOPED_TRACE(line.place() + " " + id);
    if (line.word() == "after")
      replay->after(line);
    else
      replay->run(line);
  }
  std::cout << tally.traces << " traces, " << tally.operations << " operations ("
            << tally.not_comparable << " behind a difference that stays), " << tally.comparisons
            << " comparisons; deviations:\n";
  tally.deviations.print();
  std::cout << "fields without a counterpart:\n";
  for (const Counterpart& c : kCounterparts) {
    if (c.kind == kNone) std::cout << "  " << c.field << ": " << c.ours << '\n';
    EXPECT_TRUE(tally.fields_met.contains(c.field)) << c.field << " occurs nowhere";
  }
  EXPECT_EQ(tally.traces, 113);
  EXPECT_EQ(tally.deviations.unused(), std::vector<std::string>());
}

}  // namespace
}  // namespace pagedkv::testing
