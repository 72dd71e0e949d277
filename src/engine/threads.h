// How many threads a process may sensibly use.
#pragma once

#include <string>

namespace pagedkv {

// Cores this process may run on (affinity, cgroup CPU quota) less what other work keeps busy (load
// average), at least 1. ggml's threads spin in barriers: one thread too many costs far more than
// one too few.
int default_num_threads();

// Cores this process may run on: affinity and cgroup CPU quota. At least 1. `root` is put before every path that is
// read (tests).
int usable_cores(const std::string& root = {});

}  // namespace pagedkv
