// SPDX-License-Identifier: Apache-2.0
#pragma once
// E2M1 codes as BF16, two at a time.
#include <cstdint>

namespace tessera::backends::cuda_common {

// Of the word's eight codes, number j (0 to 3) in the lower half and j + 4 in the upper one, times 2^-126: E2M1's two
// exponent bits and its mantissa bit at the end of BF16's exponent and the begin of its mantissa are the code's value
// times 2^-126, also for the subnormal 0.5.
__device__ inline uint32_t e2m1_pair_small(uint32_t word, int j) {
  const int shift = 6 - 4 * j;
  const uint32_t moved = shift > 0 ? word << (shift > 0 ? shift : 0) : word >> (shift < 0 ? -shift : 0);
  return (word << (12 - 4 * j) & 0x80008000) | (moved & 0x01C001C0);
}

// Eight BF16 values in the order of such pairs: (0, 4), (1, 5), (2, 6), (3, 7).
__device__ inline uint4 split_pairs(const uint4& v) {
  return {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
          __byte_perm(v.y, v.w, 0x7632)};
}

}  // namespace tessera::backends::cuda_common
