// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps on tensor cores. Weights are the A operand, so that 8 tokens fill a product. K is cut into chunks
// of 512 (docs/contracts/numerics.md, section 4): a chunk is two chains of products from zero, one of the even and one
// of the odd steps (weight_shares.cuh), added at its end (where FP8 blocks have a scale that does not fold, at the end
// of each 128 columns, times that), and chunk sums add in ascending order. The warps of a thread block take chunks by
// turns; neither their number nor the tile of tokens changes a sum.
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/packed_shares.cuh"
#include "backends/cuda_common/stream_plan.h"
#include "backends/cuda_common/weight_shares.cuh"
#include "base/integer_math.h"

namespace tessera::backends::cuda_common {

constexpr int kWarp = 32, kTileRows = 16, kTileTokens = 8, kChunk = 512;
constexpr int kTileSums = kTileRows * kTileTokens;

// 16 rows of a matrix in the checkpoint's layout: this lane's two. Loaded a unit at a time.
template <ops::WeightFormat kFormat>
struct CheckpointRows {
  using Share = WeightShare<kFormat>;
  static constexpr int kUnitBlocks = Share::kInFlight;
  static constexpr bool kEndsAtWidth = false;  // units behind it are zeros
  struct Unit {
    Share blocks[kUnitBlocks];
    __device__ void prepare() {
#pragma unroll
      for (Share& share : blocks) share.prepare();
    }
  };
  const void *data, *scales;
  int64_t width;  // columns
  int64_t rows[2];

  // This lane's shares from `column` on, a multiple of a unit's columns.
  template <bool kIsWide>
  __device__ void load(Unit& unit, int64_t column) const {
    const int64_t first = column + threadIdx.x % 4 * kShareColumns;
#pragma unroll
    for (int n = 0; n < kUnitBlocks; ++n) {
      unit.blocks[n].template load<kIsWide>(data, scales, width, rows, first + n * kShareBlock);
    }
  }
};

// The same packed (packed_units.h).
template <ops::WeightFormat kFormat>
struct PackedRows {
  using Share = PackedShare<kFormat>;
  using Layout = PackedUnit<kFormat>;
  static constexpr int kUnitBlocks = Layout::kBlocks;
  static constexpr bool kEndsAtWidth = Layout::kColumns < kChunk;  // units behind it are other rows'
  static constexpr bool kIsFp8 = kFormat == ops::WeightFormat::kFp8Block;
  struct Unit {
    Share blocks[kUnitBlocks];
    uint4 scale_codes;  // NVFP4
    float2 scales;      // FP8
    __device__ void prepare() {
      if constexpr (Layout::kIsNvfp4) {
        blocks[0].prepare(scale_codes.x), blocks[1].prepare(scale_codes.y);
        blocks[2].prepare(scale_codes.z), blocks[3].prepare(scale_codes.w);
      } else if constexpr (kIsFp8) {
        blocks[0].prepare(scales.x), blocks[1].prepare(scales.y);
      }
    }
  };
  const char* units;          // the first of these rows
  const float* block_scales;  // FP8: theirs
  int64_t width;

  // Row `first_row` (a multiple of 16) of a matrix and those behind it.
  __device__ PackedRows(const void* data, const void* scales, int64_t first_row, int64_t cols)
      : units(static_cast<const char*>(data) + Layout::offset(first_row, 0, cols)),
        block_scales(static_cast<const float*>(scales) + (kIsFp8 ? packed_scale_at(first_row, 0, cols) : 0)),
        width(cols) {}

  template <bool kIsWide>
  __device__ void load(Unit& unit, int64_t column) const {
    const uint4* pieces = reinterpret_cast<const uint4*>(units + Layout::offset(0, column, width)) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Layout::kPieces; ++i) {
      unit.blocks[i / Layout::kBlockPieces].pieces[i % Layout::kBlockPieces] =
          __ldcs(pieces + Layout::kScalePieces + i * Layout::kLanes);
    }
    if constexpr (Layout::kIsNvfp4) unit.scale_codes = __ldcs(pieces);
    if constexpr (kIsFp8) unit.scales = __ldg(reinterpret_cast<const float2*>(block_scales + column / kShareBlock));
  }
};

