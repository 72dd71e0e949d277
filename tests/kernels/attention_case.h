// One attention call as a value that prints itself and reads itself back, and the memory it runs on. Tests and the
// benchmark share it, so that what is timed is what is checked.
//
// The memory is hostile: pages lie in shuffled order between pages nobody owns, every slot without a token and every guard
// holds NaN, and block-table entries that must not be read would lead far outside.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/base/executor.h"
#include "pagedkv/kernels/attention.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::testing {

struct Sequence {
  int seq_len = 0;
  int query_len = 0;
  uint64_t content =
      0;  // two sequences with the same content hold the same tokens and queries, position by position
  // The first `shared` tokens are those of the earlier sequence `with`, and so are the pages that these fill; where
  // they are all of the sequence's tokens, the last page too.
  int shared = 0, with = 0;
};

struct AttentionCase {
  PageFormat key_format = PageFormat::kF16, value_format = PageFormat::kF16;
  int num_q_heads = 4, num_kv_heads = 2;
  int key_dim = 64, value_dim = 64;
  int page_size = 16;
  bool causal = true;
  int window = 0;
  float softcap = 0;
  bool sinks = false;
  bool mask = false;
  bool bias = false;
  float query_amplitude = 1;
  std::vector<Sequence> sequences;

  // "keys=f16 values=q8 heads=9/3 dims=64/64 page=16 … seqs=100:4:7,60:1:8:48:0", which parse() reads; a sequence is
  // its seq_len, query_len, content, shared, with.
  std::string text() const;
  static AttentionCase parse(const std::string& text);
  int num_tokens() const;
  // Whose token a sequence holds there: its own, or the one it shares.
  uint64_t content(int sequence, int token) const;
};

// The three first draws for state 0 are e220a8397b1dcdaf, 6e789e6aa1b965f4, 06c45d188009454f.
uint64_t splitmix64(uint64_t& state) noexcept;

// Values in [-1, 1), from splitmix64 started at `state`: (z >> 40) / 2^23 - 1.
std::vector<float> data(uint64_t state, int64_t count);

// Memory as a pool has it: at the start of a page, huge where the system offers that.
class PageMemory {
 public:
  PageMemory() = default;
  PageMemory(size_t size, uint8_t fill);
  std::byte* data() const { return data_.get(); }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

// Pages of one layer, and where tokens of several sequences live in them.
class PagedTokens {
 public:
  // fill: the byte that all pages and scales hold at first.
  PagedTokens(const AttentionCase& c, uint8_t fill);

  // Stores row `token` of a sequence; every head of it.
  void store(int sequence, int token, const float* keys, const float* values);
  LayerPages pages();
  const std::vector<PageId>& block_table() const { return table_; }
  int64_t table_stride() const { return stride_; }
  int64_t slot(int sequence, int token) const;
  // Element as attention sees it: decoded, and scaled where the format has scales.
  float key(int sequence, int token, int head, int e) const;
  float value(int sequence, int token, int head, int e) const;
  std::span<const std::byte> key_bytes() const { return keys_.bytes(); }
  std::span<const std::byte> value_bytes() const { return values_.bytes(); }

 private:
  float element(const std::byte* bytes, const std::vector<float>& scales, PageFormat format,
                int dim, int sequence, int token, int head, int e) const;

  AttentionCase case_;
  int64_t stride_ = 0;
  std::vector<PageId> table_;
  PageMemory keys_, values_;
  std::vector<float> key_scales_, value_scales_;
};

struct AttentionOutput {
  std::vector<float> out;  // [num_tokens, num_q_heads, value_dim]
  std::vector<float> log_sum_exp;
  bool guards_intact = true;
};

// A case with its memory filled.
class AttentionProblem {
 public:
  explicit AttentionProblem(const AttentionCase& c, uint8_t fill = 0xff);

  AttentionArgs args();  // without outputs
  AttentionOutput run(const KernelSet& set, Executor& executor);
  // Double-precision softmax over what the pages hold.
  AttentionOutput oracle() const;

  const AttentionCase& spec() const { return case_; }
  PagedTokens& tokens() { return tokens_; }
  std::vector<float>& queries() { return queries_; }

 private:
  AttentionCase case_;
  PagedTokens tokens_;
  std::vector<float> queries_, sinks_;
  std::vector<int32_t> query_start_, seq_lens_;
  std::vector<uint8_t> mask_;
  std::vector<float> bias_;
  int64_t mask_stride_ = 0, bias_stride_ = 0;
};

inline constexpr PageFormat kFormats[] = {PageFormat::kF32, PageFormat::kF16, PageFormat::kBF16,
                                          PageFormat::kQ8,  PageFormat::kQ6,  PageFormat::kQ4};

// The formats of the n-th case of a table: two of the six in turn, since the reference is slow, and all of them where
// PAGEDKV_TEST_SCALE is 10 or more.
std::vector<PageFormat> formats_of_case(int n);

// Whether check_head_dim() lets rows of `head_dim` be stored.
bool fits(PageFormat format, int head_dim);

// Kernel sets that this CPU can run, the reference last.
std::vector<const KernelSet*> supported_sets();

const KernelSet& reference_set();

// "" where all bits agree, NaN counting as NaN; else the first place that differs.
std::string first_difference(const AttentionOutput& a, const AttentionOutput& b);

// sqrt(sum (a - b)^2 / sum b^2).
double relative_error(const std::vector<float>& a, const std::vector<float>& b);

// PAGEDKV_TEST_SCALE, default 1: scales the rounds of random tests.
int rounds(int normal);

}  // namespace pagedkv::testing
