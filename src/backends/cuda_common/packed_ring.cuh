// SPDX-License-Identifier: Apache-2.0
#pragma once
// A warp's ring of packed weights (weight_stream.cuh, packed_units.h): a stage is a unit, and of FP8 its scales, and a
// lane copies the bytes that it multiplies itself, so that no lane waits for another.
#include <cstdint>

#include "backends/cuda_common/weight_stream.cuh"

namespace tessera::backends::cuda_common {

// Stages that any GPU's shared memory holds.
constexpr int kPackedStages = 2;

template <ops::WeightFormat kFormat, int kStages, class Tiles>
class PackedRing {
 public:
  using Layout = PackedUnit<kFormat>;
  using Share = PackedShare<kFormat>;
  static constexpr bool kIsFp8 = kFormat == ops::WeightFormat::kFp8Block;
  // FP8: each lane has the scales of its unit's two blocks, the same for all.
  static constexpr int kLaneScaleBytes = kIsFp8 ? 8 : 0;
  static constexpr int kBytes = Layout::kBytes + Layout::kLanes * kLaneScaleBytes;
  static_assert(Layout::kRows == kTileRows && kChunk % Layout::kColumns == 0);

  // Begins to copy the first stages.
  __device__ PackedRing(const StreamShape& shape, int num_tiles, const Tiles& tiles, char* s_stages,
                        StreamBlocks blocks = StreamBlocks::of_launch())
      : width_(shape.width), lane_(static_cast<int>(threadIdx.x) % kWarp), next_(shape, num_tiles, tiles, blocks) {
    s_ring_ = s_stages + static_cast<int>(threadIdx.x) / kWarp * (kStages * kBytes) + lane_ * Layout::kPieceBytes;
    find_units();
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy_next();
  }

  __device__ void sum_chunk(int chunk, const uint4* x, float (&sums)[4]) {
    x += chunk * (kChunk / 8);
    const int num_blocks = min(kChunk, width_ - chunk * kChunk) / kShareBlock;
    Chains chains = {};
    bool folds = !Share::kScaledSum;  // whether they are the sums
    uint32_t carries[2] = {};
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (int first = 0; first < kChunk / kShareBlock; first += Layout::kBlocks) {
      if (first >= num_blocks) break;
      sum_unit(x + first * kBlockWords, num_blocks - first, chains, folds, carries, sums);
    }
    if (folds) add_chains(chains, sums);
    if constexpr (Share::kFindsNan) add_nans<Share>(carries, reinterpret_cast<float(&)[1][4]>(sums));
  }

 private:
  // Blocks whose inputs are loaded before the first is used.
  static constexpr int kAtOnce = Layout::kBlocks < 2 ? 1 : 2;
  static constexpr int kBlockWords = kShareBlock / 8, kWords = kShareColumns / 8;

  // The next stage, `num_blocks` of whose blocks are there.
  __device__ void sum_unit(const uint4* x, int num_blocks, Chains& chains, bool& folds, uint32_t (&carries)[2],
                           float (&sums)[4]) {
    // Where a unit is used at once, its inputs are on their way while it is waited for, and its place is filled anew
    // while it is multiplied.
    constexpr bool kIsUsedAtOnce = Layout::kBlocks == kAtOnce;
    uint4 inputs[kAtOnce][kWords];
    const auto load_inputs = [&](int n, int block) {
      // Columns that aren't there have no inputs and count for nothing: the first block's again.
      const uint4* at = x + (block < num_blocks ? block * kBlockWords : 0);
#pragma unroll
      for (int i = 0; i < kWords; ++i) inputs[n][i] = ptx::load_here(at + i);
    };
    if constexpr (kIsUsedAtOnce) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) load_inputs(n, n);
    }
    ptx::wait_for_copies<kStages - 1>();
    const char* stage = s_ring_ + read_;
    const uint4* pieces = reinterpret_cast<const uint4*>(stage);
    read_ = after(read_);
    uint4 codes = {};
    if constexpr (Layout::kIsNvfp4) codes = pieces[0];
#pragma unroll
    for (int first = 0; first < Layout::kBlocks; first += kAtOnce) {
      if (first > 0 && first >= num_blocks) break;
      Share shares[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int block = first + n;
#pragma unroll
        for (int i = 0; i < Layout::kBlockPieces; ++i) {
          shares[n].pieces[i] = pieces[Layout::kScalePieces + (block * Layout::kBlockPieces + i) * Layout::kLanes];
        }
        if constexpr (!kIsUsedAtOnce) load_inputs(n, block);
        if constexpr (Layout::kIsNvfp4) {
          shares[n].prepare(block == 0 ? codes.x : block == 1 ? codes.y : block == 2 ? codes.z : codes.w);
        } else if constexpr (kIsFp8) {
          shares[n].prepare(reinterpret_cast<const float*>(stage + scales_at())[n]);
        }
      }
      if constexpr (kIsUsedAtOnce) copy_next();
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (n > 0 && first + n >= num_blocks) break;
        Share& share = shares[n];
        add_block(share, inputs[n], chains);
        if constexpr (Share::kScaledSum) {
          end_block(share, chains, sums);
          folds = share.folds;
        }
        if constexpr (Share::kFindsNan) carries[0] |= share.carries[0], carries[1] |= share.carries[1];
      }
    }
    if constexpr (!kIsUsedAtOnce) copy_next();
  }

  // In a stage, from this lane's first piece on.
  __device__ int scales_at() const {
    return Layout::kBytes - lane_ * (Layout::kPieceBytes - kLaneScaleBytes);
  }
  __device__ static int after(int stage) {
    return stage + kBytes == kStages * kBytes ? 0 : stage + kBytes;
  }

  __device__ void copy_next() {
    if (!next_.is_done()) {
      char* stage = s_ring_ + write_;
      const char* unit = units_ + static_cast<int64_t>(next_.column() / Layout::kColumns) * Layout::kBytes;
      constexpr int kBetween = Layout::kLanes * Layout::kPieceBytes;
#pragma unroll
      for (int i = 0; i < Layout::kBytes / kBetween; ++i) {
        // Of a short unit what is there; what else lies in the stage is not multiplied.
        if (Layout::kIsNvfp4 && next_.column() + (i - 1) / Layout::kBlockPieces * kShareBlock >= width_) break;
        ptx::copy_async<Layout::kPieceBytes>(stage + i * kBetween, unit + i * kBetween);
      }
      if constexpr (kIsFp8) {
        ptx::copy_async<kLaneScaleBytes>(stage + scales_at(), scales_ + next_.column() / kShareBlock);
      }
      write_ = after(write_);
      if (next_.advance()) find_units();
    }
    ptx::commit_copies();  // an empty group keeps the count
  }

  __device__ void find_units() {
    const TileWeights& weights = next_.weights();
    units_ = static_cast<const char*>(weights.data) + Layout::offset(weights.first_row, 0, width_) +
             lane_ * Layout::kPieceBytes;
    if constexpr (kIsFp8) {
      scales_ = static_cast<const float*>(weights.scales) + packed_scale_at(weights.first_row, 0, width_);
    }
  }

  const int width_, lane_;
  StreamWalk<Layout::kColumns, Tiles> next_;
  char* s_ring_;              // this lane's first piece
  int read_ = 0, write_ = 0;  // in bytes
  const char* units_;         // of the next tile and pass, this lane's first piece
  const float* scales_;       // FP8: likewise
};

}  // namespace tessera::backends::cuda_common
