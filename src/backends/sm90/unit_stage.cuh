// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packed weights in shared memory: a unit's columns of some rows, as they lie in the matrix
// (cuda_common/packed_units.h). Behind a short unit lie any codes, with scales of zero.
#include <cstdint>

#include "backends/cuda_common/packed_shares.cuh"
#include "backends/cuda_common/packed_units.h"

namespace tessera::backends::sm90 {

template <ops::WeightFormat kFormat, int kSlots>
struct UnitStageOf {
  using Layout = cuda_common::PackedUnit<kFormat>;
  using Share = cuda_common::PackedShare<kFormat>;
  static constexpr int kHalfPieces = Layout::kBlockPieces / 2;
  char units[kSlots][Layout::kBytes];

  // Of a lane's codes of a block of 128 columns in rows g (half 0) or g + 8 the piece `part`.
  __device__ uint4 codes_of(int slot, int half, int block, int lane, int part = 0) const {
    return reinterpret_cast<const uint4*>(
        units[slot])[Layout::kScalePieces +
                     (Layout::kBlockPieces * block + kHalfPieces * half + part) * Layout::kLanes + lane];
  }
  // NVFP4: the codes of their scales: rows g and g + 8, two each.
  __device__ uint32_t scales_of(int slot, int block, int lane) const {
    return reinterpret_cast<const uint32_t*>(units[slot])[lane * 4 + block];
  }
  // Of all blocks, in one load.
  __device__ uint4 all_scales_of(int slot, int lane) const { return reinterpret_cast<const uint4*>(units[slot])[lane]; }
  // What a lane multiplies of `part`, as if it were the first of its block; NVFP4: with its scales' codes in scales[0].
  template <class OneShare = Share>
  __device__ OneShare share_of(int slot, int block, int part, int lane) const {
    OneShare share = {};
    share.pieces[0] = codes_of(slot, 0, block, lane, part);
    share.pieces[kHalfPieces] = codes_of(slot, 1, block, lane, part);
    if constexpr (Layout::kIsNvfp4) share.scales[0] = scales_of(slot, block, lane);
    return share;
  }
};

template <int kSlots>
using UnitStage = UnitStageOf<ops::WeightFormat::kNvfp4, kSlots>;

}  // namespace tessera::backends::sm90
