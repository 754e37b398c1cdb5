// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the bits of E4M3 codes lie in a packed unit (packed_units.h): four codes to a word, 0 and 1 one pair of BF16, 2
// and 3 another. A code is a sign and seven bits, which BF16 wants at bits 15 and 10 to 4 of a half (the end of its
// exponent: the code's value times 2^-120). They lie in both halves at
//   pair     upper four bits    lower three bits    sign                     come there by
//   first    10 to 7            6 to 4              15
//   second   14 to 11           2 to 0              3 of the other half      rotating the word right by 4 (sign, upper
//                                                                            bits), shifting left by 4 (lower bits)
// That is five operations for four codes. One shift fewer is not to be had: beside a pair in place no seven
// neighbouring bits of a half are free.
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common {

// Where bit `bit` of the 64 of 8 codes lies; from 32 on in the second word.
TESSERA_HOST_DEVICE constexpr int packed_fp8_bit(int bit) {
  const int word = bit / 32, half = bit / 8 % 2 * 16, other = 16 - half, of_code = bit % 8;
  const bool is_sign = of_code == 7;
  if (bit % 32 < 16) return 32 * word + half + (is_sign ? 15 : 4 + of_code);
  if (is_sign) return 32 * word + other + 3;
  return 32 * word + half + (of_code >= 3 ? 8 + of_code : of_code);
}

}  // namespace tessera::backends::cuda_common
