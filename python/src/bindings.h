// What each file of bindings adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace pagedkv::python {

void bind_quantize(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_pool(nanobind::module_& m);

}  // namespace pagedkv::python
