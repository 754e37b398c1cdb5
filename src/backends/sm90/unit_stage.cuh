// SPDX-License-Identifier: Apache-2.0
#pragma once
// Packed NVFP4 weights in shared memory: 512 columns of some rows, as they lie in the matrix
// (cuda_common/packed_units.h).
#include <cstdint>

#include "backends/cuda_common/packed_units.h"

namespace tessera::backends::sm90 {

template <int kSlots>
struct UnitStage {
  using Layout = cuda_common::PackedNvfp4;
  char units[kSlots][Layout::kBytes];

  // Of a lane's codes those of block 0 to 3, of 128 columns, in rows g (half 0) or g + 8.
  __device__ uint4 codes_of(int slot, int half, int block, int lane) const {
    return reinterpret_cast<const uint4*>(units[slot])[(2 * block + half) * Layout::kLanes + lane];
  }
  // The codes of their scales: rows g and g + 8, two each.
  __device__ uint32_t scales_of(int slot, int block, int lane) const {
    return reinterpret_cast<const uint32_t*>(units[slot])[(Layout::kPieces * Layout::kLanes + lane) * 4 + block];
  }
};

}  // namespace tessera::backends::sm90
