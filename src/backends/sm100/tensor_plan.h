// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where sums and scales lie in tensor memory while block_scaled_sums.cuh works: two sets of sums, of kMatrices matrices
// by kTokens columns, then two sets of scales, of the four products of 256 columns each. Where that does not fit the
// sets of sums overlap, beside one set of scales: the last tokens of the first have the columns of the second's first
// ones, so products may begin a set when what it shares with the other has been read. (Of gate and up the last tokens
// of up have the columns of the second's first ones of gate.) Of a pair of blocks both have the same.
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
  static constexpr bool kOverlaps = kSets * (kSumColumns + kScaleColumns) > kAllocated;
  static constexpr int kScaleSets = kOverlaps ? 1 : 2;
  // From a set of sums to the other; what they share.
  static constexpr int kSumStride = kOverlaps ? kAllocated - kScaleColumns - kSumColumns : kSumColumns;
  static constexpr int kSharedColumns = kSumColumns - kSumStride;
  static_assert(kTokens % 8 == 0 && kTokens <= InputTile::kMostRows);
  static_assert(!kOverlaps || (kSharedColumns <= kTokens && 2 * kSharedColumns <= kSumColumns));

  TESSERA_HOST_DEVICE static constexpr uint32_t sums(int set, int matrix) {
    return static_cast<uint32_t>(set * kSumStride + matrix * kTokens);
  }
  // The first of the kSharedColumns tokens whose sums lie in the other set's columns.
  TESSERA_HOST_DEVICE static constexpr int first_shared(int set) { return set == 0 ? kTokens - kSharedColumns : 0; }
  // Of product 0 to 3 of 256 columns: those of matrix `operand`, of the inputs where that is kMatrices.
  TESSERA_HOST_DEVICE static constexpr uint32_t scales(int set, int operand, int product) {
    const int columns = operand == kMatrices ? kInputColumns : cuda_common::ScaleAtom::kColumns;
    return static_cast<uint32_t>(kSumStride + kSumColumns + set * kScaleColumns +
                                 operand * PackedTile::kProducts * cuda_common::ScaleAtom::kColumns +
                                 product * columns);
  }
};

}  // namespace tessera::backends::sm100
