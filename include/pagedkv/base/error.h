// The named errors of the library. Wrong arguments are std::invalid_argument, other failures
// std::runtime_error; the types below let a caller tell apart what it may want to handle.
#pragma once

#include <stdexcept>
#include <string>

namespace [[gnu::visibility("default")]] pagedkv {

// More tokens than a sequence or a pool may hold: growth is off, the context window is full, or the
// most pages an array has address space for are in use. The text names the need and the limit.
// Nothing has changed.
struct CapacityError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The machine or the byte budget refuses memory. The text names the bytes and the limit. Nothing has
// changed.
struct MemoryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace pagedkv
