// SPDX-License-Identifier: Apache-2.0
#pragma once
// What tcgen05's descriptors say, read from their bits and not from what made them. Forms that no kernel of ours uses
// are refused along with what is wrong: a fault is a line, null where there is none. Pure functions. Source: PTX ISA,
// "Shared memory descriptor", "Instruction descriptor", "Swizzling modes", "Matrix shape".
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common::ptx::emulated {

// An operand in shared memory, K-major.
struct SharedMatrix {
  uint32_t start, leading, stride;  // bytes: address, between 16-byte columns (no swizzle), between groups of 8 rows
  uint32_t row_bytes;               // of a swizzled row; 16 without a swizzle

  // Where byte `byte` of row `row` lies. A swizzle exchanges bits of the address itself: from `start` on 16-byte places
  // (bits 4 to 6) change with the row (bits 7 to 9).
  TESSERA_HOST_DEVICE constexpr uint32_t address(uint32_t row, uint32_t byte) const {
    if (row_bytes == 16) return start + row / 8 * stride + row % 8 * 16 + byte / 16 * leading + byte % 16;
    const uint32_t plain = start + row / 8 * stride + row % 8 * row_bytes + byte;
    return plain ^ (plain >> 7 & (row_bytes / 16 - 1)) << 4;
  }
};

TESSERA_HOST_DEVICE constexpr const char* decode_shared_matrix(uint64_t bits, SharedMatrix& matrix) {
  const auto field = [&](int first, int count) {
    return static_cast<uint32_t>(bits >> first & ((uint64_t{1} << count) - 1));
  };
  matrix.start = field(0, 14) << 4, matrix.leading = field(16, 14) << 4, matrix.stride = field(32, 14) << 4;
  if (field(14, 2) != 0 || field(30, 2) != 0 || field(53, 8) != 0) {
    return "a shared memory descriptor has reserved bits set (14-15, 30-31 or 53-60)";
  }
  if (field(46, 3) != 1) return "a shared memory descriptor lacks the constant 001 in bits 46-48";
  if (field(49, 3) != 0) return "a shared memory descriptor has a base offset (bits 49-51): begin at a whole pattern";
  if (field(52, 1) != 0) return "a shared memory descriptor has bit 52 set, which only K = 96 has";
  switch (field(61, 3)) {
    case 0:
      matrix.row_bytes = 16;
      return nullptr;
    case 2:
      matrix.row_bytes = 128;
      break;
    case 4:
      matrix.row_bytes = 64;
      break;
    case 6:
      matrix.row_bytes = 32;
      break;
    case 1:
      return "a shared memory descriptor asks for the swizzle with 32-byte atoms, which FP4 does not have";
    default:
      return "a shared memory descriptor has an invalid swizzle (3, 5 or 7)";
  }
  if (matrix.stride != matrix.row_bytes * 8) {
    return "a shared memory descriptor's stride is not 8 swizzled rows";
  }
  if (matrix.start % (matrix.row_bytes * 8) >= matrix.row_bytes) {
    return "a shared memory descriptor begins inside a group of 8 swizzled rows";
  }
  return nullptr;
}

struct Nvfp4Instruction {
  int m, n;
};

TESSERA_HOST_DEVICE constexpr const char* decode_nvfp4_instruction(uint32_t bits, int num_blocks,
                                                                   Nvfp4Instruction& instruction) {
  const auto field = [&](int first, int count) { return bits >> first & ((1u << count) - 1); };
  instruction.m = static_cast<int>(field(27, 2)) * 128, instruction.n = static_cast<int>(field(17, 6)) * 8;
  if (field(0, 2) != 0 || field(3, 1) != 0 || field(6, 1) != 0 || field(12, 1) != 0 || field(24, 3) != 0) {
    return "an instruction descriptor has reserved bits set (0-1, 3, 6, 12 or 24-26)";
  }
  if (field(2, 1) != 0) return "an instruction descriptor asks for sparsity";
  if (field(7, 3) != 1 || field(10, 2) != 1) return "an instruction descriptor's types are not E2M1 (1) by E2M1 (1)";
  if (field(13, 2) != 0) return "an instruction descriptor negates an operand (bits 13-14)";
  if (field(15, 2) != 0) return "an instruction descriptor transposes an operand (bits 15-16): FP4 is K-major";
  if (field(23, 1) != 0) return "an instruction descriptor says UE8M0 scales (bit 23)";
  if (field(4, 2) != 0 || field(29, 2) != 0) {
    return "an instruction descriptor selects a byte of the scales: with block16 and K = 64 all four are used, so 0";
  }
  if (field(31, 1) != 0) return "an instruction descriptor says K = 96 (bit 31)";
  if (instruction.m != 128 * num_blocks) return "an instruction descriptor's M is not 128 rows of each thread block";
  const int step = 8 * num_blocks;
  if (instruction.n < step || instruction.n > 256 || instruction.n % step != 0) {
    return "an instruction descriptor's N is not 8 to 256 in steps of 8 (two thread blocks: 16)";
  }
  return nullptr;
}

// Addresses in tensor memory: lane in bits 16 to 31, column in 0 to 15.
TESSERA_HOST_DEVICE constexpr int lane_of(uint32_t address) {
  return static_cast<int>(address >> 16);
}
TESSERA_HOST_DEVICE constexpr int column_of(uint32_t address) {
  return static_cast<int>(address & 0xFFFF);
}

}  // namespace tessera::backends::cuda_common::ptx::emulated
