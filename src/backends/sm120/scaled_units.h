// SPDX-License-Identifier: Apache-2.0
#pragma once
// NVFP4 operands in the order in which ptx/block_scaled_mma.cuh takes them: a lane finds its registers of a step (64
// columns), or of two, as 16 neighbouring bytes at its own place of 32, so that a warp reads whole lines and shared
// memory without conflicts. A unit is 256 columns, four steps, of some rows; with lane = 4 g + l
//   weights  16 rows: codes [4 steps][32 lanes] 16 bytes, the four words of A; then scales [2][32 lanes] 4 bytes, for
//            two steps each: the word of the first where l < 2, of row g where l is even, of row g + 8 where it is odd
//   inputs   8 rows (tokens): codes [2][32 lanes] 16 bytes, the two words of B of two steps; then scales [32 lanes] 4
//            bytes: the word of step l, of row g
// so the scales of step s come from lanes with kAThread = s % 2 and kBThread = s. Rows and columns that are not there
// are zero.
//   matrix of weights  [ceil(rows / 16)][ceil(columns / 256)] units
//   tile of inputs     [ceil(columns / 256)][ceil(rows / 8)] units: one stretch brings 256 columns
//   matrix of inputs   tiles one after another, all but the last of a multiple of 8 rows
#include <cstdint>

#include "base/host_device.h"
#include "base/integer_math.h"
#include "numeric/nvfp4.h"
#include "ops/packed_layout.h"

namespace tessera::backends::sm120 {

constexpr int kUnitColumns = 256, kStepColumns = 64, kSteps = kUnitColumns / kStepColumns, kUnitLanes = 32;
constexpr int kUnitBlocks = kUnitColumns / numeric::kNvfp4Block;
constexpr int kWordCodes = 8;  // of 32 bits

TESSERA_HOST_DEVICE constexpr int64_t units_of_row(int64_t columns) {
  return ceil_div<int64_t>(columns, kUnitColumns);
}

struct WeightUnit {
  static constexpr int kRows = 16;
  static constexpr int kCodeBytes = kRows * kUnitColumns / 2, kScaleBytes = kRows * kUnitBlocks;
  static constexpr int kBytes = kCodeBytes + kScaleBytes;

  // Where the word with the codes of columns [column, column + 8) of a row lies.
  TESSERA_HOST_DEVICE static constexpr int codes_at(int row, int column) {
    const int step = column / kStepColumns, half = column / 32 % 2, lane = row % 8 * 4 + column / kWordCodes % 4;
    return (step * kUnitLanes + lane) * 16 + (row / 8 + 2 * half) * 4;
  }
  // Where the scale of a block of 16 columns lies.
  TESSERA_HOST_DEVICE static constexpr int scale_at(int row, int block) {
    const int step = block / 4, lane = row % 8 * 4 + step % 2 * 2 + row / 8;
    return kCodeBytes + (step / 2 * kUnitLanes + lane) * 4 + block % 4;
  }
  // Where the unit of row tile `row / 16` that begins at `column` lies in a matrix.
  TESSERA_HOST_DEVICE static constexpr int64_t offset(int64_t row, int64_t column, int64_t columns) {
    return (row / kRows * units_of_row(columns) + column / kUnitColumns) * kBytes;
  }
};

struct InputUnit {
  static constexpr int kRows = 8;
  static constexpr int kCodeBytes = kRows * kUnitColumns / 2, kScaleBytes = kRows * kUnitBlocks;
  static constexpr int kBytes = kCodeBytes + kScaleBytes;

  TESSERA_HOST_DEVICE static constexpr int codes_at(int row, int column) {
    const int step = column / kStepColumns, half = column / 32 % 2, lane = row * 4 + column / kWordCodes % 4;
    return (step / 2 * kUnitLanes + lane) * 16 + step % 2 * 8 + half * 4;
  }
  TESSERA_HOST_DEVICE static constexpr int scale_at(int row, int block) {
    return kCodeBytes + (row * 4 + block / 4) * 4 + block % 4;
  }
  // Bytes of a matrix of so many rows, and where a tile begins that has so many before it.
  TESSERA_HOST_DEVICE static constexpr int64_t bytes(int64_t rows, int64_t columns) {
    return ceil_div<int64_t>(rows, kRows) * units_of_row(columns) * kBytes;
  }
};

// The weights' layout: the checkpoint's bytes in another order, and zeros.
extern const ops::PackedLayout kScaledUnits;

}  // namespace tessera::backends::sm120
