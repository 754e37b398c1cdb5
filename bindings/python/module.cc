// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/module.h"

#include "bindings/python/errors.h"

NB_MODULE(_tessera, m) {
  using namespace tessera::python;
  nanobind::set_leak_warnings(false);  // of what a program still holds at its end
  register_errors();
  m.attr("__version__") = tessera_version();
  add_model(m);
  add_tools(m);
  add_ops(m);
  add_rank_experts(m);
}
