// GGUF models on ggml: our graph, whose keys and values live in pages and whose attention is ours.
//
// The weights stay in the mapped file. Each layer of a step is ggml's nodes and two of ours: one stores
// the new keys and values in the pool's pages, one attends over the pages; both run on ggml's threads.
// Not thread-safe: one thread calls step().
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "models/ggml/ggml_text.h"
#include "models/model.h"

namespace pagedkv {

// Whether the products of a step give each row the same bits whatever the number of rows (DESIGN,
// "One arithmetic"). Attention and the other operations always do.
enum class ExactMode {
  kAuto,  // where that is free or nearly
  kOn,    // always; ModelError where it cannot be had
  kOff,   // ggml's fastest
};

struct GgmlModelOptions {
  int num_threads = 1;  // 1..512
  ExactMode exact = ExactMode::kAuto;
  int max_step_tokens = 512;                           // 1..65536
  std::function<void(float done)> progress = nullptr;  // 0..1 while the file is read
};

// What load_ggml_model says of a file whose weights it need not read: all of ModelInfo but whether the model is exact
// (and its arithmetic_id). Throws ModelError as it does.
ModelInfo describe_ggml_model(const std::string& path);

// Throws ModelError for a file that is missing, damaged or not supported, std::invalid_argument for options
// outside their limits.
std::unique_ptr<Model> load_ggml_model(const std::string& path, const GgmlModelOptions& options);

}  // namespace pagedkv
