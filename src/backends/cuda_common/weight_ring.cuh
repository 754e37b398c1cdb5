// SPDX-License-Identifier: Apache-2.0
#pragma once
// A warp's ring of FP8 or BF16 weights in the checkpoint's layout (weight_stream.cuh).
#include <cstdint>

#include "backends/cuda_common/weight_stream.cuh"

namespace tessera::backends::cuda_common {

// Stages of a format: columns, their bytes in a row, and the place of a row's 16-byte pieces. A lane (g, t) multiplies
// columns [32 t, 32 t + 32) of each 128 (weight_shares.cuh): its i-th piece of a row lies at slot 4 i + t, in odd rows
// with bit 2 flipped, which keeps the eight lanes that read at once on different banks.
template <ops::WeightFormat kFormat>
struct Stage {
  static constexpr bool kIsBf16 = kFormat == ops::WeightFormat::kBf16;
  static constexpr int kColumns = 128;
  static constexpr int kRowBytes = kIsBf16 ? 256 : 128, kRowPieces = kRowBytes / 16;
  static constexpr int kCodeBytes = kTileRows * kRowBytes;
  // Of FP8 also the rows' scales.
  static constexpr int kBytes = kCodeBytes + (kIsBf16 ? 0 : kTileRows * static_cast<int>(sizeof(float)));

  __device__ static int slot_of(int piece, int row) {
    const int i = kIsBf16 ? piece % 4 : piece % 2, t = kIsBf16 ? piece / 4 : piece / 2;
    return (4 * i + t) ^ (row % 2 * 4);
  }
};

// Stages of a ring that any GPU's shared memory holds.
template <ops::WeightFormat kFormat>
constexpr int kFewStages = Stage<kFormat>::kIsBf16 ? 2 : 4;

template <ops::WeightFormat kFormat, int kStages, class Tiles>
class WeightRing {
 public:
  static_assert(kFormat == ops::WeightFormat::kFp8Block || kFormat == ops::WeightFormat::kBf16);
  using Share = WeightShare<kFormat>;
  using Layout = Stage<kFormat>;
  static constexpr int kColumns = Layout::kColumns, kBytes = Layout::kBytes;

  // Begins to copy the first stages.
  __device__ WeightRing(const StreamShape& shape, int num_tiles, const Tiles& tiles, char* s_stages)
      : shape_(shape),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        next_(shape, num_tiles, tiles, StreamBlocks::of_launch()) {
    s_ring_ = s_stages + static_cast<int>(threadIdx.x) / kWarp * (kStages * kBytes);
    const int first_row = lane_ / Layout::kRowPieces;
    s_piece_ = first_row * Layout::kRowBytes + Layout::slot_of(lane_ % Layout::kRowPieces, first_row) * 16;
    row_bytes_ = shape.width * Layout::kRowBytes / kColumns;
    if (!next_.is_done()) find_rows();
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy_next();
  }

  __device__ void sum_chunk(int chunk, const uint4* x, float (&sums)[4]) {
    constexpr int kBlocks = kChunk / kShareBlock, kWords = kShareColumns / 8;
    static_assert(kColumns == kShareBlock);
    x += chunk * (kChunk / 8);
    const int num_blocks = min(kChunk, shape_.width - chunk * kChunk) / kShareBlock;
    Chains chains = {};
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (int first = 0; first < kBlocks; first += kAtOnce) {
      if (first >= num_blocks) break;
      // On their way while stages are waited for; where there are none, the first ones again.
      uint4 inputs[kAtOnce][kWords];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const uint4* at = x + (first + n < num_blocks ? (first + n) * (kShareBlock / 8) : 0);
#pragma unroll
        for (int i = 0; i < kWords; ++i) inputs[n][i] = ptx::load_here(at + i);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (n > 0 && first + n >= num_blocks) break;
        ptx::wait_for_copies<kStages - 1>();
        __syncwarp();
        Share share;
        read(s_ring_ + read_ * kBytes, share);
        __syncwarp();
        read_ = (read_ + 1) % kStages;
        copy_next();
        share.prepare();
        if constexpr (Share::kScaledSum) {
          Chains parts = {};
          add_block(share, inputs[n], parts);
          add_scaled(share, parts, sums);
        } else {
          add_block(share, inputs[n], chains);
        }
      }
    }
    if constexpr (!Share::kScaledSum) add_chains(chains, sums);
  }

 private:
  __device__ void read(const char* stage, Share& share) const {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4* row = reinterpret_cast<const uint4*>(stage + (g + 8 * r) * Layout::kRowBytes);
      const auto piece = [&](int i) { return row[(4 * i + t) ^ (g % 2 * 4)]; };
      if constexpr (kFormat == ops::WeightFormat::kFp8Block) {
        share.codes[r][0] = piece(0);
        share.codes[r][1] = piece(1);
        share.scales[r] = reinterpret_cast<const float*>(stage + Layout::kCodeBytes)[g + 8 * r];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) share.values[r][i] = piece(i);
      }
    }
  }

  // Each lane copies 16 bytes of every few rows, a row's pieces by neighbouring lanes.
  __device__ void copy_next() {
    if (!next_.is_done()) {
      const int at = next_.column() * Layout::kRowBytes / kColumns;
      char* stage = s_ring_ + write_ * kBytes;
#pragma unroll
      for (int i = 0; i < kTileRows; i += kRowsAtOnce) {
        ptx::copy_async<16>(stage + s_piece_ + i * Layout::kRowBytes,
                            codes_ + at + static_cast<int64_t>(min(i, last_row_)) * row_bytes_);
      }
      if constexpr (Share::kScaledSum) {
        const float* scale =
            static_cast<const float*>(next_.weights().scales) + scale_at_ + next_.column() / kShareBlock;
        if (lane_ < kTileRows) ptx::copy_async<4>(stage + Layout::kCodeBytes + lane_ * 4, scale);
      }
      write_ = (write_ + 1) % kStages;
      if (next_.advance() && !next_.is_done()) find_rows();
    }
    ptx::commit_copies();  // an empty group keeps the count
  }

  // Where this lane's copies of the next tile begin.
  __device__ void find_rows() {
    const TileWeights& weights = next_.weights();
    const int rows = static_cast<int>(min(int64_t{kTileRows}, weights.num_rows - weights.first_row));
    const int first_row = min(lane_ / Layout::kRowPieces, rows - 1);
    last_row_ = rows - 1 - first_row;
    codes_ = static_cast<const char*>(weights.data) + (weights.first_row + first_row) * row_bytes_ +
             lane_ % Layout::kRowPieces * 16;
    if constexpr (Share::kScaledSum) {
      const int64_t row = weights.first_row + min(lane_, rows - 1);
      scale_at_ = row / numeric::kFp8WeightBlock * (shape_.width / kShareBlock);
    }
  }

  static constexpr int kAtOnce = 2;  // blocks whose inputs are loaded before the first is used
  static constexpr int kRowsAtOnce = kWarp / Layout::kRowPieces;

  const StreamShape& shape_;
  const int lane_;
  StreamWalk<kColumns, Tiles> next_;
  char* s_ring_;
  int s_piece_;  // of this lane in a stage
  int row_bytes_, read_ = 0, write_ = 0;
  const char* codes_;     // of the next tile and pass
  int last_row_;          // of that tile, behind this lane's first
  int64_t scale_at_ = 0;  // of the row whose scale this lane copies
};

}  // namespace tessera::backends::cuda_common
