// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sees what a step computes, op by op: golden tests compare it, `--trace-op` prints it.
#include <string_view>

#include "tensor/tensor_view.h"

namespace tessera::model {

class Tracer {
 public:
  virtual ~Tracer() = default;
  // The output of one op, in host memory, valid during the call. `name` is a path such as "layers.3.attn.wq_a" or
  // "layers.3.out"; rows follow the tokens of the step, and come in several
  // calls where a layer takes them one run after the other (windows of steps larger than a ring).
  virtual void tensor(std::string_view name, const TensorView& value) = 0;
  // Whether anybody looks: otherwise ops are run one by one just the same, and nothing is copied to the host.
  virtual bool looks() const { return true; }
};

}  // namespace tessera::model
