// SPDX-License-Identifier: Apache-2.0
#pragma once
// SwiGLU of several values at once, in registers.
#include <cstdint>

#include "backends/cuda_common/ptx/conversions.cuh"

namespace tessera::backends::cuda_common {

// values[j] = silu(gate) * up * weights[j] with the clamp of `limit` (0: none), of gates and ups as BF16, a gate in the
// lower half: swiglu_value() with an exp in FP32, which is enough since BF16 follows, and without its divisions, which
// have branches, so that none begins before the last has ended.
template <int kCount>
__device__ inline void swiglu_values(const uint32_t (&both)[kCount], const float (&weights)[kCount], float limit,
                                     float (&values)[kCount]) {
  constexpr float kLeast = -80, kMost = 0x1p60f;  // of gates whose division is as usual
  const float bound = limit > 0 ? limit : __uint_as_float(0x7F800000);
  float gates[kCount], sums[kCount];
  bool is_usual = true;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float gate = __uint_as_float(both[j] << 16);
    gates[j] = gate > bound ? bound : gate;
    sums[j] = 1 + expf(-gates[j]);
    is_usual = is_usual && gates[j] > kLeast && gates[j] < kMost;
    values[j] = ptx::divide_usual(gates[j], sums[j]);
  }
  if (!is_usual) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] = gates[j] / sums[j];
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float up = __uint_as_float(both[j] & 0xFFFF0000);
    values[j] = values[j] * (up > bound ? bound : up < -bound ? -bound : up) * weights[j];
  }
}

}  // namespace tessera::backends::cuda_common
