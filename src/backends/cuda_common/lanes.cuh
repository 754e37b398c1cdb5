// SPDX-License-Identifier: Apache-2.0
#pragma once
// Dot products in the reference's order (`dot` of ops/reference_rows.h): half a warp is its 16 lanes, lane i takes
// k = i, i + 16, ... ascending, then lanes are added by halves. So a sum has the reference's bits at every token count.
#include <cstdint>

#include "backends/cuda_common/values.cuh"
#include "base/integer_math.h"
#include "numeric/fp8_block.h"
#include "numeric/nvfp4.h"
#include "ops/weight_view.h"

namespace tessera::backends::cuda_common {

constexpr int kLanes = 16;

// The sum over the 16 lanes, in each of them. All of the warp takes part.
__device__ inline float add_lanes(float sum) {
  for (int half = kLanes / 2; half > 0; half /= 2) sum += __shfl_down_sync(~0u, sum, half, kLanes);
  return __shfl_sync(~0u, sum, 0, kLanes);
}

// Row `row` of a weight, without the tensor scale.
template <ops::WeightFormat kFormat>
class WeightRow {
 public:
  __device__ WeightRow(const void* data, const void* scales, int64_t cols, int64_t row) {
    if constexpr (kFormat == ops::WeightFormat::kF32) {
      data_ = static_cast<const float*>(data) + row * cols;
    } else if constexpr (kFormat == ops::WeightFormat::kBf16) {
      data_ = static_cast<const uint16_t*>(data) + row * cols;
    } else if constexpr (kFormat == ops::WeightFormat::kFp8Block) {
      data_ = static_cast<const uint8_t*>(data) + row * cols;
      scales_ = static_cast<const float*>(scales) +
                row / numeric::kFp8WeightBlock * ceil_div<int64_t>(cols, numeric::kFp8WeightBlock);
    } else {
      data_ = static_cast<const uint8_t*>(data) + row * (cols / 2);
      scales_ = static_cast<const uint8_t*>(scales) + row * (cols / numeric::kNvfp4Block);
    }
  }
  __device__ float operator[](int64_t k) const {
    if constexpr (kFormat == ops::WeightFormat::kF32) {
      return static_cast<const float*>(data_)[k];
    } else if constexpr (kFormat == ops::WeightFormat::kBf16) {
      return numeric::bf16_to_float(static_cast<const uint16_t*>(data_)[k]);
    } else if constexpr (kFormat == ops::WeightFormat::kFp8Block) {
      return numeric::e4m3_to_float(static_cast<const uint8_t*>(data_)[k]) *
             static_cast<const float*>(scales_)[k / numeric::kFp8WeightBlock];
    } else {
      const uint8_t byte = static_cast<const uint8_t*>(data_)[k / 2];
      return numeric::e2m1_to_float(byte >> (k % 2 * 4) & 15) *
             numeric::e4m3_to_float(static_cast<const uint8_t*>(scales_)[k / numeric::kNvfp4Block]);
    }
  }

 private:
  const void *data_ = nullptr, *scales_ = nullptr;
};

// Input rows that one pass over a weight row serves. Each sum is its own chain, so the tile changes no result.
constexpr int kTokenTile = 8;

// sums[t] = sum over k of x[offsets[t] + k] * weight[k], for t < count; the same in all 16 lanes.
template <class Weight>
__device__ void dot_tile(const Weight& weight, const Values& x, const int64_t (&offsets)[kTokenTile], int count,
                         int64_t width, float (&sums)[kTokenTile]) {
#pragma unroll
  for (int t = 0; t < kTokenTile; ++t) sums[t] = 0;
  for (int64_t k = threadIdx.x % kLanes; k < width; k += kLanes) {
    const float w = weight[k];
#pragma unroll
    for (int t = 0; t < kTokenTile; ++t) {
      if (t < count) sums[t] += x[offsets[t] + k] * w;
    }
  }
#pragma unroll
  for (int t = 0; t < kTokenTile; ++t) sums[t] = add_lanes(sums[t]);
}

// Calls function(constant) with the format as a constant expression: constant.value.
template <ops::WeightFormat kFormat>
struct FormatConstant {
  static constexpr ops::WeightFormat value = kFormat;
};
template <class Function>
void with_format(ops::WeightFormat format, Function&& function) {
  switch (format) {
    case ops::WeightFormat::kF32:
      return function(FormatConstant<ops::WeightFormat::kF32>());
    case ops::WeightFormat::kBf16:
      return function(FormatConstant<ops::WeightFormat::kBf16>());
    case ops::WeightFormat::kFp8Block:
      return function(FormatConstant<ops::WeightFormat::kFp8Block>());
    case ops::WeightFormat::kNvfp4:
      return function(FormatConstant<ops::WeightFormat::kNvfp4>());
  }
}

}  // namespace tessera::backends::cuda_common
