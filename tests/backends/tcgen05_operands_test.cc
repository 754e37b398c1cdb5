// SPDX-License-Identifier: Apache-2.0
// Descriptors and index maps of tcgen05's operands: values that others have published, the tables of the PTX ISA
// written down once more, and that each map is one to one.
#include "backends/cuda_common/tcgen05_operands.h"

#include <gtest/gtest.h>

#include <set>

#include "tensor/scale_layout.h"

namespace tessera {
namespace {

using namespace backends::cuda_common;

TEST(Tcgen05Operands, DescriptorsHaveThePublishedValues) {
  // Instruction descriptors that CUTLASS makes.
  EXPECT_EQ(nvfp4_instruction(128, 256), 0x08400480u);
  EXPECT_EQ(nvfp4_instruction(256, 256), 0x10400480u);
  EXPECT_EQ(nvfp4_instruction(128, 8), 0x08020480u);
  for (uint32_t address = 0; address < 1 << 18; address += 1024) {
    EXPECT_EQ(codes_descriptor(address), 0x4000404000000000u | address >> 4);
    EXPECT_EQ(scales_descriptor(address + 512), 0x0000400800010000u | (address + 512) >> 4);
  }
  EXPECT_EQ(advance_descriptor(codes_descriptor(4096), 3 * Nvfp4Product::kBytes), codes_descriptor(4096) + 6);
}

TEST(Tcgen05Operands, SwizzledCodesAreTheTableAndOneToOne) {
  constexpr int kRows = 256;
  std::set<int> seen;
  for (int row = 0; row < kRows; ++row) {
    for (int byte = 0; byte < 128; ++byte) {
      const int chunk = byte / 16;
      EXPECT_EQ(SwizzledCodes::offset(row, byte),
                (row / 8) * 1024 + (row % 8) * 128 + ((chunk ^ (row % 8)) * 16) + byte % 16);
      EXPECT_TRUE(seen.insert(SwizzledCodes::offset(row, byte)).second);
    }
  }
  EXPECT_EQ(*seen.rbegin() + 1, SwizzledCodes::bytes(kRows));
  EXPECT_EQ(SwizzledCodes::bytes(1), 1024);
}

TEST(Tcgen05Operands, ScaleAtomsAreThe128By4LayoutAndOneToOne) {
  constexpr int kRows = 384, kScales = 20;  // of a matrix: three by five atoms
  for (int row = 0; row < kRows; ++row) {
    for (int scale = 0; scale < kScales; ++scale) {
      const int atom = row / 128 * (kScales / 4) + scale / 4;
      EXPECT_EQ(atom * ScaleAtom::kBytes + ScaleAtom::offset(row, scale % 4), sf128x4_offset(row, scale, kScales));
    }
  }
  std::set<int> seen;
  for (int row = 0; row < 128; ++row) {
    for (int scale = 0; scale < 4; ++scale) EXPECT_TRUE(seen.insert(ScaleAtom::offset(row, scale)).second);
    // What tcgen05.cp makes of it: lane r has bytes [16 r, 16 r + 16), four to a column.
    EXPECT_EQ(ScaleAtom::offset(row, 0), ScaleAtom::lane(row) * 16 + ScaleAtom::column(row) * 4);
  }
  EXPECT_EQ(*seen.rbegin() + 1, ScaleAtom::kBytes);
}

}  // namespace
}  // namespace tessera
