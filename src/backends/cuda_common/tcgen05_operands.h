// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where NVFP4 operands of tcgen05.mma (kind::mxf4nvf4, block16) lie, and the descriptors that say so: plain arithmetic,
// for kernels and for host tests. Source: PTX ISA, "Shared memory descriptor", "Instruction descriptor",
// "Canonical layouts", "Block scaling for tcgen05.mma", "tcgen05.cp".
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common {

// Codes of a tile in shared memory: a row is 128 bytes, 256 codes, even column in the low nibble; eight rows are 1,024
// bytes, and the 16 bytes at place c of row r lie at c ^ r (128-byte swizzle). A tile begins at a multiple of 1,024.
struct SwizzledCodes {
  static constexpr int kRowBytes = 128, kRowColumns = 256, kGroupRows = 8, kGroupBytes = kGroupRows * kRowBytes;

  TESSERA_HOST_DEVICE static constexpr int bytes(int rows) {
    return (rows + kGroupRows - 1) / kGroupRows * kGroupBytes;
  }
  // Of byte `byte` (0 to 127) of a row.
  TESSERA_HOST_DEVICE static constexpr int offset(int row, int byte) {
    const int in_group = row % kGroupRows;
    return row / kGroupRows * kGroupBytes + in_group * kRowBytes + ((byte / 16) ^ in_group) * 16 + byte % 16;
  }
};

// What one product takes: 64 columns, 32 bytes of each row and four scales.
struct Nvfp4Product {
  static constexpr int kColumns = 64, kBytes = 32, kScales = 4;
};

// Scales of 128 rows by 64 columns, 512 bytes (tensor/scale_layout.h): 32 lanes of 16 bytes, lane r has rows r, r + 32,
// r + 64 and r + 96, four bytes each. In tensor memory the same: row `row` of an operand has its four scales in one
// cell, and every 32 lanes have a copy.
struct ScaleAtom {
  static constexpr int kRows = 128, kBytes = 512, kColumns = 4;  // columns of tensor memory

  TESSERA_HOST_DEVICE static constexpr int offset(int row, int scale) {
    return row % 32 * 16 + row % kRows / 32 * 4 + scale;
  }
  TESSERA_HOST_DEVICE static constexpr int lane(int row) { return row % 32; }  // of the first copy
  TESSERA_HOST_DEVICE static constexpr int column(int row) { return row / 32; }
};

// Descriptors of shared memory: bits 0-13 address / 16, 16-29 leading stride / 16, 32-45 stride of 8 rows / 16, bit 46
// set, 61-63 the swizzle.
TESSERA_HOST_DEVICE constexpr uint64_t shared_descriptor(uint32_t address, uint32_t leading_bytes,
                                                         uint32_t stride_bytes, uint32_t swizzle) {
  return uint64_t{(address & 0x3FFFF) >> 4} | uint64_t{leading_bytes >> 4} << 16 | uint64_t{stride_bytes >> 4} << 32 |
         uint64_t{1} << 46 | uint64_t{swizzle} << 61;
}
// Of SwizzledCodes; the product that begins at another column adds its byte / 16 (the leading stride is not used).
TESSERA_HOST_DEVICE constexpr uint64_t codes_descriptor(uint32_t address) {
  return shared_descriptor(address, 0, SwizzledCodes::kGroupBytes, 2);
}
TESSERA_HOST_DEVICE constexpr uint64_t advance_descriptor(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}
// Of a ScaleAtom, which tcgen05.cp copies.
TESSERA_HOST_DEVICE constexpr uint64_t scales_descriptor(uint32_t address) {
  return shared_descriptor(address, 16, 128, 0);
}

// The instruction descriptor of M = m (128, or 256 of two thread blocks) by N = n, E2M1 by E2M1, UE4M3 scales.
TESSERA_HOST_DEVICE constexpr uint32_t nvfp4_instruction(int m, int n) {
  constexpr uint32_t kE2m1 = 1;
  return kE2m1 << 7 | kE2m1 << 10 | static_cast<uint32_t>(n / 8) << 17 | static_cast<uint32_t>(m / 128) << 27;
}

}  // namespace tessera::backends::cuda_common
