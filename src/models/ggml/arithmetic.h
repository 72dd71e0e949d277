// Which of ggml's ways to multiply a model uses, and whether a row's products keep their bits whatever
// the number of rows.
//
// ggml picks its kernel by weight type and by the number of rows: F32, F16, BF16 and IQ4_NL have another one
// for a lone row; K-quants, IQ4_XS and IQ1 to IQ3 have one below 8 rows and another from 8 on; the rest have one. Rather
// than trust such a list, which depends on CPU and build, every shape and type of the file is tried at load.
#pragma once

#include <string>
#include <vector>

#include "models/ggml/ggml_model.h"

struct ggml_tensor;

namespace pagedkv {

struct Arithmetic {
  bool exact = false;          // tried: products do not depend on the number of rows
  int min_rows = 1;            // steps and outputs with fewer rows are padded to this many
  bool use_reference = false;  // ggml's row-by-row products only (cplan.use_ref)
  std::string reason;          // why exact or not, for people
  std::string id;              // ModelInfo::arithmetic_id
};

// `matrices` are those that rows are multiplied with. Throws std::runtime_error when `mode` is kOn and no way
// is exact.
Arithmetic choose_arithmetic(const std::vector<ggml_tensor*>& matrices, ExactMode mode);

}  // namespace pagedkv
