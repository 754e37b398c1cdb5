// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of tessera._tessera. bindings/python/tessera/_tessera.pyi states each function; what users call is the
// Python beside it.
#include <nanobind/nanobind.h>

namespace tessera::python {

void add_model(nanobind::module_& m);
void add_tools(nanobind::module_& m);
void add_ops(nanobind::module_& m);
void add_rank_experts(nanobind::module_& m);  // after add_ops

}  // namespace tessera::python
