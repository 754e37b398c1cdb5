// SPDX-License-Identifier: Apache-2.0
#pragma once
// A row of inputs in `a4` or `a8` (docs/contracts/numerics.md, sections 2 and 3) as its sums see it: code times block
// scale, exact in BF16. By warps: a lane takes 4 neighbouring columns of each 128, which are a scale's in `a8`; 4 lanes
// have a scale's 16 in `a4`. The values are those of numeric::q8_quantize and numeric::nvfp4_quantize_row, read back.
// Where they lie, a class Row says:
//   width()
//   load(column, values)    4 values from column (a multiple of 4) on; zeros beyond the width
//   store(column, values)   those that are there
#include <cstdint>

#include "backends/cuda_common/amax.cuh"
#include "numeric/fp8_block.h"
#include "numeric/nvfp4.h"
#include "ops/precision.h"

namespace tessera::backends::cuda_common {

constexpr int kLaneColumns = 4, kRowLanes = 32, kWarpColumns = kLaneColumns * kRowLanes;

// Of this lane's values and of those of the `kCount` lanes that share a scale with it.
template <int kCount>
__device__ float amax_of_lanes(const float (&values)[kLaneColumns]) {
  float amax = 0;
#pragma unroll
  for (const float value : values) amax = larger(fabsf(value), amax);
#pragma unroll
  for (int other = 1; other < kCount; other *= 2) amax = larger(__shfl_xor_sync(~0u, amax, other), amax);
  return amax;
}

// The row's largest magnitude, in each lane of a warp.
template <class Row>
__device__ float warp_amax(const Row& row) {
  float amax = 0;
  for (int64_t begin = 0; begin < row.width(); begin += kWarpColumns) {
    float values[kLaneColumns];
    row.load(begin + threadIdx.x % kRowLanes * kLaneColumns, values);
    amax = larger(amax_of_lanes<kRowLanes>(values), amax);
  }
  return amax;
}

// Rounds every `num_warps`-th 128 columns from the `warp`-th on; `g` is the row's factor in `a4`.
template <ops::InputMode kMode, class Row>
__device__ void round_row(const Row& row, int warp, int num_warps, float g) {
  static_assert(kMode == ops::InputMode::kA4 || kMode == ops::InputMode::kA8);
  for (int64_t begin = int64_t{warp} * kWarpColumns; begin < row.width(); begin += int64_t{num_warps} * kWarpColumns) {
    const int64_t column = begin + threadIdx.x % kRowLanes * kLaneColumns;
    float values[kLaneColumns];
    row.load(column, values);
    if constexpr (kMode == ops::InputMode::kA8) {
      const uint8_t scale = numeric::q8_scale(amax_of_lanes<kRowLanes>(values));
      const float step = numeric::e8m0_to_float(scale);
#pragma unroll
      for (float& value : values) value = numeric::e4m3_to_float(numeric::q8_code(value, scale)) * step;
    } else {
      constexpr int kScaleLanes = numeric::kNvfp4Block / kLaneColumns;
      const uint8_t scale = numeric::nvfp4_activation_block_scale(amax_of_lanes<kScaleLanes>(values), g);
#pragma unroll
      for (float& value : values) value = numeric::nvfp4_rounded_activation(value, scale, g);
    }
    row.store(column, values);
  }
}

}  // namespace tessera::backends::cuda_common
