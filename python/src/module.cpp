// pagedkv._pagedkv: the library as it is, for the Python package beside it, which converts arrays and names.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "pagedkv/base/error.h"
#include "pagedkv/base/log.h"
#include "pagedkv/core/page_pool.h"
#include "pagedkv/core/paged_kv_cache.h"
#include "pagedkv/kernels/kernel_set.h"
#include "threads.h"

namespace nb = nanobind;
using namespace pagedkv;

NB_MODULE(_pagedkv, m) {
  nb::set_leak_warnings(false);  // a daemon thread keeps what it uses when the interpreter ends
  m.doc() = "The C++ library of pagedkv.";
  m.attr("VERSION") = PAGEDKV_VERSION_TEXT;

  nb::exception<CapacityError>(m, "CapacityError", PyExc_ValueError).doc() =
      "More tokens than a sequence or pool may hold. Names the need and the limit; nothing has "
      "changed.";
  nb::exception<MemoryError>(m, "PageMemoryError", PyExc_MemoryError).doc() =
      "The machine or the byte budget refuses memory. Names the bytes and the limit; nothing has "
      "changed.";

  m.def(
      "kernel_set", [] { return std::string(kernels().name); },
      "Name of the kernel set in use: avx512, avx2, neon or reference (PAGEDKV_KERNELS forces "
      "one).");
  m.def("num_threads", &python::num_threads, "Threads that kernels run on.");
  m.def("set_num_threads", &python::set_num_threads, nb::arg("num_threads"),
        "Sets the threads of caches and pools made from here on, 1 to 1024.");
  m.def(
      "warn_once", [](const std::string& key, const std::string& text) { warn_once(key, text); },
      nb::arg("key"), nb::arg("text"), "Logs a warning, at most once in the process for each key.");
  m.def("grown_pages", &grown_pages, nb::arg("current"), nb::arg("required"),
        nb::arg("window_pages") = 0,
        "Pages to have so that `required` fit, from `current`, by the growth formula.");
  m.def(
      "initial_num_blocks",
      [](int64_t configured, int block_size, std::optional<int64_t> min_blocks, int64_t tokens,
         int64_t previous_high_water, int64_t margin) {
        return initial_num_blocks(
            {configured, block_size, min_blocks, tokens, previous_high_water, margin});
      },
      nb::arg("configured"), nb::arg("block_size"), nb::arg("min_blocks").none() = nb::none(),
      nb::arg("tokens") = 0, nb::arg("previous_high_water") = 0, nb::arg("margin") = 128,
      "Blocks that a growing cache starts with.");

  python::bind_quantize(m);
  python::bind_cache(m);
  python::bind_pool(m);
}
