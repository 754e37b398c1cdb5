// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4 weights in the order in which tcgen05.mma takes them: a tile is 128 rows by 256 columns, first the codes as
// SwizzledCodes, then the scales as four ScaleAtoms, 64 columns each (cuda_common/tcgen05_operands.h). A tile is one
// range of memory that a bulk copy brings, and its scales are what cuBLASLt's and CUTLASS's 128 x 4 layout has.
//   matrix  [ceil(rows / 128)][ceil(cols / 256)] tiles; rows and columns that aren't there are zero
#include <cstdint>

#include "backends/cuda_common/tcgen05_operands.h"
#include "base/integer_math.h"
#include "ops/packed_layout.h"

namespace tessera::backends::sm100 {

struct PackedTile {
  static constexpr int kRows = 128, kColumns = cuda_common::SwizzledCodes::kRowColumns;
  static constexpr int kProducts = kColumns / cuda_common::Nvfp4Product::kColumns;
  static constexpr int kCodeBytes = cuda_common::SwizzledCodes::bytes(kRows);
  static constexpr int kBytes = kCodeBytes + kProducts * cuda_common::ScaleAtom::kBytes;
  static constexpr int kBlockColumns = 16,
                       kBlocks = kColumns / kBlockColumns;  // columns of one scale, and such of a row

  TESSERA_HOST_DEVICE static constexpr int64_t tiles_of_row(int64_t cols) { return ceil_div<int64_t>(cols, kColumns); }
  // Where the tile with this row and column 0 begins.
  TESSERA_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t cols) {
    return row / kRows * tiles_of_row(cols) * kBytes;
  }
  // In a tile: the 8 bytes of codes of a block of 16 columns, and its scale.
  TESSERA_HOST_DEVICE static constexpr int codes_at(int row, int block) {
    return cuda_common::SwizzledCodes::offset(row, block * (kBlockColumns / 2));
  }
  TESSERA_HOST_DEVICE static constexpr int scale_at(int row, int block) {
    constexpr int kScales = cuda_common::Nvfp4Product::kScales;
    return kCodeBytes + block / kScales * cuda_common::ScaleAtom::kBytes +
           cuda_common::ScaleAtom::offset(row, block % kScales);
  }
};

// Bytes are the checkpoint's: nothing is converted. Columns in multiples of 16.
const ops::PackedLayout* packed_tiles();

}  // namespace tessera::backends::sm100
