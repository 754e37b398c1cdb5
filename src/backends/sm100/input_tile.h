// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs of NVFP4 products in the order in which they are multiplied: a tile is up to 128 tokens, a multiple of 8; of
// each 256 columns first the codes as SwizzledCodes, then the scales as four ScaleAtoms, of which the tile's rows are
// meant (cuda_common/tcgen05_operands.h). So one bulk copy brings 256 columns.
#include <cstdint>

#include "backends/sm100/packed_tiles.h"

namespace tessera::backends::sm100 {

struct InputTile {
  static constexpr int kGroup = cuda_common::SwizzledCodes::kGroupRows, kMostRows = cuda_common::ScaleAtom::kRows;
  static constexpr int kColumns = PackedTile::kColumns, kProducts = PackedTile::kProducts;
  static constexpr int kScaleBytes = kProducts * cuda_common::ScaleAtom::kBytes;

  TESSERA_HOST_DEVICE static constexpr int padded(int rows) { return (rows + kGroup - 1) / kGroup * kGroup; }
  // Of 256 columns of so many rows.
  TESSERA_HOST_DEVICE static constexpr int stage_bytes(int rows) {
    return cuda_common::SwizzledCodes::bytes(rows) + kScaleBytes;
  }
  // Of `tiles` tiles with `rows` rows in all, each a multiple of 8; where the tile behind so many begins.
  TESSERA_HOST_DEVICE static constexpr int64_t bytes(int64_t rows, int64_t tiles, int64_t width) {
    return ceil_div<int64_t>(width, kColumns) * (rows * cuda_common::SwizzledCodes::kRowBytes + tiles * kScaleBytes);
  }
  // In a tile of `rows` rows: the 8 bytes of codes of a block of 16 columns of a row, and its scale.
  TESSERA_HOST_DEVICE static constexpr int64_t codes_at(int rows, int row, int block) {
    return int64_t{block / PackedTile::kBlocks} * stage_bytes(rows) +
           PackedTile::codes_at(row, block % PackedTile::kBlocks);
  }
  // Scales lie where a packed tile of 128 rows has them, but behind fewer rows.
  TESSERA_HOST_DEVICE static constexpr int64_t scale_at(int rows, int row, int block) {
    return int64_t{block / PackedTile::kBlocks} * stage_bytes(rows) + cuda_common::SwizzledCodes::bytes(rows) -
           PackedTile::kCodeBytes + PackedTile::scale_at(row, block % PackedTile::kBlocks);
  }
};

}  // namespace tessera::backends::sm100
