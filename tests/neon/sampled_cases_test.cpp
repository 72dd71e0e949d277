// Cases of attention, store and fetch drawn over formats, shapes and rules, for machines on which every case takes too long:
// each kernel set of this build must give the reference's bits. PAGEDKV_CASE_BITS names a file that gets one line a case,
// what it is and a hash of its bits, to be compared with another machine's.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "kernels/attention_case.h"

namespace pagedkv::testing {
namespace {

std::vector<PageFormat> all_formats() {
  std::vector<PageFormat> formats;
  std::istringstream names(page_format_names());
  for (std::string name; names >> name;)
    formats.push_back(parse_page_format(name.substr(0, name.find(','))));
  return formats;
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed) {}
  int operator()(int n) { return static_cast<int>(splitmix64(state_) % static_cast<uint64_t>(n)); }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[(*this)(static_cast<int>(values.size()))];
  }

 private:
  uint64_t state_;
};

// Some formats store whole groups of elements only.
int fitting_head_dim(PageFormat format, int head_dim) {
  return fits(format, head_dim) ? head_dim : (head_dim + 3) / 4 * 4;
}

// Formats take turns; all else is drawn from what the kernels tell apart: lengths around tiles, pages and partitions,
// head_dims with and without a remainder, few and many queries a kv head.
AttentionCase drawn_case(int index) {
  static const std::vector<PageFormat> formats = all_formats();
  const int num_formats = static_cast<int>(formats.size());
  Draw draw(static_cast<uint64_t>(index) + 1);
  AttentionCase c;
  c.key_format = formats[index % num_formats];
  c.value_format = draw(3) ? c.key_format : formats[draw(num_formats)];
  std::tie(c.num_q_heads, c.num_kv_heads) = draw.of<std::pair<int, int>>(
      {{1, 1}, {2, 2}, {6, 2}, {9, 3}, {4, 1}, {16, 2}, {20, 4}, {11, 1}});
  const auto head_dim = [&] {
    return draw.of({64, 64, 128, 128, 80, 96, 16, 32, 36, 100, 256, 1, 7, 17, 40});
  };
  c.key_dim = head_dim();
  c.value_dim = fitting_head_dim(c.value_format, draw(3) ? c.key_dim : head_dim());
  c.key_dim = fitting_head_dim(c.key_format, c.key_dim);
  c.page_size = draw.of({16, 16, 1, 3, 8, 32, 100, 256});
  c.causal = draw(4) != 0;
  c.window = draw(3) ? 0 : draw.of({1, 5, 33, 128, 600});
  c.softcap = draw(4) ? 0 : draw.of({0.5f, 1.5f, 30.0f});
  c.sinks = draw(4) == 0;
  c.mask = draw(4) == 0;
  c.bias = draw(4) == 0;
  c.query_amplitude = draw.of({1.0f, 1.0f, 1.0f, 30.0f, 1e-38f});
  const int64_t cost_per_score = int64_t{c.num_q_heads} * (c.key_dim + c.value_dim);
  int64_t cost = 0;
  for (int s = 1 + draw(4); s > 0; --s) {
    const bool decode = draw(2);
    const int seq_len =
        decode ? draw.of({0, 1, 15, 16, 17, 33, 100, 257, 511, 512, 513, 600, 1025, 1100})
               : draw.of({2, 3, 16, 19, 48, 70, 130, 515});
    const int query_len = decode ? 1 : std::min(seq_len, draw.of({2, 3, 7, 16, 20, 35}));
    cost += cost_per_score * seq_len * query_len;
    if (cost > 3'000'000) break;
    c.sequences.push_back({seq_len, query_len, static_cast<uint64_t>(index * 10 + s)});
  }
  if (c.sequences.empty()) c.sequences.push_back({21, 2, static_cast<uint64_t>(index)});
  return c;
}

// What a store gets: rows of plain numbers, of ties, of far apart and of tiny ones, and what cannot be quantised.
std::vector<float> drawn_rows(Draw& draw, int64_t count) {
  std::vector<float> x = data(static_cast<uint64_t>(draw(1 << 30)), count);
  const int kind = draw(6);
  const float factor = std::ldexp(1.0f, draw(60) - 30);
  for (float& v : x) {
    if (kind == 0)
      v = std::round(v * 254) / 2;  // halves: with an amax of 127 they are ties
    else if (kind == 1)
      v *= std::ldexp(1.0f, draw(200) - 120);
    else if (kind == 2)
      v *= 1e-38f;
    else if (kind == 3)
      v *= factor;
  }
  if (kind == 0 && !x.empty()) x[0] = 127;
  if (kind == 4 && !x.empty())
    x[draw(static_cast<int>(x.size()))] = draw.of({INFINITY, -INFINITY, NAN});
  return x;
}

