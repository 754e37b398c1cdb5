// SPDX-License-Identifier: Apache-2.0
#pragma once
// E4M3 codes as BF16, two at a time: each code in the upper byte of its half of a word, the lower bytes anything.
#include <cstdint>

#include "backends/cuda_common/ptx/mma.cuh"

namespace tessera::backends::cuda_common {

constexpr uint32_t kE4m3Unscale = 0x7B807B80;  // 2^120, twice

// The codes' values times 2^-120: E4M3's bits at the end of BF16's exponent. Wrong for NaN.
__device__ inline uint32_t e4m3_pair_small(uint32_t spread) {
  return (spread & 0x80008000) | (spread >> 4 & 0x07F007F0);
}

// `pair`, with NaN where the code in `spread` is one.
__device__ inline uint32_t with_e4m3_nan(uint32_t pair, uint32_t spread) {
  if ((spread & 0x7F00) == 0x7F00) pair = (pair & 0xFFFF0000) | 0x7FC0;
  if ((spread & 0x7F000000) == 0x7F000000) pair = (pair & 0xFFFF) | 0x7FC00000;
  return pair;
}

// Whether one of four codes is NaN.
__device__ inline bool has_e4m3_nan(uint32_t word) {
  return (((word & 0x7F7F7F7F) + 0x01010101) & 0x80808080) != 0;
}

// The same for many words in turn, two instructions each: bits of kSeenNan are in what comes of them all if a code was
// NaN. One more than a NaN's code has the other sign, and only from a NaN does a carry reach the next code.
constexpr uint32_t kSeenNan = 0x80808080;
__device__ inline uint32_t seen_e4m3(uint32_t seen, uint32_t word) {
  return seen | ((word + 0x01010101) ^ word);
}

}  // namespace tessera::backends::cuda_common
