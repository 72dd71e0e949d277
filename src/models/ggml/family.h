// The table of model families: what each honours of what a GGUF file may say.
//
// A file is accepted only when everything in it that can change the mathematics is understood: a key
// of the family's own namespace that is not in its table, or a tensor that nobody reads, is an error
// that names it. Adding a family means adding an entry here and what it does differently in graph.cpp.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "models/ggml/gguf_file.h"
#include "models/ggml/weights.h"

namespace pagedkv {

enum class KeyUse {
  kRead,      // read by hyperparameters.cpp
  kHarmless,  // says nothing about the mathematics of a dense model
  kOnly,      // accepted with one value, the one that changes nothing
};

struct KeyRule {
  std::string_view name;  // after "<architecture>."
  KeyUse use;
  double only = 0;  // for kOnly; booleans are 0 and 1
};

// How RoPE pairs the elements of a head.
enum class RopePairs { kNeighbours, kHalves };

struct Family {
  std::string_view name;    // general.architecture
  std::string_view models;  // for people
  std::span<const KeyRule> keys;
  std::span<const TensorRule<Weights>> tensors;
  std::span<const TensorRule<LayerWeights>> layer_tensors;
  RopePairs rope_pairs;
};

std::span<const Family> families() noexcept;

// The family of a file, all of whose keys it honours. Throws ModelError.
const Family& find_family(const GgufFile& file);

}  // namespace pagedkv
