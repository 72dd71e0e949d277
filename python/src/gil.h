// The GIL is given up while C++ works.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace pagedkv::python {

// Gives the GIL up and takes it back. A daemon thread that comes back while the interpreter ends stays where it is:
// CPython before 3.14 ends it by unwinding, through frames that do not allow that, and so the process.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace pagedkv::python
