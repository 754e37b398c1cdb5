// SPDX-License-Identifier: Apache-2.0
#pragma once
// What unit_ring.cuh multiplies: a unit is a chunk of 512 columns of 16 rows, one packed unit of NVFP4 or two of FP8
// whose scales fold (cuda_common/packed_units.h), in one stage or, in a ring of NVFP4's, in two. A row's last chunk may
// have fewer blocks of 128 columns.
#include <cstdint>
#include <type_traits>

#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/weight_stream.cuh"
#include "backends/sm90/unit_stage.cuh"

namespace tessera::backends::sm90 {

constexpr int kChunkBlocks = cuda_common::kChunk / cuda_common::kShareBlock;

// Columns as chunks.
struct RingColumns {
  int num_chunks, last_blocks;

  explicit RingColumns(int64_t columns)
      : num_chunks(static_cast<int>(ceil_div<int64_t>(columns, cuda_common::kChunk))),
        last_blocks(static_cast<int>(
            ceil_div<int64_t>(columns - int64_t{num_chunks - 1} * cuda_common::kChunk, cuda_common::kShareBlock))) {}
  __device__ int blocks_of(int chunk) const { return chunk + 1 < num_chunks ? kChunkBlocks : last_blocks; }
};

// kPacked: packed units of a stage.
template <ops::WeightFormat kWeightFormat, int kPacked>
struct RingWeights {
  static constexpr ops::WeightFormat kFormat = kWeightFormat;
  static constexpr bool kIsNvfp4 = kFormat == ops::WeightFormat::kNvfp4;
  static_assert(kIsNvfp4 || kFormat == ops::WeightFormat::kFp8Block);
  using Layout = cuda_common::PackedUnit<kFormat>;
  using Stage = UnitStageOf<kFormat, kPacked>;
  using Share = std::conditional_t<kIsNvfp4, cuda_common::PackedShare<kFormat>, cuda_common::FoldedFp8Share>;
  static constexpr int kBlocks = kPacked * Layout::kBlocks;  // of a stage
  static constexpr int kStages = kChunkBlocks / kBlocks;     // of a chunk

  // Of the stage `part` of a chunk of so many blocks; 0: it has none.
  __device__ static int stage_bytes(int num_blocks, int part) {
    if constexpr (kIsNvfp4) return Layout::bytes_of(num_blocks);
    return min(kPacked, max(0, fp8_units(num_blocks) - part * kPacked)) * Layout::kBytes;
  }
  // Where those lie, of the 16 rows from weights.first_row on.
  __device__ static const char* stage_from(const cuda_common::TileWeights& weights, const RingColumns& columns,
                                           int chunk, int part) {
    constexpr int kStageBytes = kPacked * Layout::kBytes, kChunkBytes = kStages * kStageBytes;
    const int last = kIsNvfp4 ? Layout::bytes_of(columns.last_blocks) : fp8_units(columns.last_blocks) * Layout::kBytes;
    const int row_bytes = (columns.num_chunks - 1) * kChunkBytes + last;
    return static_cast<const char*>(weights.data) + weights.first_row / Layout::kRows * row_bytes +
           chunk * kChunkBytes + part * kStageBytes;
  }
  // FP8: the scales of all blocks of a chunk, as they are packed.
  __device__ static uint4 chunk_scales(const cuda_common::TileWeights& weights, const RingColumns& columns,
                                       int chunk) requires(!kIsNvfp4) {
    const auto* of_rows =
        static_cast<const uint4*>(weights.scales) + weights.first_row / numeric::kFp8WeightBlock * columns.num_chunks;
    return __ldg(of_rows + chunk);
  }
  // Of a stage's block.
  __device__ static Share share(const Stage& stage, int block, int lane) {
    constexpr int kHalf = Stage::kHalfPieces;
    Share share = {};
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      share.pieces[i] = stage.codes_of(block / Layout::kBlocks, i / kHalf, block % Layout::kBlocks, lane, i % kHalf);
    }
    return share;
  }
  __device__ static void prepare(Share& share, uint32_t scale) {
    if constexpr (kIsNvfp4) {
      share.prepare(scale);
    } else {
      share.prepare(__uint_as_float(scale));
    }
  }

 private:
  __device__ static int fp8_units(int num_blocks) {
    return (num_blocks + Layout::kBlocks - 1) / Layout::kBlocks;
  }
};

using RingNvfp4 = RingWeights<ops::WeightFormat::kNvfp4, 1>;
using RingFp8 = RingWeights<ops::WeightFormat::kFp8Block, 2>;
using RingFp8Halves = RingWeights<ops::WeightFormat::kFp8Block, 1>;  // beside NVFP4

}  // namespace tessera::backends::sm90
