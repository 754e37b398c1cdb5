// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs of NVFP4 products (a4, docs/contracts/numerics.md, section 3) in the order in which they are multiplied: a
// tile is up to 128 tokens, a multiple of 8; of each 256 columns first the codes as SwizzledCodes, then the scales as
// four ScaleAtoms, of which the tile's rows are meant (cuda_common/tcgen05_operands.h). So one bulk copy brings 256
// columns.
#include <cstdint>

#include "backends/cuda_common/amax.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/sm100/packed_tiles.h"
#include "numeric/nvfp4.h"

namespace tessera::backends::sm100 {

struct InputTile {
  static constexpr int kGroup = cuda_common::SwizzledCodes::kGroupRows, kMostRows = cuda_common::ScaleAtom::kRows;
  static constexpr int kColumns = PackedTile::kColumns, kProducts = PackedTile::kProducts;
  static constexpr int kScaleBytes = kProducts * cuda_common::ScaleAtom::kBytes;

  TESSERA_HOST_DEVICE static constexpr int padded(int rows) { return (rows + kGroup - 1) / kGroup * kGroup; }
  // Of 256 columns of so many rows.
  TESSERA_HOST_DEVICE static constexpr int stage_bytes(int rows) {
    return cuda_common::SwizzledCodes::bytes(rows) + kScaleBytes;
  }
  // Of `tiles` tiles with `rows` rows in all, each a multiple of 8; where the tile behind so many begins.
  TESSERA_HOST_DEVICE static constexpr int64_t bytes(int64_t rows, int64_t tiles, int64_t width) {
    return ceil_div<int64_t>(width, kColumns) * (rows * cuda_common::SwizzledCodes::kRowBytes + tiles * kScaleBytes);
  }
};

// A row of a tile, where a block of 16 columns goes.
class InputRow {
 public:
  // `tile` of `rows` rows.
  __device__ InputRow(char* tile, int rows, int row) : tile_(tile), rows_(rows), row_(row) {}

  __device__ void store(int block, uint64_t codes, uint8_t scale) const {
    const int in_stage = block % PackedTile::kBlocks;
    char* stage = tile_ + static_cast<int64_t>(block / PackedTile::kBlocks) * InputTile::stage_bytes(rows_);
    *reinterpret_cast<uint64_t*>(stage + PackedTile::codes_at(row_, in_stage)) = codes;
    // Scales lie where a tile of 128 rows has them, but behind fewer rows.
    stage[PackedTile::scale_at(row_, in_stage) - PackedTile::kCodeBytes + cuda_common::SwizzledCodes::bytes(rows_)] =
        static_cast<char>(scale);
  }

 private:
  char* tile_;
  int rows_, row_;
};

constexpr int kQuantizeThreads = 128;

// Quantises `width` values of x from x[begin] on (a multiple of 16) into a row, by a block of kQuantizeThreads threads;
// columns up to a multiple of 256 are zero, and so is the whole row where `is_there` is false. The row's factor.
__device__ inline float quantize_into(const InputRow& to, const cuda_common::Values& x, int64_t begin, int64_t width,
                                      bool is_there) {
  using numeric::kNvfp4Block;
  float g = 1;
  if (is_there) g = numeric::nvfp4_activation_scale(cuda_common::block_amax<kQuantizeThreads>(x, begin, width));
  const int num_blocks = static_cast<int>(round_up<int64_t>(width, InputTile::kColumns)) / kNvfp4Block;
  for (int block = static_cast<int>(threadIdx.x); block < num_blocks; block += kQuantizeThreads) {
    float values[kNvfp4Block] = {};
    alignas(8) uint8_t codes[kNvfp4Block / 2] = {};
    uint8_t scale = 0;
    if (is_there && block * kNvfp4Block < width) {
#pragma unroll
      for (int i = 0; i < kNvfp4Block; ++i) values[i] = x[begin + block * kNvfp4Block + i];
      numeric::nvfp4_quantize_row(values, kNvfp4Block, g, codes, &scale);
    }
    to.store(block, *reinterpret_cast<const uint64_t*>(codes), scale);
  }
  return g;
}

}  // namespace tessera::backends::sm100
