// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the bits of 16 E2M1 codes lie in two words of a packed unit (packed_units.h). Codes 2 j and 2 j + 1 (j = 0 to
// 3) of a word become the lower and upper half of a pair of BF16. A code is a sign and three bits, which BF16 wants at
// bits 15 and 8 to 6 of a half. They lie in both halves at
//   j        three bits    sign                                       comes there by
//   0        8 to 6        15
//   1        14 to 12      5 of the other half                        rotating the word right by 6
//   2        2 to 0        9                                          shifting left by 6
//   3        bits 3, 4, 10 and 11 of words 0 and 1, and of 2 and 3, hold both words' codes: the even word's there and
//            the odd one's two bits higher make a word whose
//            6 to 4        13: the even word's                        shifting left by 2
//            12 to 10      3 of the other half: the odd word's        rotating right by 4
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common {

// Bits of the even word, and of the odd one two lower, that the word of j = 3 is made of.
constexpr uint32_t kNvfp4ThirdBits = 0x0C180C18;

// Where bit `bit` of the 64 of 16 codes lies; from 32 on in the second word.
TESSERA_HOST_DEVICE constexpr int packed_nvfp4_bit(int bit) {
  const int word = bit / 32, j = bit % 32 / 8, half = bit / 4 % 2 * 16, other = 16 - half, of_code = bit % 4;
  const bool is_sign = of_code == 3;
  switch (j) {
    case 0:
      return 32 * word + half + (is_sign ? 15 : 6 + of_code);
    case 1:
      return 32 * word + (is_sign ? other + 5 : half + 12 + of_code);
    case 2:
      return 32 * word + half + (is_sign ? 9 : of_code);
    default:
      break;
  }
  // In the word that both make; the odd word's bits stand two higher there.
  const int at = word == 0 ? (is_sign ? half + 13 : half + 4 + of_code) : is_sign ? other + 3 : half + 10 + of_code;
  return (kNvfp4ThirdBits >> at & 1) != 0 ? at : 32 + at - 2;
}

}  // namespace tessera::backends::cuda_common
