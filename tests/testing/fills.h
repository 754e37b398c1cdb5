// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inputs that `tessera verify` uses too (verify/fills.h), under this namespace's name, and poisoned outputs.
#include <vector>

#include "verify/fills.h"

namespace tessera::testing {

using verify::adversarial;
using verify::as_tensor;
using verify::random_weight;
using verify::RandomWeight;

// FP8's scales become powers of two, some of them the ends of those that fold, some 0; or no longer all fold.
void set_fp8_scales(RandomWeight& weight, Rng& rng, bool fold);

// A tensor whose floating-point values are NaN, with guard bytes behind it.
class PoisonedTensor {
 public:
  PoisonedTensor(DType dtype, const Shape& shape);
  const TensorView& view() const { return view_; }
  // The values as FP32.
  std::vector<float> floats() const;
  // False where somebody wrote behind the end.
  bool is_guard_intact() const;

 private:
  device::Buffer buffer_;
  TensorView view_;
};

}  // namespace tessera::testing
