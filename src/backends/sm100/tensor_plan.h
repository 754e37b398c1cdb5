// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where sums and scales lie in tensor memory while block_scaled_sums.cuh works: two sets of sums, of kMatrices matrices
// by kTokens columns, then two sets of scales, of the four products of 256 columns each. Of a pair of blocks both have
// the same.
#include <cstdint>

#include "backends/cuda_common/tcgen05_operands.h"
#include "backends/sm100/input_tile.h"
#include "backends/sm100/packed_tiles.h"

namespace tessera::backends::sm100 {

template <int kMatrices, int kTokens>
struct TensorPlan {
  static constexpr int kSets = 2, kAllocated = 512;
  static constexpr int kSumColumns = kMatrices * kTokens;
  // Of one product's inputs; of 256 columns.
  static constexpr int kInputColumns = InputTile::atoms(kTokens) * cuda_common::ScaleAtom::kColumns;
  static constexpr int kScaleColumns =
      PackedTile::kProducts * (kMatrices * cuda_common::ScaleAtom::kColumns + kInputColumns);
  static_assert(kTokens % 8 == 0 && kTokens <= InputTile::kMostRows);
  static_assert(kSets * (kSumColumns + kScaleColumns) <= kAllocated);

  TESSERA_HOST_DEVICE static constexpr uint32_t sums(int set, int matrix) {
    return static_cast<uint32_t>(set * kSumColumns + matrix * kTokens);
  }
  // Of product 0 to 3 of 256 columns: those of matrix `operand`, of the inputs where that is kMatrices.
  TESSERA_HOST_DEVICE static constexpr uint32_t scales(int set, int operand, int product) {
    const int columns = operand == kMatrices ? kInputColumns : cuda_common::ScaleAtom::kColumns;
    return static_cast<uint32_t>(kSets * kSumColumns + set * kScaleColumns +
                                 operand * PackedTile::kProducts * cuda_common::ScaleAtom::kColumns +
                                 product * columns);
  }
};

}  // namespace tessera::backends::sm100
