// SPDX-License-Identifier: Apache-2.0
#pragma once
// The largest magnitude of some values, by a thread block, and what follows from it.
#include <cstdint>

#include "backends/cuda_common/values.cuh"
#include "numeric/nvfp4.h"

namespace tessera::backends::cuda_common {

// The larger magnitude; a NaN stays.
__device__ inline float larger(float a, float b) {
  return a != a || a > b ? a : b;
}

// Of `count` values from x[begin] on, in each of the kBlock threads, all of which take part; NaN where one of them is.
template <int kBlock>
__device__ float block_amax(const Values& x, int64_t begin, int64_t count) {
  __shared__ float s_amax[kBlock];
  float amax = 0;
  for (int64_t k = threadIdx.x; k < count; k += kBlock) amax = larger(fabsf(x[begin + k]), amax);
  s_amax[threadIdx.x] = amax;
  __syncthreads();
  for (int half = kBlock / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) s_amax[threadIdx.x] = larger(s_amax[threadIdx.x + half], s_amax[threadIdx.x]);
    __syncthreads();
  }
  return s_amax[0];
}

// g of a row of NVFP4 activations: `bound`, or where that is 0 by the row's largest magnitude. All threads take
// part, with the same bound.
template <int kBlock>
__device__ float activation_scale(const Values& x, int64_t begin, int64_t width, float bound) {
  return bound <= 0 ? numeric::nvfp4_activation_scale(block_amax<kBlock>(x, begin, width)) : bound;
}

}  // namespace tessera::backends::cuda_common
