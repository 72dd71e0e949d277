// What the pages of a model take and how much of it this machine holds, before anything is loaded.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/kv_settings.h"
#include "models/model.h"

namespace pagedkv::apps {

struct PlannedFormat {
  std::string format;      // "q8", "k=q8,v=q4"
  bool chosen = false;     // what the settings ask for
  std::string impossible;  // why the model's heads cannot be stored so; the numbers are then 0
  int64_t page_bytes = 0;  // a page of each layer group
  int64_t bytes_per_token = 0;
  int64_t context_bytes = 0;  // one sequence of Plan::context
  // Over all sequences; with a window, of one: several hold each their own.
  int64_t tokens = 0;
  int64_t longest = 0;             // tokens of one sequence alone, no more than the model's context
  std::vector<int64_t> sequences;  // of each length in Plan::lengths
};

struct Plan {
  int64_t context = 0;           // tokens of a sequence
  std::vector<int64_t> lengths;  // shorter sequences, then the context
  int64_t available = 0;         // what the machine can give now
  int64_t headroom = 0;          // of it, what the pool leaves to the rest of the machine
  int64_t weights = 0, compute = 0;
  int64_t bytes = 0;        // what is left for pages
  bool by_machine = false;  // else by the settings' max_bytes
  std::vector<PlannedFormat> formats;
};

// Bytes of the pages that a sequence of `length` tokens holds at most.
int64_t sequence_bytes(const PagePoolOptions& pool, int64_t length);
// Tokens, in whole pages, of the longest sequence that `bytes` of pages hold.
int64_t tokens_that_fit(const PagePoolOptions& pool, int64_t bytes);

// The formats a plan lists: of keys, of values.
using FormatPair = std::pair<PageFormat, PageFormat>;

// What a pool of these settings would decide on a machine that can give `available` bytes, once the weights and the
// buffers of steps have their part of them. Throws std::invalid_argument for settings that a pool refuses.
Plan make_plan(const ModelInfo& model, const KvSettings& settings,
               const std::vector<FormatPair>& formats, int64_t weights, int64_t available);

// `pagedkv plan`: a model's GGUF header or config.json to a table, or one JSON object.
// When the arguments name it, `command` becomes what runs it and returns the exit code.
void add_plan(CLI::App& app, std::function<int()>& command);

}  // namespace pagedkv::apps
