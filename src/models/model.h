// A model as the engine sees it: what it stores for each token, and one step over packed sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "pagedkv/core/block_table.h"
#include "pagedkv/core/page_pool.h"

namespace pagedkv {

// A model file that is missing, cut, hostile, or of a kind that is not supported (exit code 4). The text
// names what was found, what is supported and what to try.
struct ModelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct ModelInfo {
  std::string family;       // "llama", "toy"
  std::string name;         // general.name of the file
  std::string description;  // one line for people: family, parameters, weight types
  int32_t vocab_size = 0;
  int32_t context_length = 0;  // tokens the model was trained for
  int num_layers = 0;
  int num_q_heads = 0;
  int64_t num_params = 0;
  int64_t weight_bytes = 0;
  int64_t step_bytes = 0;  // about what the buffers of the longest steps take, pages aside
  // Groups of layers in page pool form; formats are the default (f16), the engine sets the user's.
  std::vector<LayerGroupSpec> groups;
  bool exact = false;         // whether one arithmetic holds for the whole step (DESIGN section 3)
  std::string exact_reason;   // why (not), for the start-up line
  std::string arithmetic_id;  // pages of another id must not be mixed with ours
};

// One step: the new tokens of some sequences, packed. The sequences' tables already hold the new
// tokens (BlockTable::append before step).
struct StepBatch {
  struct Sequence {
    const BlockTable* table;          // length() = tokens held, this step's included
    std::span<const int32_t> tokens;  // this step's, the newest of the sequence; at least one
    int32_t num_outputs;              // of them, the last num_outputs want logits; 0..tokens.size()
  };
  std::vector<Sequence> sequences;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelInfo& info() const noexcept = 0;
  // Largest number of tokens one step takes.
  virtual int max_step_tokens() const noexcept = 0;
  // Stores the new tokens' keys and values in `pool` and computes logits: one row of vocab_size for
  // each wanted output, in the order of sequences and tokens; valid until the next step. Throws
  // std::runtime_error when a key or value cannot be stored or the computation fails; the caller then
  // trims the tables back.
  virtual std::span<const float> step(const StepBatch& batch, PagePool& pool) = 0;
};

}  // namespace pagedkv
