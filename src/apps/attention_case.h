// One attention call to time, as a value that reads itself from words. Needs the page formats' names only, so that
// programs without our kernels (bench/peers) read the same words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/base/page_format.h"

namespace pagedkv::apps {

struct Heads {
  int query, kv;
};
// "32/8", or "32" for as many kv heads; nothing where the query heads are not a positive multiple of the kv heads.
std::optional<Heads> parse_heads(std::string_view text);

struct SequenceLength {
  int seq_len;    // tokens held, the new ones among them
  int query_len;  // new tokens: its queries
};

struct AttentionCase {
  PageFormat key_format = PageFormat::kF16, value_format = PageFormat::kF16;
  Heads heads{32, 8};
  int key_dim = 128, value_dim = 128;
  int page_size = 16;
  int window = 0;
  float softcap = 0;
  bool sinks = false;
  // First tokens that are the same in every sequence, whole pages of them: in the same pages or, copied, in pages of
  // each sequence's own.
  int shared = 0;
  bool copied = false;
  std::vector<SequenceLength> sequences;

  // "keys=f16 values=f16 heads=32/8 dims=128/128 page=16 window=0 softcap=0 sinks=0 shared=0 copied=0
  // seqs=4096:512,8192:1": what is left out has the value above, seqs must be there; "64*512:1" stands for 64 such
  // sequences. A line that a kernel test prints is read too (tests/kernels/attention_case.h) unless it has a mask, a bias
  // or causal=0, which are not timed. Throws std::invalid_argument naming the word.
  static AttentionCase parse(const std::string& words);

  // Throws std::invalid_argument unless the shared tokens are whole pages that every sequence holds before its new ones.
  void check_shared() const;

  int64_t num_queries() const;
  int64_t tokens_held() const;     // summed over the sequences
  int64_t tokens_stored() const;   // shared ones once
  int64_t visible_tokens() const;  // summed over the queries
  double flops()
      const;  // a multiply and an add for each visible element of K and of V, by query head
};

}  // namespace pagedkv::apps
