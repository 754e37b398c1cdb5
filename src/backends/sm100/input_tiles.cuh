// SPDX-License-Identifier: Apache-2.0
#pragma once
// Inputs of NVFP4 products (a4, docs/contracts/numerics.md, section 3): quantised into tiles (input_tile.h).
#include <cstdint>

#include "backends/cuda_common/amax.cuh"
#include "backends/cuda_common/quantized_block.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/sm100/input_tile.h"
#include "numeric/nvfp4.h"

namespace tessera::backends::sm100 {

// A row of a tile, where a block of 16 columns goes.
class InputRow {
 public:
  // `tile` of `rows` rows.
  __device__ InputRow(char* tile, int rows, int row) : tile_(tile), rows_(rows), row_(row) {}

  __device__ void store(int block, uint64_t codes, uint8_t scale) const {
    *reinterpret_cast<uint64_t*>(tile_ + InputTile::codes_at(rows_, row_, block)) = codes;
    tile_[InputTile::scale_at(rows_, row_, block)] = static_cast<char>(scale);
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
    cuda_common::QuantizedBlock found;
    if (is_there && block * kNvfp4Block < width) {
#pragma unroll
      for (int i = 0; i < kNvfp4Block; ++i) values[i] = x[begin + block * kNvfp4Block + i];
      found = cuda_common::quantize_block(values, numeric::abs_max(values, kNvfp4Block), g);
    }
    to.store(block, found.codes, found.scale);
  }
  return g;
}

// Numbers of kCount tokens from a multiple of 8 on.
template <int kCount>
__device__ void load_numbers(float (&to)[kCount], const float* from) {
#pragma unroll
  for (int j = 0; j < kCount; j += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + j);
    to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
  }
}

}  // namespace tessera::backends::sm100
