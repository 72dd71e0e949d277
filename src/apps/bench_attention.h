// One case of attention over pages, timed without a model.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "pagedkv/base/page_format.h"

namespace pagedkv::apps {

// As the flags have it.
struct AttentionBench {
  std::string heads = "32/8";  // query heads / kv heads
  int head_dim = 128;
  int context = 8192;  // tokens a sequence holds, the new ones among them
  int new_tokens = 1;  // queries of a sequence
  int num_seqs = 1;
  int shared_tokens = 0;  // that all sequences hold in the same pages: whole pages
  PageFormat key_format = PageFormat::kF16, value_format = PageFormat::kF16;
  int page_size = 16;
  int num_threads = 1;
  int repetitions = 5;
};

// Runs the case with the active kernel set over pages in a shuffled order, checks each sequence's first and
// last row against the reference bit for bit, and times single calls. Where tokens are shared, it is timed in turns with
// copies of them for each sequence, which must give the same bits. Throws std::invalid_argument (options that fit no
// case), CapacityError and MemoryError, and std::runtime_error where a bit differs.
nlohmann::ordered_json bench_attention(const AttentionBench& options);

}  // namespace pagedkv::apps
