// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the references read and write rows: everything is computed in FP32, and storing into a BF16 tensor is the
// rounding point. Plain loops; the only thread-level parallelism is over independent rows.
#include <cstdint>

#include "tensor/tensor_view.h"

namespace tessera::ops {

// Element `offset` onward, `count` elements of an F32 or BF16 tensor, as FP32.
void load_floats(const TensorView& tensor, int64_t offset, int64_t count, float* out);
// Rounds to the tensor's dtype (nearest even) and stores.
void store_floats(const TensorView& tensor, int64_t offset, int64_t count, const float* values);
// `value` as it reads back after being stored as `dtype` (kF32 or kBF16).
float round_to(DType dtype, float value);

// Sum of a[k] * b[k] in the one order that every reference GEMM uses at every token count: 16 lanes, lane i taking
// k = i, i + 16, ... ascending, then lanes added by halves (i + i+8, i + i+4, ...).
float dot(const float* a, const float* b, int64_t count);
// Sum of x[k]^2 in the same order.
float sum_of_squares(const float* x, int64_t count);

}  // namespace tessera::ops