class Hash {
 public:
  void add(uint32_t bits) {
    for (int b = 0; b < 32; b += 8) value_ = (value_ ^ (bits >> b & 0xff)) * 0x100000001b3u;
  }
  void add(std::span<const float> values) {  // every NaN is one
    for (float x : values) add(std::isnan(x) ? 0x7fc00000u : std::bit_cast<uint32_t>(x));
  }
  void add(std::span<const std::byte> bytes) {
    for (std::byte b : bytes) value_ = (value_ ^ static_cast<uint8_t>(b)) * 0x100000001b3u;
  }
  std::string text() const {
    std::ostringstream o;
    o << std::hex << value_;
    return o.str();
  }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

std::string attention_bits(const AttentionCase& c, int threads) {
  AttentionProblem problem(c);
  ThreadPool pool(threads), alone(1);
  const AttentionOutput expected = problem.run(reference_set(), alone);
  for (const KernelSet* set : supported_sets()) {
    const std::string difference = first_difference(problem.run(*set, pool), expected);
    EXPECT_EQ(difference, "") << set->name << ": PAGEDKV_CASE='" << c.text() << "'";
  }
  Hash hash;
  hash.add(expected.out);
  hash.add(expected.log_sum_exp);
  return hash.text();
}

// What the pages of a case hold after its tokens were stored in one call, whether all could be, and what is read back.
std::string stored_bits(const AttentionCase& c, const KernelSet& set,
                        const std::vector<float>& keys, const std::vector<float>& values,
                        int threads) {
  PagedTokens tokens(c, 0xa5);
  const int num_tokens = c.sequences[0].seq_len;
  std::vector<int64_t> slots(num_tokens);
  for (int t = 0; t < num_tokens; ++t) slots[t] = t % 9 == 8 ? -1 : tokens.slot(0, t);
  ThreadPool pool(threads);
  const LayerPages pages = tokens.pages();
  Hash hash;
  hash.add(
      uint32_t{set.store({keys.data(), values.data(), pages, slots.data(), num_tokens}, pool)});
  hash.add(tokens.key_bytes());
  hash.add(tokens.value_bytes());
  for (int64_t slot : slots)
    for (const PageArray* array : {&pages.keys, &pages.values})
      if (array->scales && slot >= 0)
        hash.add({array->scales + slot * c.num_kv_heads, static_cast<size_t>(c.num_kv_heads)});
  std::erase(slots, -1);
  const auto count = static_cast<int>(slots.size());
  std::vector<float> fetched_keys(keys.size()), fetched_values(values.size());
  set.fetch({pages, slots.data(), count, fetched_keys.data(), fetched_values.data()}, pool);
  hash.add(fetched_keys);
  hash.add(fetched_values);
  return hash.text();
}

std::string store_bits(const AttentionCase& drawn, int index, int threads) {
  AttentionCase c = drawn;
  c.window = 0;
  Draw draw(static_cast<uint64_t>(index) + 1'000'000);
  c.sequences = {{draw.of({1, 5, 17, 40, 100}), 0, 0}};
  const int64_t rows = int64_t{c.sequences[0].seq_len} * c.num_kv_heads;
  const std::vector<float> keys = drawn_rows(draw, rows * c.key_dim),
                           values = drawn_rows(draw, rows * c.value_dim);
  const std::string expected = stored_bits(c, reference_set(), keys, values, 1);
  for (const KernelSet* set : supported_sets())
    EXPECT_EQ(stored_bits(c, *set, keys, values, threads), expected)
        << set->name << ", store case " << index << ": " << c.text();
  return expected;
}

TEST(SampledCases, EverySetGivesTheReferencesBits) {
  const int num_cases = rounds(200);
  std::ofstream bits;
  if (const char* path = std::getenv("PAGEDKV_CASE_BITS")) {
    bits.open(path);
    ASSERT_TRUE(bits) << path;
  }
  std::map<std::string, int> calls, formats;
  for (int i = 0; i < num_cases; ++i) {
    const AttentionCase c = drawn_case(i);
    const bool stores = i % 4 == 3;
    const int threads =
        i % 20 < 2 ? 2 : 1;  // few: waiting is slow where cores are busy and emulated
    const std::string hash = stores ? store_bits(c, i, threads) : attention_bits(c, threads);
    if (bits.is_open())
      bits << i << ' ' << (stores ? "store " : "attend ") << c.text() << ' ' << hash << '\n';
    ++calls[stores ? "store and fetch" : "attention"];
    ++formats[std::string(page_format_name(c.key_format))];
  }
  std::ostringstream summary;
  for (const auto& [name, count] : calls) summary << ' ' << count << ' ' << name << ',';
  summary << " keys";
  for (const auto& [name, count] : formats) summary << ' ' << name << ' ' << count;
  summary << "; sets";
  for (const KernelSet* set : supported_sets()) summary << ' ' << set->name;
  std::printf("[ COUNT    ] %d kernel cases:%s\n", num_cases, summary.str().c_str());
}

}  // namespace
}  // namespace pagedkv::testing
