// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a lane multiplies, from packed weights (packed_units.h): 16 rows by 128 columns, as weight_shares.cuh has them
// from the checkpoint's layout, for the same sums bit for bit, but for FP8 whose scales fold.
//   pieces      the lane's of the block, in the unit's order
//   folds       FP8: whether this matrix's scales fold (packed_units.h), so that decoded weights hold them and what
//               kScaledSum says does not apply
//   kFindsNan   NaN codes, or NVFP4's NaN scales, are taken for 480, and carries[r] notes that row r has one: what
//               add_nans() (mma_sums.cuh) makes good, once for a chunk instead of once for a code or scale
#include <cstdint>

#include "backends/cuda_common/packed_nvfp4.h"
#include "backends/cuda_common/packed_units.h"
#include "backends/cuda_common/ptx/select_bits.cuh"
#include "backends/cuda_common/weight_shares.cuh"

namespace tessera::backends::cuda_common {

template <ops::WeightFormat kFormat>
struct PackedShare;

template <>
struct PackedShare<ops::WeightFormat::kNvfp4> {
  static constexpr bool kIsSplit = false, kScaledSum = false, kFindsNan = true;
  static constexpr float kFactor = kScalePairFactor;
  uint4 pieces[2];
  uint32_t scales[2];
  uint32_t carries[2];

  // Scales from their codes: rows g and g + 8, two blocks each.
  __device__ void prepare(uint32_t scale_codes) {
    scales[0] = scale_pair(__byte_perm(scale_codes, 0, 0x1404));
    scales[1] = scale_pair(__byte_perm(scale_codes, 0, 0x3424));
    // One more carries where all seven bits are set; one word for both rows.
    carries[0] = carries[1] = (scale_codes & 0x7F7F7F7F) + 0x01010101;
  }
  // By row r's carries of one or several blocks, OR-ed.
  __device__ static bool has_nan(uint32_t carries, int r) {
    return (carries & (r == 0 ? 0x00008080 : 0x80800000)) != 0;
  }
  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) const {
    constexpr uint32_t kBits = 0x81C081C0;
    const uint32_t even = i < 2 ? pieces[r].x : pieces[r].z, odd = i < 2 ? pieces[r].y : pieces[r].w;
    const uint32_t word = i % 2 == 0 ? even : odd;
    const uint32_t scale = i < 2 ? ptx::half_twice<false>(scales[r]) : ptx::half_twice<true>(scales[r]);
    const uint32_t third = ptx::select_bits<kNvfp4ThirdBits>(even, odd << 2);
    pairs[0] = word & kBits;
    pairs[1] = (word >> 6 | word << 26) & kBits;
    pairs[2] = word << 6 & kBits;
    pairs[3] = (i % 2 == 0 ? third << 2 : third >> 4 | third << 28) & kBits;
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = ptx::multiply_bf16x2(pairs[j], scale);
  }
};

// Step i's codes (weight_shares.cuh) of a row's piece i / 2, in BF16, times 2^-120.
__device__ inline void fp8_pairs_small(const uint4& piece, int i, uint32_t (&pairs)[4]) {
  const uint32_t words[2] = {i % 2 == 0 ? piece.x : piece.z, i % 2 == 0 ? piece.y : piece.w};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t word = words[j];
    pairs[2 * j] = word & 0x87F087F0;
    pairs[2 * j + 1] = ((word >> 4 | word << 28) & 0x87808780) | (word << 4 & 0x00700070);
  }
}
// The factor of a folded scale, twice.
__device__ inline uint32_t folded_factor(float scale) {
  return __byte_perm(__float_as_uint(scale), 0, 0x1010);
}

template <>
struct PackedShare<ops::WeightFormat::kFp8Block> {
  static constexpr bool kIsSplit = false, kScaledSum = true, kFindsNan = true;
  static constexpr float kFactor = 1;
  uint4 pieces[4];
  float sum_factor;  // one for all of them; not where scales fold
  uint32_t code_factor;
  bool folds;
  uint32_t carries[2];

  __device__ void prepare(float block_scale) {
    folds = is_folded_scale(__float_as_uint(block_scale));
    sum_factor = block_scale, code_factor = folds ? folded_factor(block_scale) : kE4m3Unscale;
    carries[0] = carries[1] = 0;
  }
  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) {
    fp8_pairs_small(pieces[2 * r + i / 2], i, pairs);
    // One more carries where all seven bits are set.
    constexpr uint32_t kOneMore = 0x00100010;
    carries[r] |= (pairs[0] + kOneMore) | (pairs[1] + kOneMore);
    carries[r] |= (pairs[2] + kOneMore) | (pairs[3] + kOneMore);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = ptx::multiply_bf16x2(pairs[j], code_factor);
  }
  // By either row's carries of one or several blocks, OR-ed.
  __device__ static bool has_nan(uint32_t carries, int) {
    return (carries & 0x08000800) != 0;
  }
  __device__ float scale(int) const {
    return sum_factor;
  }
};

// FP8 where it is known beforehand that scales fold, and with that (WeightView) that no code is NaN.
struct FoldedFp8Share {
  static constexpr bool kIsSplit = false, kScaledSum = false, kFindsNan = false;
  static constexpr float kFactor = 1;
  uint4 pieces[4];
  uint32_t code_factor;

  __device__ void prepare(float block_scale) { code_factor = folded_factor(block_scale); }
  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) const {
    fp8_pairs_small(pieces[2 * r + i / 2], i, pairs);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = ptx::multiply_bf16x2(pairs[j], code_factor);
  }
};

template <>
struct PackedShare<ops::WeightFormat::kBf16> {
  static constexpr bool kIsSplit = false, kScaledSum = false, kFindsNan = false;
  static constexpr float kFactor = 1;
  uint4 pieces[8];

  __device__ void decode(int r, int i, uint32_t (&pairs)[4]) const {
    const uint4& v = pieces[4 * r + i];
    pairs[0] = v.x, pairs[1] = v.y, pairs[2] = v.z, pairs[3] = v.w;
  }
};

}  // namespace tessera::backends::cuda_common
