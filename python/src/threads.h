// The threads that kernels called from Python run on: one pool for the process, since every layer of a model has a
// cache of its own.
#pragma once

#include <memory>

#include "pagedkv/base/executor.h"

namespace pagedkv::python {

// An executor that any number of Python threads may use at once: one of them has the pool, the others work alone
// until it is free; in a forked child, which has none of the pool's threads, every call works alone. The bits are the
// same.
class SharedExecutor;

// The pool as set_num_threads() left it. At first: one thread for each CPU that the process may use, at most 16.
std::shared_ptr<Executor> shared_executor();

int num_threads();
// For what is made from here on. num_threads in 1..1024, else std::invalid_argument.
void set_num_threads(int num_threads);

}  // namespace pagedkv::python
