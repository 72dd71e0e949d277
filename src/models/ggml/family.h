// The table of model families: what each honours of what a GGUF file may say. All have Llama's graph and differ from it
// by what FamilyGraph and their tensors say.
//
// A file is accepted only when everything in it that can change the mathematics is understood: a key
// of the family's own namespace that is not in its table, or a tensor that nobody reads, is an error
// that names it. Adding a family means adding an entry here and what it does differently in step_graph.cpp.
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

enum class Activation { kSilu, kGelu };  // of the gate

// What the family does beside the Llama graph, whose optional tensors (biases, norms of q and k, norms
// after attention and feed-forward) are there or not.
struct FamilyGraph {
  RopePairs rope_pairs;
  Activation activation = Activation::kSilu;
  bool scales_embedding = false;  // by sqrt(embedding_length)
  // With attention.sliding_window every full_period-th layer still attends to all tokens, unless the file
  // says which; 0: none does.
  int full_period = 0;
  // A model of this many layers divides scores by sqrt(embedding_length / num_q_heads), not sqrt(key_head_dim).
  int wide_scale_layers = 0;
};

struct Family {
  std::string_view name;    // general.architecture
  std::string_view models;  // for people
  FamilyGraph graph;
  // Beside what every family has.
  std::span<const KeyRule> keys = {};
  std::span<const TensorRule<Weights>> tensors = {};
  std::span<const TensorRule<LayerWeights>> layer_tensors = {};
};

std::span<const Family> families() noexcept;

// What every family has beside its own.
std::span<const TensorRule<Weights>> common_tensors() noexcept;
std::span<const TensorRule<LayerWeights>> common_layer_tensors() noexcept;

// The family of a file, all of whose keys it honours. Throws ModelError.
const Family& find_family(const GgufFile& file);

}  // namespace pagedkv
