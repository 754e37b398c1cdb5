// SPDX-License-Identifier: Apache-2.0
#pragma once
// A warp's ring of packed NVFP4 weights (weight_stream.cuh, packed_nvfp4.h): a stage is a unit, a chunk, and a lane
// copies the bytes that it multiplies itself, so that no lane waits for another.
#include <cstdint>

#include "backends/cuda_common/weight_stream.cuh"

namespace tessera::backends::cuda_common {

template <int kStages, class Tiles>
class PackedRing {
 public:
  using Layout = PackedNvfp4;
  static constexpr int kBytes = Layout::kBytes;
  static_assert(Layout::kRows == kTileRows && Layout::kColumns == kChunk);

  // Begins to copy the first stages.
  __device__ PackedRing(const StreamShape& shape, int num_tiles, const Tiles& tiles, char* s_stages)
      : width_(shape.width), lane_(static_cast<int>(threadIdx.x) % kWarp), next_(shape, num_tiles, tiles) {
    s_ring_ = s_stages + static_cast<int>(threadIdx.x) / kWarp * (kStages * kBytes) + lane_ * Layout::kPieceBytes;
    find_units();
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy_next();
  }

  __device__ void sum_chunk(int chunk, const uint4* x, float (&sums)[4]) {
    constexpr int kBlockWords = kShareBlock / 8;
    x += chunk * (kChunk / 8);
    const int num_blocks = min(kChunk, width_ - chunk * kChunk) / kShareBlock;
    ptx::wait_for_copies<kStages - 1>();
    const uint4* pieces = reinterpret_cast<const uint4*>(s_ring_ + read_);
    read_ = after(read_);
    const uint4 scales = pieces[Layout::kPieces * Layout::kLanes];
    const bool has_nan = any_e4m3_nan(scales);
    Chains chains = {};
#pragma unroll
    for (int first = 0; first < kChunk / kShareBlock; first += kAtOnce) {
      if (first >= num_blocks) break;
      PackedShare shares[kAtOnce];
      uint4 inputs[kAtOnce][kShareColumns / 8];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int block = first + n;
        shares[n].codes[0] = pieces[2 * block * Layout::kLanes];
        shares[n].codes[1] = pieces[(2 * block + 1) * Layout::kLanes];
        // Columns that aren't there have no inputs and count for nothing: the first block's again.
        const uint4* at = x + (block < num_blocks ? block * kBlockWords : 0);
#pragma unroll
        for (int i = 0; i < kShareColumns / 8; ++i) inputs[n][i] = ptx::load_here(at + i);
        const uint32_t codes = block == 0 ? scales.x : block == 1 ? scales.y : block == 2 ? scales.z : scales.w;
        shares[n].prepare(codes, has_nan);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (n == 0 || first + n < num_blocks) add_block(shares[n], inputs[n], chains);
      }
    }
    add_chains(chains, sums);
    copy_next();
  }

 private:
  static constexpr int kAtOnce = 2;  // blocks whose inputs are loaded before the first is used

  __device__ static int after(int stage) {
    return stage + kBytes == kStages * kBytes ? 0 : stage + kBytes;
  }

  __device__ void copy_next() {
    if (!next_.is_done()) {
      char* stage = s_ring_ + write_;
      const char* unit = units_ + static_cast<int64_t>(next_.column() / kChunk) * kBytes;
#pragma unroll
      for (int i = 0; i <= Layout::kPieces; ++i) {
        constexpr int kBetween = Layout::kLanes * Layout::kPieceBytes;
        ptx::copy_async<Layout::kPieceBytes>(stage + i * kBetween, unit + i * kBetween);
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
  }

  const int width_, lane_;
  StreamWalk<kChunk, Tiles> next_;
  char* s_ring_;              // this lane's first piece
  int read_ = 0, write_ = 0;  // in bytes
  const char* units_;         // of the next tile and pass, this lane's first piece
};

}  // namespace tessera::backends::cuda_common
