// From a model and a user's wishes to a pool.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "models/model.h"

namespace pagedkv {

struct KvSettings {
  PageFormat key_format = PageFormat::kF16;
  PageFormat value_format = PageFormat::kF16;
  int page_size = 16;  // tokens
  int64_t context =
      0;  // tokens a sequence may hold; 0: the model's, but no more than context_window
  int64_t context_window = 0;  // 0: none
  std::optional<int> sliding_window =
      std::nullopt;  // given, it replaces the model's in every layer (0: none)
  std::optional<int32_t> num_pages =
      std::nullopt;  // unset: 1,024, or fewer where the context of max_seqs sequences needs fewer
  bool dynamic = true;
  int64_t max_bytes = 0;      // 0: what the machine allows
  int max_seqs = 1;           // sequences at once, for the default of num_pages
  uint64_t shuffle_seed = 0;  // tests
};

// The context a sequence gets. Throws std::invalid_argument when `settings` ask for more than the model has.
int64_t context_tokens(const ModelInfo& model, const KvSettings& settings);

PagePoolOptions pool_options(const ModelInfo& model, const KvSettings& settings);

// "f16", or "k=f16,v=q8" where they differ.
std::string format_label(const KvSettings& settings);

}  // namespace pagedkv
