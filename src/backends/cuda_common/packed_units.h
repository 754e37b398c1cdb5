// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights in the order in which kernels multiply them. A unit is 16 rows by 512 columns of NVFP4, 256 of FP8 or 128 of
// BF16, 4 KiB of codes, as mma.sync m16n8k16's A operand takes them: lane (g, t) has columns [32 t, 32 t + 32) of rows
// g and g + 8 of each 128, and finds what it needs as eight pieces of 16 bytes, each at its own place of 32 neighbours.
// So a warp reads whole lines, no lane needs another's bytes, and a unit is one range of memory.
//   unit    NVFP4: [32] pieces of scales: of each 128 columns rows g and g + 8, two blocks of 16 each
//           [8][32] pieces: of each 128 columns those of row g, then of row g + 8, in ascending columns. The bits of
//           each 8 bytes are permuted so that few instructions make BF16 of them: packed_nvfp4.h, packed_fp8.h; BF16's
//           are in place
//   matrix  [ceil(rows / 16)][ceil(cols / columns of a unit)] units; rows and columns that aren't there are zero. Of
//           NVFP4 a row's last unit ends with the last 128 columns that are there, but the matrix's last is whole: who
//           reads another as a whole one has the next one's bytes for codes, of which the scales are zero
//   scales  FP8: as in the checkpoint, one FP32 per 128 x 128 block, but rows of them padded with zeros to a multiple
//           of 4, so that those of a unit or a chunk of 512 columns are one aligned load. Where they fold
//           (ops::WeightView::scales_fold) all of them, padding too, are factors of codes: folded_scale()
#include <cstdint>

#include "base/host_device.h"
#include "base/integer_math.h"
#include "numeric/fp8_block.h"
#include "ops/packed_layout.h"

namespace tessera::backends::cuda_common {

template <ops::WeightFormat kFormat>
struct PackedUnit {
  static_assert(kFormat != ops::WeightFormat::kF32);
  static constexpr bool kIsNvfp4 = kFormat == ops::WeightFormat::kNvfp4;
  static constexpr int kCodeBits = kIsNvfp4 ? 4 : kFormat == ops::WeightFormat::kFp8Block ? 8 : 16;
  static constexpr int kRows = 16, kLanes = 32, kPieces = 8, kPieceBytes = 16;
  static constexpr int kColumns = kPieces * kLanes * kPieceBytes * 8 / kCodeBits / kRows;
  static constexpr int kBlocks = kColumns / 128, kBlockPieces = kPieces / kBlocks;  // blocks of 128 columns
  static constexpr int kScalePieces = kIsNvfp4 ? kLanes : 0;                        // before those of codes
  static constexpr int kScaleBytes = kScalePieces * kPieceBytes, kBlockBytes = kBlockPieces * kLanes * kPieceBytes;
  TESSERA_HOST_DEVICE static constexpr int bytes_of(int blocks) { return kScaleBytes + blocks * kBlockBytes; }
  static constexpr int kBytes = kScaleBytes + kBlocks * kBlockBytes;

  TESSERA_HOST_DEVICE static constexpr int64_t units_of_row(int64_t cols) { return ceil_div<int64_t>(cols, kColumns); }
  TESSERA_HOST_DEVICE static constexpr int last_unit_blocks(int64_t cols) {
    const int rest = static_cast<int>(cols % kColumns);
    return !kIsNvfp4 || rest == 0 ? kBlocks : ceil_div(rest, 128);
  }
  // Of 16 rows.
  TESSERA_HOST_DEVICE static constexpr int64_t row_bytes(int64_t cols) {
    return (units_of_row(cols) - 1) * kBytes + bytes_of(last_unit_blocks(cols));
  }
  // Where the unit with this row and column begins.
  TESSERA_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t column, int64_t cols) {
    return row / kRows * row_bytes(cols) + column / kColumns * kBytes;
  }
};

using PackedNvfp4 = PackedUnit<ops::WeightFormat::kNvfp4>;

// FP8: scales of a row of blocks, and the place of the one of this row and column.
TESSERA_HOST_DEVICE constexpr int64_t packed_scales_of_row(int64_t cols) {
  return round_up<int64_t>(ceil_div<int64_t>(cols, numeric::kFp8WeightBlock), 4);
}
TESSERA_HOST_DEVICE constexpr int64_t packed_scale_at(int64_t row, int64_t column, int64_t cols) {
  return row / numeric::kFp8WeightBlock * packed_scales_of_row(cols) + column / numeric::kFp8WeightBlock;
}

// A scale that folds (numeric::fp8_scale_folds: the caller has made sure), as kernels read it: its product with 2^120
// as BF16, which makes a code's value of the code's bits in a BF16 (e4m3_pairs.cuh), in the lower half of a NaN that is
// nobody's scale.
constexpr uint32_t kFoldedScale = 0xFFD50000;
TESSERA_HOST_DEVICE constexpr uint32_t folded_scale(uint32_t bits) {
  return kFoldedScale | (bits == 0 ? 0 : ((bits >> 23) + 120) << 7);
}
TESSERA_HOST_DEVICE constexpr bool is_folded_scale(uint32_t bits) {
  return (bits & 0xFFFF0000) == kFoldedScale;
}
TESSERA_HOST_DEVICE constexpr uint32_t unfolded_scale(uint32_t folded) {
  const uint32_t factor = folded & 0xFFFF;
  return factor == 0 ? 0 : ((factor >> 7) - 120) << 23;
}

// The bytes are permuted bits of the checkpoint's, but for scales that fold. Columns in multiples of 16; not for kF32.
const ops::PackedLayout* packed_units(ops::WeightFormat format);
// Of an op whose weights have several formats: each weight's own.
const ops::PackedLayout* packed_units_of_each();

}  // namespace tessera::backends::cuda_common
