// SPDX-License-Identifier: Apache-2.0
// Descriptors and index maps of tcgen05's operands: values that others have published, the tables of the PTX ISA
// written down once more, and that each map is one to one.
#include "backends/cuda_common/tcgen05_operands.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "backends/cuda_common/ptx/emulated/tcgen05_decode.h"
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

// The emulation's reading of each bit, by the ISA's tables: what is said where that bit alone is another; "": the
// descriptor is as good as before, of other operands.
struct Bits {
  int first, last;
  const char* said;
};
template <size_t kCount, class Decode>
void expect_said(const Bits (&ranges)[kCount], int num_bits, const Decode& decode) {
  int next = 0;
  for (const Bits& range : ranges) {
    ASSERT_EQ(range.first, next) << "each bit has a line";
    next = range.last + 1;
    for (int bit = range.first; bit <= range.last; ++bit) {
      const char* const fault = decode(bit);
      const std::string said = fault == nullptr ? "" : fault;
      EXPECT_NE(said.find(range.said), std::string::npos) << "bit " << bit << ": " << said;
      EXPECT_EQ(said.empty(), range.said[0] == 0) << "bit " << bit << ": " << said;
    }
  }
  EXPECT_EQ(next, num_bits);
}

TEST(Tcgen05Operands, EachBitOfASharedDescriptorCounts) {
  using namespace ptx::emulated;
  const uint64_t sound = codes_descriptor(8192);
  const Bits ranges[] = {{0, 2, ""},  // 16 bytes further along the row; groups of eight rows begin at 1,024
                         {3, 5, "begins inside a group"},
                         {6, 13, ""},
                         {14, 15, "reserved bits"},
                         {16, 29, ""},  // swizzled rows have no leading stride
                         {30, 31, "reserved bits"},
                         {32, 45, "stride is not 8 swizzled rows"},
                         {46, 48, "constant 001"},
                         {49, 51, "base offset"},
                         {52, 52, "bit 52"},
                         {53, 60, "reserved bits"},
                         {61, 61, "invalid swizzle"},                 // 3
                         {62, 62, ""},                                // 0: none
                         {63, 63, "stride is not 8 swizzled rows"}};  // 6: of 32 bytes
  expect_said(ranges, 64, [&](int bit) {
    SharedMatrix matrix{}, other{};
    EXPECT_EQ(decode_shared_matrix(sound, matrix), nullptr);
    const char* const fault = decode_shared_matrix(sound ^ uint64_t{1} << bit, other);
    EXPECT_TRUE(fault != nullptr || other.start != matrix.start || other.leading != matrix.leading ||
                other.row_bytes != matrix.row_bytes);
    return fault;
  });
  for (const uint64_t swizzle : {3, 5, 7}) {
    SharedMatrix matrix{};
    const char* const fault = decode_shared_matrix(shared_descriptor(0, 0, 1024, swizzle & 7), matrix);
    ASSERT_NE(fault, nullptr);
    EXPECT_NE(std::string(fault).find("invalid swizzle"), std::string::npos) << swizzle;
  }
}

TEST(Tcgen05Operands, EachBitOfAnInstructionDescriptorCounts) {
  using namespace ptx::emulated;
  const Bits ranges[] = {{0, 1, "reserved bits"},
                         {2, 2, "sparsity"},
                         {3, 3, "reserved bits"},
                         {4, 5, "selects a byte"},
                         {6, 6, "reserved bits"},
                         {7, 11, "types are not E2M1"},
                         {12, 12, "reserved bits"},
                         {13, 14, "negates"},
                         {15, 16, "transposes"},
                         {17, 20, ""},
                         {21, 21, "N is not 8 to 256"},  // 0
                         {22, 22, "N is not 8 to 256"},  // 384
                         {23, 23, "UE8M0"},
                         {24, 26, "reserved bits"},
                         {27, 28, "M is not 128"},
                         {29, 30, "selects a byte"},
                         {31, 31, "K = 96"}};
  expect_said(ranges, 32, [&](int bit) {
    Nvfp4Instruction sound{}, other{};
    EXPECT_EQ(decode_nvfp4_instruction(nvfp4_instruction(128, 128), 1, sound), nullptr);
    EXPECT_EQ(sound.n, 128);
    const char* const fault = decode_nvfp4_instruction(nvfp4_instruction(128, 128) ^ 1u << bit, 1, other);
    EXPECT_TRUE(fault != nullptr || other.n != sound.n);
    return fault;
  });
}

}  // namespace
}  // namespace tessera
