// What tests of the server do to its model, in builds with PAGEDKV_TEST_HOOKS alone:
//   PAGEDKV_TEST_STEP_MS=N   each step takes N ms longer
//   PAGEDKV_TEST_FAIL_AT=N   the step that computes an answer's token N (from 1) fails
//   PAGEDKV_TEST_COMMIT_BYTES=N   the machine refuses more memory for pages than so much
#pragma once

#include <memory>

#include "models/model.h"
#include "pagedkv/core/page_pool.h"

namespace pagedkv::apps {

// `model`, where no variable is set. Throws std::invalid_argument for values that are no whole numbers.
std::unique_ptr<Model> with_test_hooks(std::unique_ptr<Model> model);
void add_test_hooks(PagePoolOptions& pages);

}  // namespace pagedkv::apps
