// SPDX-License-Identifier: Apache-2.0
#pragma once
// What unit_ring.cuh multiplies: a unit is a chunk of 512 columns of 16 rows, one of packed NVFP4 or two of packed FP8
// whose scales fold (cuda_common/packed_units.h), which lie behind each other, so that one bulk copy brings them.
#include <cstdint>
#include <type_traits>

#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/weight_stream.cuh"
#include "backends/sm90/unit_stage.cuh"

namespace tessera::backends::sm90 {

template <ops::WeightFormat kWeightFormat>
struct RingWeights {
  static constexpr ops::WeightFormat kFormat = kWeightFormat;
  static constexpr bool kIsNvfp4 = kFormat == ops::WeightFormat::kNvfp4;
  static_assert(kIsNvfp4 || kFormat == ops::WeightFormat::kFp8Block);
  using Layout = cuda_common::PackedUnit<kFormat>;
  using Stage = UnitStageOf<kFormat, cuda_common::kChunk / Layout::kColumns>;
  using Share = std::conditional_t<kIsNvfp4, cuda_common::PackedShare<kFormat>, cuda_common::FoldedFp8Share>;
  static constexpr int kBytes = sizeof(Stage), kBlocks = cuda_common::kChunk / cuda_common::kShareBlock;

  // Chunk `chunk` of `num_chunks` of the rows from weights.first_row on.
  __device__ static const char* chunk(const cuda_common::TileWeights& weights, int num_chunks, int chunk) {
    return static_cast<const char*>(weights.data) + weights.first_row / Layout::kRows * num_chunks * kBytes +
           int64_t{chunk} * kBytes;
  }
  // The scales of all its blocks: NVFP4's codes, from the stage; FP8's as they are packed, from the matrix.
  __device__ static uint4 scales(const Stage& stage, int lane) requires(kIsNvfp4) {
    return stage.all_scales_of(0, lane);
  }
  __device__ static uint4 scales(const cuda_common::TileWeights& weights, int num_chunks,
                                 int chunk) requires(!kIsNvfp4) {
    const auto* of_rows = static_cast<const uint4*>(weights.scales) +
                          weights.first_row / numeric::kFp8WeightBlock * num_chunks;  // four to a chunk
    return __ldg(of_rows + chunk);
  }
  // Of block first + n; `first`: a multiple of two.
  __device__ static Share share(const Stage& stage, int first, int n, int lane) {
    constexpr int kHalf = Stage::kHalfPieces;
    Share share = {};
    const int slot = kIsNvfp4 ? 0 : first / Layout::kBlocks, block = kIsNvfp4 ? first + n : n;
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) share.pieces[i] = stage.codes_of(slot, i / kHalf, block, lane, i % kHalf);
    return share;
  }
  __device__ static void prepare(Share& share, uint32_t scale) {
    if constexpr (kIsNvfp4) {
      share.prepare(scale);
    } else {
      share.prepare(__uint_as_float(scale));
    }
  }
};

}  // namespace tessera::backends::sm90
