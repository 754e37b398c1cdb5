// SPDX-License-Identifier: Apache-2.0
#pragma once
// The largest magnitude of some values, by a thread block.
#include <cstdint>

#include "backends/cuda_common/values.cuh"

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

}  // namespace tessera::backends::cuda_common