// Threads of a block that sums over `width` columns.
inline unsigned threads_for(int64_t width) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div<int64_t>(width, kChunk), 1, kMaxWarps)) * kWarp;
}

// Of the tile's rows and tokens, those of s_sums[at].
__device__ inline int row_of_sum(int at) {
  return at % kWarp / 4 + at / kWarp % 4 / 2 * 8;
}
__device__ inline int token_of_sum(int at) {
  return at / kWarp / 4 * kTileTokens + at % 4 * 2 + at / kWarp % 2;
}

// What a lane multiplies weights with: a token per tile.
template <int kTiles>
struct Operands {
  const uint16_t* x[kTiles];  // null: no such token
};

// A token's 32 columns of a block from `k` on.
__device__ inline uint4 input_share(const uint16_t* x, int64_t width, int64_t k, int i) {
  if (x == nullptr || k + 8 * i >= width) return {0, 0, 0, 0};
  return __ldg(reinterpret_cast<const uint4*>(x + k) + i);
}

// sums += the products of 8 columns of a lane (a step of weight_shares.cuh), decoded weights and inputs.
template <class Share>
__device__ void add_step(const uint32_t (&w)[2][4], uint4 x, float (&sums)[4]) {
  if constexpr (Share::kIsSplit) x = split_pairs(x);
  ptx::mma_bf16(sums, w[0][0], w[1][0], w[0][1], w[1][1], x.x, x.y);
  ptx::mma_bf16(sums, w[0][2], w[1][2], w[0][3], w[1][3], x.z, x.w);
}

// Two sums side by side: of the even and of the odd steps. Neither waits for the other's products.
using Chains = float[2][4];
// A word for which all products of both are waited for, and all that they were made of (SharedBarrier::arrive_behind).
__device__ inline uint32_t word_of(const Chains& chains) {
  return __float_as_uint(chains[0][0]) | __float_as_uint(chains[1][0]);
}
__device__ inline void add_chains(const Chains& chains, float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = chains[0][i] + chains[1][i];
}

// The same of the two sums of 128 columns, times their scale.
template <class Share>
__device__ void add_scaled(const Share& share, const Chains& parts, float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] += (parts[0][i] + parts[1][i]) * share.scale(i / 2);
}

// Behind a block of FP8. Chains go on over blocks whose scale folds; else they end here, scaled.
template <class Share>
__device__ void end_block(const Share& share, Chains& chains, float (&sums)[4]) {
  if (share.folds) return;
  add_scaled(share, chains, sums);
#pragma unroll
  for (int i = 0; i < 8; ++i) chains[i / 4][i % 4] = 0;
}

// Rows g and g + 8 of a chunk whose weights have a NaN (packed_shares.cuh) become NaN, for all tokens. All of the warp.
template <class Share, int kTiles>
__device__ void add_nans(const uint32_t (&carries)[2], float (&sums)[kTiles][4]) {
  const bool is_nan[2] = {Share::has_nan(carries[0], 0), Share::has_nan(carries[1], 1)};
  if (__any_sync(~0u, is_nan[0] || is_nan[1]) == 0) return;
  constexpr uint32_t kNan = 0x7FC0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    ptx::mma_bf16(sums[tile], is_nan[0] ? kNan : 0, is_nan[1] ? kNan : 0, 0, 0, 0, 0);
  }
}

// chains += the products of 128 columns with one token tile's inputs.
template <class Share>
__device__ void add_block(Share& share, const uint4 (&inputs)[kShareColumns / 8], Chains& chains) {
#pragma unroll
  for (int i = 0; i < kShareColumns / 8; ++i) {
    uint32_t w[2][4];
    share.decode(0, i, w[0]);
    share.decode(1, i, w[1]);
    add_step<Share>(w, inputs[i], chains[i % 2]);
  }
}

