// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs of NVFP4 products in the order in which they are multiplied: a tile is up to 256 tokens, a multiple of 8; of
// each 256 columns first the codes as SwizzledCodes, then the scales as ScaleAtoms, of which the tile's rows are meant
// (cuda_common/tcgen05_operands.h): of each product one for 128 rows, or two for more. So one bulk copy brings 256
// columns, and two bring half of the rows with all scales.
#include <cstdint>

#include "backends/sm100/packed_tiles.h"

namespace tessera::backends::sm100 {

struct InputTile {
  static constexpr int kGroup = cuda_common::SwizzledCodes::kGroupRows, kMostRows = 256;
  static constexpr int kColumns = PackedTile::kColumns, kProducts = PackedTile::kProducts;

  TESSERA_HOST_DEVICE static constexpr int atoms(int rows) { return ceil_div(rows, cuda_common::ScaleAtom::kRows); }
  // Of 256 columns of so many rows.
  TESSERA_HOST_DEVICE static constexpr int code_bytes(int rows) { return cuda_common::SwizzledCodes::bytes(rows); }
  TESSERA_HOST_DEVICE static constexpr int scale_bytes(int rows) {
    return atoms(rows) * kProducts * cuda_common::ScaleAtom::kBytes;
  }
  TESSERA_HOST_DEVICE static constexpr int stage_bytes(int rows) { return code_bytes(rows) + scale_bytes(rows); }
  // Of tiles with `rows` rows in all, each a multiple of 8, and `num_atoms` atoms of each product; where the tile
  // behind so many begins.
  TESSERA_HOST_DEVICE static constexpr int64_t bytes(int64_t rows, int64_t num_atoms, int64_t width) {
    return ceil_div<int64_t>(width, kColumns) *
           (rows * cuda_common::SwizzledCodes::kRowBytes + num_atoms * kProducts * cuda_common::ScaleAtom::kBytes);
  }
  // In a tile of `rows` rows: the 8 bytes of codes of a block of 16 columns of a row, and its scale.
  TESSERA_HOST_DEVICE static constexpr int64_t codes_at(int rows, int row, int block) {
    return int64_t{block / PackedTile::kBlocks} * stage_bytes(rows) +
           PackedTile::codes_at(row, block % PackedTile::kBlocks);
  }
  TESSERA_HOST_DEVICE static constexpr int64_t scale_at(int rows, int row, int block) {
    constexpr int kScales = cuda_common::Nvfp4Product::kScales;
    const int product = block % PackedTile::kBlocks / kScales;
    return int64_t{block / PackedTile::kBlocks} * stage_bytes(rows) + atom_at(rows, row, product) +
           cuda_common::ScaleAtom::offset(row, block % kScales);
  }
  // Of 256 columns: where the atom of a product and of a row begins.
  TESSERA_HOST_DEVICE static constexpr int atom_at(int rows, int row, int product) {
    return code_bytes(rows) +
           (product * atoms(rows) + row / cuda_common::ScaleAtom::kRows) * cuda_common::ScaleAtom::kBytes;
  }
};

}  // namespace tessera::backends::sm100
