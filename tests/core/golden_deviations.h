// In what we differ from the seed on purpose, as far as the golden vectors show it: the one list, which
// docs/mtplx.md repeats.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace pagedkv::testing {

struct Deviation {
  enum Group : uint8_t { kTables = 1, kTraces = 2, kAttention = 4 };
  std::string_view name;
  int groups;  // of vectors in which it occurs
  std::string_view reason;
};

constexpr Deviation kDeviations[] = {
    // Words and variables.
    {"q6", Deviation::kTables, "a format of ours; its words and sizes are errors in the seed"},
    {"uint8", Deviation::kTables,
     "one list of words; the seed's configuration object keeps uint8 as a name, with 8 bits"},
    {"blank variable", Deviation::kTables | Deviation::kTraces,
     "counts as unset; in the seed a blank first variable of the two means off, and a blank window "
     "is "
     "an error in its statistics"},
    {"growth by default", Deviation::kTables, "growth is on where nothing is said"},
    {"negative window", Deviation::kTables,
     "read as 0, no window, which is what the seed makes of it"},
    {"no value", Deviation::kTables,
     "an absent value is std::nullopt and never reaches the parser"},
    {"options at construction", Deviation::kTraces,
     "options are read once; a variable that changes later means a new cache, by from_cache"},
    // Calls.
    {"checked geometry", Deviation::kTraces, "sizes below 1 are refused; the seed fails later"},
    {"one sequence", Deviation::kTraces,
     "views have no batch: what the seed refuses cannot be said"},
    {"values match keys", Deviation::kTraces,
     "other heads or tokens than the keys' are refused; the seed broadcasts or misplaces them"},
    {"whole tokens", Deviation::kTraces, "trim takes an integer; the seed takes 1.9 and \"2\" too"},
    {"negative trim", Deviation::kTraces,
     "refused; the seed moves its offset over rows that nobody wrote"},
    {"half of an empty cache", Deviation::kTraces,
     "set_keys and set_values are refused; the seed ignores them"},
    {"a refusal changes nothing", Deviation::kTraces,
     "the seed has allocated pages when it refuses a first write"},
    {"no half-made pages", Deviation::kTraces,
     "the seed keeps pages of keys without values when it refuses an odd value head_dim, and then "
     "refuses every write"},
    {"a refused state changes nothing", Deviation::kTraces,
     "the seed has emptied the cache when it refuses a state"},
    {"no installer", Deviation::kTraces,
     "what it reports is the Python package's; what it does to a cache is replayed"},
    // Attention.
    {"q8 without a mask", Deviation::kTraces | Deviation::kAttention,
     "the seed's q8 then lets every query see every token; here that is causal = false"},
    {"windows of the context", Deviation::kTraces | Deviation::kAttention,
     "the seed's window is of the whole context, the same for each query of a call; ours is each "
     "query's own, and the seed's is said with a mask"},
    {"rows without a token", Deviation::kAttention,
     "give zeros; the mean of the values on one of the seed's routes"},
    {"more queries than tokens", Deviation::kAttention,
     "refused, since queries are tokens held; each can be asked for alone"},
    {"nothing declined", Deviation::kTraces | Deviation::kAttention,
     "where the seed returns nothing (array masks and float16 from 1,024 tokens without Metal, an "
     "empty "
     "cache, heads that do not divide) attend answers or says what is wrong"},
    {"one route", Deviation::kTraces,
     "variables that choose between the seed's routes mean nothing"},
    {"no guards", Deviation::kTraces,
     "attention never materialises keys and values, so nothing forbids reading them"},
    // Memory and statistics.
    {"no working copies", Deviation::kTraces,
     "quantised pages are read as they are; the seed holds a mirror (q8) or a bank (q4) beside "
     "them"},
    {"memory follows use", Deviation::kTraces,
     "where growth is on memory is committed as tokens come; the seed allocates its whole "
     "capacity"},
    {"no token, no memory", Deviation::kTraces,
     "a first write without a token sets shapes and commits nothing"},
    {"attention is no read", Deviation::kTraces,
     "the seed's dense route counts a read of state for each call"},
    {"restoring is no read", Deviation::kTraces, "the seed reads the state that it replaces"},
    {"every read counts", Deviation::kTraces,
     "rows that a read dequantises are counted each time; the seed counts what its mirror lacked"},
};

// Counts how often those of one group occur; naming another one is a std::logic_error.
class Deviations {
 public:
  explicit Deviations(Deviation::Group group);
  void met(std::string_view name);
  std::vector<std::string> unused() const;
  void print() const;

 private:
  std::vector<Deviation> list_;
  std::vector<int> counts_;
};

}  // namespace pagedkv::testing
