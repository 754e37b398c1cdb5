// SPDX-License-Identifier: Apache-2.0
#pragma once
// Floats as whole numbers in the same order.
#include <cstdint>

namespace tessera::backends::cuda_common {

// Ascends with the score; all NaN are 0, below minus infinity, and both zeros are equal. Never the largest uint32_t.
__device__ inline uint32_t ordered_bits(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score == 0 ? 0.0f : score);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// A score with those bits.
__device__ inline float score_of_bits(uint32_t bits) {
  return __uint_as_float(bits >> 31 != 0 ? bits & 0x7FFFFFFFu : ~bits);
}

}  // namespace tessera::backends::cuda_common
