// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a block scale lies in memory. Checkpoints hold scales row-major ("linear"); Blackwell's block-scaled multiply
// reads tiles of 128 rows x 4 groups: 32 lanes of 16 bytes, lane r holding rows r, r + 32, r + 64, r + 96 with 4 groups
// each; tiles along k are contiguous, then tiles along rows. Padding is zero bytes: anything else could be a NaN.
// Source: CUTLASS's scale-factor atom ((32,4),(vec,4)):((16,4),(0,1)); PTX ISA, tcgen05 block scaling.
#include <cstdint>

#include "base/host_device.h"
#include "base/integer_math.h"

namespace tessera {

constexpr int64_t kSfTileRows = 128, kSfTileGroups = 4;
constexpr int64_t kSfTileBytes = kSfTileRows * kSfTileGroups;

struct ScalePosition {
  int64_t row, group;
};

// Bytes of the padded layout of one matrix (each expert's matrix is padded by itself).
TESSERA_HOST_DEVICE constexpr int64_t sf128x4_size(int64_t rows, int64_t groups) {
  return ceil_div(rows, kSfTileRows) * ceil_div(groups, kSfTileGroups) * kSfTileBytes;
}

TESSERA_HOST_DEVICE constexpr int64_t sf128x4_offset(int64_t row, int64_t group, int64_t num_groups) {
  const int64_t tile = row / kSfTileRows * ceil_div(num_groups, kSfTileGroups) + group / kSfTileGroups;
  return tile * kSfTileBytes + row % 32 * 16 + row % kSfTileRows / 32 * 4 + group % kSfTileGroups;
}

// The inverse; positions at or past the matrix's rows or groups are padding.
TESSERA_HOST_DEVICE constexpr ScalePosition sf128x4_position(int64_t offset, int64_t num_groups) {
  const int64_t tiles_per_row = ceil_div(num_groups, kSfTileGroups);
  const int64_t tile = offset / kSfTileBytes, inside = offset % kSfTileBytes;
  return {tile / tiles_per_row * kSfTileRows + inside % 16 / 4 * 32 + inside / 16,
          tile % tiles_per_row * kSfTileGroups + inside % 4};
}

// linear [rows, groups] -> swizzled [sf128x4_size], padding zeroed.
constexpr void sf128x4_swizzle(const uint8_t* linear, int64_t rows, int64_t groups, uint8_t* swizzled) {
  for (int64_t offset = 0; offset < sf128x4_size(rows, groups); ++offset) {
    const ScalePosition at = sf128x4_position(offset, groups);
    swizzled[offset] = at.row < rows && at.group < groups ? linear[at.row * groups + at.group] : 0;
  }
}

constexpr void sf128x4_unswizzle(const uint8_t* swizzled, int64_t rows, int64_t groups, uint8_t* linear) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      linear[row * groups + group] = swizzled[sf128x4_offset(row, group, groups)];
    }
  }
}

}  // namespace tessera
