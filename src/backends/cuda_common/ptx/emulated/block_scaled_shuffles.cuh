// SPDX-License-Identifier: Apache-2.0
#pragma once
// What ptx/block_scaled_mma.cuh computes, by instructions that every GPU has: for running kernels of sm_120a on another
// one (the CMake option TESSERA_SM120_EMULATED). A lane fetches the rows and columns of its four sums from the lanes
// that hold them.
#include <cstdint>

#include "backends/cuda_common/ptx/emulated/block_scaled_sums.h"

namespace tessera::backends::cuda_common::ptx::emulated {

// Not inline: kernels have dozens of them, and compiling takes minutes.
__device__ __attribute__((noinline)) inline void mma_nvfp4_by_shuffles(float (&sums)[4], const uint32_t (&a)[4],
                                                                       const uint32_t (&b)[2], uint32_t a_scales,
                                                                       uint32_t b_scales, int a_thread, int b_thread) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, l = lane % 4;
  uint32_t rows[2][8], columns[2][8], row_scales[2], column_scales[2];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i % 2][q + i / 2 * 4] = __shfl_sync(~0u, a[i], 4 * g + q);
#pragma unroll
    for (int i = 0; i < 4; ++i) columns[i % 2][q + i / 2 * 4] = __shfl_sync(~0u, b[i / 2], 4 * (2 * l + i % 2) + q);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row_scales[i] = __shfl_sync(~0u, a_scales, 4 * g + 2 * a_thread + i);
    column_scales[i] = __shfl_sync(~0u, b_scales, 4 * (2 * l + i) + b_thread);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int dots[4] = {};
#pragma unroll
    for (int k = 0; k < 64; ++k) {
      const int shift = k % 8 * 4;
      dots[k / 16] += e2m1_halves(rows[i / 2][k / 8] >> shift) * e2m1_halves(columns[i % 2][k / 8] >> shift);
    }
    sums[i] = block_scaled_sum(dots, row_scales[i / 2], column_scales[i % 2], sums[i]);
  }
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
