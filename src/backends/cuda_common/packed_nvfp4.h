// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4 weights in the order in which kernels multiply them. A unit is 16 rows by 512 columns, as mma.sync m16n8k16's A
// operand takes them: lane (g, t) has columns [32 t, 32 t + 32) of rows g and g + 8 of each 128, and finds what it
// needs as eight pieces of 16 bytes and one of scales, each at its own place of 32 neighbours. So a warp reads whole
// lines, no lane needs another's bytes, and codes lie where few instructions reach them.
//   unit    [8][32] pieces: rows g and g + 8 of the first 128 columns, of the second, third and fourth; word i of a
//           piece is columns 8 i + [0, 8) of the lane's 32
//           [32] scales: of each 128 columns rows g and g + 8, two blocks of 16 each
//   matrix  [ceil(rows / 16)][ceil(cols / 512)] units; rows and columns that aren't there are zero
// Codes 2 j and 2 j + 1 (j = 0 to 3) of a word become the lower and upper half of a pair of BF16. A code is a sign and
// three bits, which BF16 wants at bits 15 and 8 to 6 of a half. They lie in both halves at
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
#include "base/integer_math.h"
#include "ops/packed_layout.h"

namespace tessera::backends::cuda_common {

struct PackedNvfp4 {
  static constexpr int kRows = 16, kColumns = 512, kLanes = 32;
  static constexpr int kPieces = 8, kPieceBytes = 16;  // scales are the last, ninth piece
  static constexpr int kBytes = (kPieces + 1) * kLanes * kPieceBytes;

  TESSERA_HOST_DEVICE static constexpr int64_t units_of_row(int64_t cols) { return (cols + kColumns - 1) / kColumns; }
  // Bits of the even word, and of the odd one two lower, that the word of j = 3 is made of.
  static constexpr uint32_t kThirdBits = 0x0C180C18;
  // Where the unit with this row and column begins.
  TESSERA_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t column, int64_t cols) {
    return (row / kRows * units_of_row(cols) + column / kColumns) * kBytes;
  }
};

// The lanes' bytes are permuted bits of the checkpoint's: nothing is converted. Columns in multiples of 16.
const ops::PackedLayout* packed_nvfp4();

}  // namespace tessera::backends::cuda_common
