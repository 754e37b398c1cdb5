// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights as the A operand of mma.sync m16n8k16 (ptx/mma.cuh), decoded in registers. A warp takes 16 rows by 128
// columns; lane (g, t) holds columns [32 t, 32 t + 32) of rows g and g + 8, so that loads are 16 bytes wide and need no
// packed layout. Which column stands at which k of a product is then our choice, the same for weights and inputs:
// step i (0 to 3) takes columns 32 t + 8 i + [0, 8) of each t in two products, two pairs of columns for each.
//   kIsSplit    pairs are columns (j, j + 4) for j = 0 to 3: how eight nibbles of a word come apart; else neighbours
//   kScaledSum  a sum over 128 columns times scale(r) is what counts; else the decoded weights hold all scales
//   kFactor     decoded weights are smaller by this power of two
//   kInFlight   blocks of 128 columns that are loaded before the first is used
// Columns from `width` (a multiple of 16; kIsWide: of 32) on are zero. Of packed weights: packed_shares.cuh.
#include <cstdint>

#include "backends/cuda_common/e2m1_pairs.cuh"
#include "backends/cuda_common/e4m3_pairs.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "numeric/fp8_block.h"
#include "numeric/nvfp4.h"
#include "ops/weight_view.h"

namespace tessera::backends::cuda_common {

constexpr int kShareColumns = 32, kShareBlock = 128;

template <ops::WeightFormat kFormat>
struct WeightShare;

// Two blocks' scales, E4M3 codes in the upper bytes of both halves, times 2^118, which BF16 holds for E4M3's 448 too:
// codes times 2^-126 (e2m1_pair_small and packed NVFP4) are then values times 2^-8.
__device__ inline uint32_t scale_pair(uint32_t spread) {
  constexpr uint32_t kGain = 0x7A807A80;  // 2^118, twice
  return ptx::multiply_bf16x2(ptx::multiply_bf16x2(e4m3_pair_small(spread), kE4m3Unscale), kGain);
}
constexpr float kScalePairFactor = 0x1p8f;

// E2M1 codes times E4M3 block scale have at most 6 significant bits: exact in BF16.
template <>
struct WeightShare<ops::WeightFormat::kNvfp4> {
  static constexpr bool kIsSplit = true, kScaledSum = false, kFindsNan = false;
  static constexpr float kFactor = kScalePairFactor;
  static constexpr int kInFlight = 4;
  uint4 codes[2];
  uint32_t scales[2];  // codes of the two blocks of 16 columns; prepared: a pair of values

  template <bool kIsWide>
  __device__ void load(const void* data, const void* block_scales, int64_t width, const int64_t (&rows)[2], int64_t k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      codes[r] = {0, 0, 0, 0};
      scales[r] = 0;
      const uint8_t* at = static_cast<const uint8_t*>(data) + (rows[r] * width + k) / 2;
      const uint8_t* scale = static_cast<const uint8_t*>(block_scales) + (rows[r] * width + k) / numeric::kNvfp4Block;
      if constexpr (kIsWide) {
        if (k < width) codes[r] = __ldcs(reinterpret_cast<const uint4*>(at));
        if (k < width) scales[r] = __ldg(reinterpret_cast<const uint16_t*>(scale));
        continue;
      }
      if (k >= width) continue;
      const uint2 first = __ldg(reinterpret_cast<const uint2*>(at));  // rows begin at multiples of 8 bytes only
      codes[r].x = first.x, codes[r].y = first.y;
      scales[r] = __ldg(scale);
      if (k + numeric::kNvfp4Block >= width) continue;
      const uint2 second = __ldg(reinterpret_cast<const uint2*>(at) + 1);
      codes[r].z = second.x, codes[r].w = second.y;
      scales[r] |= static_cast<uint32_t>(__ldg(scale + 1)) << 8;
    }
  }

  // Scales in place of their codes: once before decode().
  __device__ void prepare() {
    const bool has_nan = has_e4m3_nan(scales[0] | scales[1] << 16);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t spread = __byte_perm(scales[r], 0, 0x1404), pair = scale_pair(spread);
      scales[r] = has_nan ? with_e4m3_nan(pair, spread) : pair;
    }
  }
  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) const {
    const uint32_t word = i == 0 ? codes[r].x : i == 1 ? codes[r].y : i == 2 ? codes[r].z : codes[r].w;
    const uint32_t scale = i < 2 ? ptx::half_twice<false>(scales[r]) : ptx::half_twice<true>(scales[r]);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = ptx::multiply_bf16x2(e2m1_pair_small(word, j), scale);
  }
  __device__ float scale(int) const {
    return 1;
  }
};

// E4M3 codes are exact in BF16; their scales are any FP32 numbers.
template <>
struct WeightShare<ops::WeightFormat::kFp8Block> {
  static constexpr bool kIsSplit = false, kScaledSum = true, kFindsNan = false, folds = false;
  static constexpr float kFactor = 1;
  static constexpr int kInFlight = 2;
  uint4 codes[2][2];
  float scales[2];

  template <bool kIsWide>
  __device__ void load(const void* data, const void* block_scales, int64_t width, const int64_t (&rows)[2], int64_t k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* at = static_cast<const uint8_t*>(data) + rows[r] * width + k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[r][half] = {0, 0, 0, 0};
        if (k + 16 * half < width) codes[r][half] = __ldcs(reinterpret_cast<const uint4*>(at) + half);
      }
      load_scale(r, block_scales, width, rows[r], k);
    }
  }

  __device__ void prepare() {}

  // One for all lanes of a row: sums of theirs are what it multiplies.
  __device__ void load_scale(int r, const void* block_scales, int64_t width, int64_t row, int64_t k) {
    const int64_t block = k / kShareBlock;
    const int64_t num_blocks = (width + numeric::kFp8WeightBlock - 1) / numeric::kFp8WeightBlock;
    const float* scales_of_row = static_cast<const float*>(block_scales) + row / numeric::kFp8WeightBlock * num_blocks;
    scales[r] = block >= num_blocks ? 0.0f : __ldg(scales_of_row + block);
  }

  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) const {
    const uint4& half = codes[r][i / 2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = i % 2 == 0 ? (j < 2 ? half.x : half.y) : (j < 2 ? half.z : half.w);
      // Each code in the upper byte of its half.
      const uint32_t spread = __byte_perm(word, 0, j % 2 == 0 ? 0x1404 : 0x3424);
      pairs[j] = with_e4m3_nan(ptx::multiply_bf16x2(e4m3_pair_small(spread), kE4m3Unscale), spread);
    }
  }
  __device__ float scale(int r) const {
    return scales[r];
  }
};

template <>
struct WeightShare<ops::WeightFormat::kBf16> {
  static constexpr bool kIsSplit = false, kScaledSum = false, kFindsNan = false;
  static constexpr float kFactor = 1;
  static constexpr int kInFlight = 2;
  uint4 values[2][4];

  template <bool kIsWide>
  __device__ void load(const void* data, const void*, int64_t width, const int64_t (&rows)[2], int64_t k) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint16_t* at = static_cast<const uint16_t*>(data) + rows[r] * width + k;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[r][i] = {0, 0, 0, 0};
        if (k + 8 * i < width) values[r][i] = __ldcs(reinterpret_cast<const uint4*>(at) + i);
      }
    }
  }
  __device__ void prepare() {}
  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) const {
    const uint4& v = values[r][i];
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  }
  __device__ float scale(int) const {
    return 1;
  }
};

}  // namespace tessera::backends::cuda_common