// The same for several tiles, whose inputs are loaded as they are needed; k is the lane's own first column.
template <class Share, int kTiles>
__device__ void add_block(Share& share, const Operands<kTiles>& operands, int64_t width, int64_t k,
                          Chains (&chains)[kTiles]) {
#pragma unroll
  for (int i = 0; i < kShareColumns / 8; ++i) {
    uint32_t w[2][4];
    share.decode(0, i, w[0]);
    share.decode(1, i, w[1]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      add_step<Share>(w, input_share(operands.x[tile], width, k, i), chains[tile][i % 2]);
    }
  }
}

// sums = the chunk's, from column `begin` on.
template <class Rows, bool kIsWide, int kTiles>
__device__ void sum_chunk(const Rows& weight, const Operands<kTiles>& operands, int64_t begin,
                          float (&sums)[kTiles][4]) {
  using Share = typename Rows::Share;
  constexpr int kBlocks = kChunk / kShareBlock, kUnitBlocks = Rows::kUnitBlocks;
  Chains chains[kTiles] = {};
  bool folds = !Share::kScaledSum;  // whether they are the sums
  uint32_t carries[2] = {};         // of packed FP8 and NVFP4
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] = 0;
#pragma unroll
  for (int at = 0; at < kBlocks; at += kUnitBlocks) {
    if (Rows::kEndsAtWidth && begin + at * kShareBlock >= weight.width) break;
    typename Rows::Unit unit;
    weight.template load<kIsWide>(unit, begin + at * kShareBlock);
    unit.prepare();
#pragma unroll
    for (int n = 0; n < kUnitBlocks; ++n) {
      Share& share = unit.blocks[n];
      const int64_t k = begin + (at + n) * kShareBlock + threadIdx.x % 4 * kShareColumns;
      add_block(share, operands, weight.width, k, chains);
      if constexpr (Share::kScaledSum) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) end_block(share, chains[tile], sums[tile]);
        folds = share.folds;
      }
      if constexpr (Share::kFindsNan) carries[0] |= share.carries[0], carries[1] |= share.carries[1];
    }
  }
  if (folds) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) add_chains(chains[tile], sums[tile]);
  }
  if constexpr (Share::kFindsNan) add_nans<Share>(carries, sums);
}

// s_sums = x W for 16 rows by 8 * kTiles tokens, complete for the whole thread block: chunk sums in ascending order, a
// warp per chunk at a time. s_parts is scratch. Lane l's sums[tile][i] is s_sums[(4 * tile + i) * 32 + l].
template <class Rows, int kTiles>
__device__ void sum_tile(const Rows& weight, const Operands<kTiles>& operands,
                         float (&s_parts)[kMaxWarps][kTiles * kTileSums], float (&s_sums)[kTiles * kTileSums]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  const int num_chunks = static_cast<int>((weight.width + kChunk - 1) / kChunk);
  for (int begin = 0; begin < num_chunks; begin += num_warps) {
    if (begin + warp < num_chunks) {
      float sums[kTiles][4];
      const int64_t first = static_cast<int64_t>(begin + warp) * kChunk;
      if (weight.width % kShareColumns == 0) {
        sum_chunk<Rows, true>(weight, operands, first, sums);
      } else {
        sum_chunk<Rows, false>(weight, operands, first, sums);
      }
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) s_parts[warp][i * kWarp + lane] = sums[i / 4][i % 4];
    }
    __syncthreads();
    const int count = min(num_warps, num_chunks - begin);
    for (int at = static_cast<int>(threadIdx.x); at < kTiles * kTileSums; at += static_cast<int>(blockDim.x)) {
      float sum = begin == 0 ? 0.0f : s_sums[at];
      for (int part = 0; part < count; ++part) sum += s_parts[part][at];
      s_sums[at] = sum;
    }
    __syncthreads();
  }
}

}  // namespace tessera::backends::cuda_common
