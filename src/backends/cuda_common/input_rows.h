// SPDX-License-Identifier: Apache-2.0
#pragma once
// Rows of a linear map's input as the multiply sees them in `a4` and `a8` (docs/contracts/numerics.md, sections 2, 3).
#include <cstdint>

#include "device/queue.h"
#include "ops/precision.h"
#include "tensor/tensor_view.h"

namespace tessera::backends::cuda_common {

// Slots of experts: rows of w2's input.
struct ExpertRows {
  const int32_t* experts = nullptr;  // [rows] expert of each row
  const float* routing = nullptr;    // [rows] its weight
  int64_t first_expert = 0, num_local = 0;
  float limit = 0;  // of SwiGLU; 0: none, and the row's amax is measured
};

// True where rows are replaced at all; else kernels read the input itself and factors are 1.
constexpr bool needs_input_rows(ops::InputMode mode) {
  return mode == ops::InputMode::kA4 || mode == ops::InputMode::kA8;
}

// True where sums have a factor for each row.
constexpr bool has_row_factors(ops::InputMode mode) {
  return mode == ops::InputMode::kA4;
}

// out[r] = the row (exact in BF16), factors[r] = what its sums are multiplied by (null: not wanted). `x` [num_rows,
// width] and `out` are F32 or BF16, and may be the same. With `slots` (null: none), rows of experts that are not local
// are left alone.
void prepare_input_rows(ops::InputMode mode, const TensorView& x, int64_t num_rows, int64_t width,
                        const ExpertRows* slots, const TensorView& out, float* factors, const device::Queue& queue);

}  // namespace tessera::backends::cuda_common
