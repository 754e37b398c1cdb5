// SPDX-License-Identifier: Apache-2.0
#pragma once
// How kernels read and write values: everything is computed in FP32, and storing into a BF16 tensor is the rounding
// point, as in ops/reference_rows.h.
#include <cstdint>
#include <string>

#include "backends/cuda_common/ptx/conversions.cuh"
#include "base/error.h"
#include "numeric/bf16.h"
#include "tensor/tensor_view.h"

namespace tessera::backends::cuda_common {

// An F32 or BF16 tensor.
struct Values {
  void* data = nullptr;
  bool is_bf16 = false;

  __device__ float operator[](int64_t i) const {
    return is_bf16 ? numeric::bf16_to_float(static_cast<const uint16_t*>(data)[i]) : static_cast<const float*>(data)[i];
  }
  __device__ void store(int64_t i, float value) const {
    if (is_bf16) {
      static_cast<uint16_t*>(data)[i] = numeric::bf16_from_float(value);
    } else {
      static_cast<float*>(data)[i] = value;
    }
  }
};

inline Values values_of(const TensorView& tensor) {
  TESSERA_CHECK(tensor.data == nullptr || tensor.dtype == DType::kF32 || tensor.dtype == DType::kBF16,
                std::string(dtype_name(tensor.dtype)));
  return {tensor.data, tensor.dtype == DType::kBF16};
}

// `value` as it reads back after being stored.
__device__ inline float round_to(bool is_bf16, float value) {
  return is_bf16 ? numeric::bf16_round(value) : value;
}

using ptx::bf16_pair;

// exp in FP64, rounded once: within a hair of the correctly rounded FP32 value on every GPU.
__device__ inline float exp_rounded(float x) {
  return static_cast<float>(exp(static_cast<double>(x)));
}

// silu(gate) * up with the clamp of `limit` (0: none); a NaN passes through. `exp` of a float.
template <class Exp>
__device__ inline float swiglu_value(float gate, float up, float limit, const Exp& exp_of) {
  if (limit > 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1 + exp_of(-gate)) * up;
}
__device__ inline float swiglu_value(float gate, float up, float limit) {
  return swiglu_value(gate, up, limit, exp_rounded);
}

}  // namespace tessera::backends::cuda_common
