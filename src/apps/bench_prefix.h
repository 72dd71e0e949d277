// What it saves that requests whose prompts begin alike share the pages of that beginning.
#pragma once

#include <nlohmann/json.hpp>

#include "apps/cli.h"

namespace pagedkv::apps {

struct PrefixBench {
  int shared_tokens = 1024;  // that all prompts begin with
  int own_tokens = 32;       // that follow, in each prompt others
  int num_requests = 8;      // at once
  int num_gen = 32;          // tokens of an answer
  int repetitions = 3;       // pairs
};

// Runs the requests with a prefix cache and without, in turns, each time with a pool and prompts of their own, and compares
// the answers: of an exact model they are the same. "shared" and "alone" are medians, "speedup" those of the pairs' ratios.
// Throws CapacityError where a prompt and its answer are longer than the model's context, and std::runtime_error where
// answers of an exact model differ.
nlohmann::ordered_json bench_prefix(LoadedModel& model, const KvSettings& settings,
                                    const PrefixBench& options);

}  // namespace pagedkv::apps
