// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps of at most 8 tokens, bit for bit those of mma_sums.cuh, with weights that stream through shared
// memory. A warp has a ring of stages of its own, some columns of 16 rows each, and copies stages ahead while it
// multiplies another, across tiles of rows too: what bounds a step of few tokens is how many bytes are on their way.
//   tile   16 rows; W warps share it, each takes every W-th chunk of 512 columns
//   block  T tiles at a time, W T warps; it walks over the tiles of the whole grid
//   pass   one of kPasses matrices whose sums belong together (an expert's gate and up)
// What the tiles of a launch are, a class Tiles says:
//   kPasses
//   place(tile)               what all else about a tile is worked out from
//   weights(place, pass)      TileWeights
//   inputs(place)             this lane's token (lane / 4) of the 8; any other token where there is none
//   store(place, at, sums)    takes the sums of row row_of_sum(at) and token token_of_sum(at), one of each pass
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"

namespace tessera::backends::cuda_common {

// Stages of a format: columns, their bytes in a row, and the place of a row's 16-byte pieces. A lane (g, t) multiplies
// columns [32 t, 32 t + 32) of each 128 (weight_shares.cuh): its i-th piece of a row lies at slot 4 i + t, in odd rows
// with bit 2 flipped, which keeps the eight lanes that read at once on different banks.
template <ops::WeightFormat kFormat>
struct Stage {
  static constexpr bool kIsNvfp4 = kFormat == ops::WeightFormat::kNvfp4, kIsBf16 = kFormat == ops::WeightFormat::kBf16;
  static constexpr int kColumns = kIsNvfp4 ? 256 : 128, kBlocks = kColumns / kShareBlock;
  static constexpr int kRowBytes = kIsBf16 ? 256 : 128, kRowPieces = kRowBytes / 16;
  static constexpr int kCodeBytes = kTileRows * kRowBytes;
  static constexpr int kScaleBytes = kIsNvfp4 ? kColumns / numeric::kNvfp4Block : 0;  // of a row
  static constexpr int kBytes = kCodeBytes + kTileRows * kScaleBytes;

  __device__ static int slot_of(int piece, int row) {
    const int i = kIsNvfp4 ? piece / 4 : kIsBf16 ? piece % 4 : piece % 2;
    const int t = kIsNvfp4 ? piece % 4 : kIsBf16 ? piece / 4 : piece / 2;
    return (4 * i + t) ^ (row % 2 * 4);
  }
};

// Stages of a ring: what any GPU's shared memory holds; or, of BF16, a whole chunk, where so few blocks are launched
// that each may have a multiprocessor's.
template <ops::WeightFormat kFormat>
constexpr int kFewStages = Stage<kFormat>::kIsBf16 ? 2 : 4;
constexpr int kManyStages = 4;

// Where a tile's rows are: the matrix, and the tile's first row; rows from num_rows on are the last one again.
struct TileWeights {
  const void *data, *scales;
  int64_t first_row, num_rows;
};

// How the work of a launch is dealt out.
struct StreamShape {
  int width = 0, num_chunks = 0;  // columns, a multiple of 128
  int tile_warps = 0, block_tiles = 0;

  unsigned threads() const { return static_cast<unsigned>(tile_warps * block_tiles * kWarp); }
  template <ops::WeightFormat kFormat>
  size_t shared_bytes(int stages = kFewStages<kFormat>) const {
    return static_cast<size_t>(tile_warps) * block_tiles * stages * Stage<kFormat>::kBytes;
  }
  unsigned blocks(int64_t num_tiles) const {
    constexpr int kBlocksPerMultiprocessor = 2;
    return static_cast<unsigned>(
        std::min(ceil_div<int64_t>(num_tiles, block_tiles), int64_t{kBlocksPerMultiprocessor} * multiprocessors()));
  }
};

inline bool can_stream(int64_t width) {
  return width % kShareBlock == 0;
}

// For about num_tiles tiles: few are spread over many small blocks.
inline StreamShape stream_shape(int64_t width, int64_t num_tiles) {
  StreamShape shape;
  shape.width = static_cast<int>(width);
  shape.num_chunks = static_cast<int>(ceil_div<int64_t>(width, kChunk));
  shape.tile_warps = std::min(shape.num_chunks, kMaxWarps);
  shape.block_tiles =
      static_cast<int>(std::clamp<int64_t>(num_tiles / (2 * multiprocessors()), 1, kMaxWarps / shape.tile_warps));
  return shape;
}

// A warp's ring.
template <ops::WeightFormat kFormat, int kStages, class Tiles>
class WeightRing {
 public:
  using Share = WeightShare<kFormat>;
  using Layout = Stage<kFormat>;

  // Begins to copy the first stages.
  __device__ WeightRing(const StreamShape& shape, int num_tiles, const Tiles& tiles, char* s_stages)
      : shape_(shape), tiles_(tiles), num_tiles_(num_tiles), lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    s_ring_ = s_stages + warp * (kStages * Layout::kBytes);
    const int first_row = lane_ / Layout::kRowPieces;
    s_piece_ = first_row * Layout::kRowBytes + Layout::slot_of(lane_ % Layout::kRowPieces, first_row) * 16;
    row_bytes_ = shape.width * Layout::kRowBytes / Layout::kColumns;
    first_chunk_ = warp % shape.tile_warps;
    next_tile_ = static_cast<int>(blockIdx.x) * shape.block_tiles + warp / shape.tile_warps;
    next_column_ = first_chunk_ * kChunk;
    find_weights();
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy_next();
  }

  // The oldest stage, for every lane of the warp.
  __device__ const char* wait() {
    ptx::wait_for_copies<kStages - 1>();
    __syncwarp();
    return s_ring_ + read_ * Layout::kBytes;
  }
  // Done with it: its place is filled anew.
  __device__ void release() {
    __syncwarp();
    read_ = (read_ + 1) % kStages;
    copy_next();
  }

  // This lane's share of block n of a stage, without an FP8 block's scale.
  __device__ void read(const char* stage, int n, Share& share) const {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4* row = reinterpret_cast<const uint4*>(stage + (g + 8 * r) * Layout::kRowBytes);
      const auto piece = [&](int i) { return row[(4 * i + t) ^ (g % 2 * 4)]; };
      if constexpr (kFormat == ops::WeightFormat::kNvfp4) {
        share.codes[r] = piece(n);
        const char* scales = stage + Layout::kCodeBytes + (g + 8 * r) * Layout::kScaleBytes;
        share.scales[r] = *reinterpret_cast<const uint16_t*>(scales + 8 * n + 2 * t);
      } else if constexpr (kFormat == ops::WeightFormat::kFp8Block) {
        share.codes[r][0] = piece(0);
        share.codes[r][1] = piece(1);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) share.values[r][i] = piece(i);
      }
    }
  }

 private:
  // Each lane copies 16 bytes of every few rows, a row's pieces by neighbouring lanes.
  __device__ void copy_next() {
    if (next_tile_ < num_tiles_) {
      const int at = next_column_ * Layout::kRowBytes / Layout::kColumns;
      const int piece = lane_ % Layout::kRowPieces * 16;
      const bool is_there = at + piece < row_bytes_;
      const char* from = codes_ + (is_there ? at : -piece);
      char* stage = s_ring_ + write_ * Layout::kBytes;
#pragma unroll
      for (int i = 0; i < kTileRows; i += kRowsAtOnce) {
        ptx::copy_async<16>(stage + s_piece_ + i * Layout::kRowBytes,
                            from + static_cast<int64_t>(min(i, last_row_)) * row_bytes_, is_there);
      }
      if constexpr (Layout::kIsNvfp4) {
        static_assert(Layout::kScaleBytes == 16, "two lanes bring a row's scales");
        const int scale_at = next_column_ / static_cast<int>(numeric::kNvfp4Block);
        const bool has_scale = next_column_ + lane_ % 2 * kShareBlock < shape_.width;
        ptx::copy_async<8>(stage + Layout::kCodeBytes + lane_ * 8, scales_ + (has_scale ? scale_at : -(lane_ % 2 * 8)),
                           has_scale);
      }
      write_ = (write_ + 1) % kStages;
      advance();
    }
    ptx::commit_copies();  // an empty group keeps the count
  }

  // A chunk's stages, the warp's chunks, passes, then tiles.
  __device__ void advance() {
    next_column_ += Layout::kColumns;
    if (next_column_ % kChunk != 0 && next_column_ < shape_.width) return;
    next_column_ = round_up(next_column_, kChunk) + (shape_.tile_warps - 1) * kChunk;
    if (next_column_ < shape_.width) return;
    next_column_ = first_chunk_ * kChunk;
    if (++next_pass_ == Tiles::kPasses) {
      next_pass_ = 0;
      next_tile_ += static_cast<int>(gridDim.x) * shape_.block_tiles;
    }
    find_weights();
  }

  // Where this lane's copies of the next tile begin.
  __device__ void find_weights() {
    if (next_tile_ >= num_tiles_) return;
    const TileWeights weights = tiles_.weights(tiles_.place(next_tile_), next_pass_);
    const int rows = static_cast<int>(min(int64_t{kTileRows}, weights.num_rows - weights.first_row));
    const int first_row = min(lane_ / Layout::kRowPieces, rows - 1);
    last_row_ = rows - 1 - first_row;
    codes_ = static_cast<const char*>(weights.data) + (weights.first_row + first_row) * row_bytes_ +
             lane_ % Layout::kRowPieces * 16;
    if constexpr (Layout::kIsNvfp4) {
      const int64_t scale_row = weights.first_row + min(lane_ / 2, rows - 1);
      scales_ = static_cast<const char*>(weights.scales) +
                scale_row * (shape_.width / static_cast<int>(numeric::kNvfp4Block)) + lane_ % 2 * 8;
    }
  }

  static constexpr int kRowsAtOnce = kWarp / Layout::kRowPieces;

  const StreamShape& shape_;
  const Tiles& tiles_;
  const int num_tiles_, lane_;
  char* s_ring_;
  int s_piece_;  // of this lane in a stage
  int row_bytes_, first_chunk_, read_ = 0, write_ = 0;
  int next_tile_, next_pass_ = 0, next_column_;
  const char *codes_, *scales_;  // of the next tile and pass
  int last_row_;                 // of that tile, behind this lane's first
};

// All tiles of this block.
template <ops::WeightFormat kFormat, int kStages, class Tiles>
__device__ void stream_tiles(const StreamShape& shape, int num_tiles, const Tiles& tiles,
                             WeightRing<kFormat, kStages, Tiles>& ring) {
  using Share = WeightShare<kFormat>;
  using Layout = Stage<kFormat>;
  __shared__ float s_parts[2][kMaxWarps][kTileSums];  // by turns, so that one barrier a round is enough
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int tile_in_block = warp / shape.tile_warps, first_warp = tile_in_block * shape.tile_warps;
  const int first_at = static_cast<int>(threadIdx.x) - first_warp * kWarp, num_threads = shape.tile_warps * kWarp;
  int turn = 0;
  for (int base = static_cast<int>(blockIdx.x) * shape.block_tiles; base < num_tiles;
       base += static_cast<int>(gridDim.x) * shape.block_tiles) {
    const int tile = base + tile_in_block;
    const bool is_there = tile < num_tiles;
    const auto place = tiles.place(min(tile, num_tiles - 1));
    const uint4* x = reinterpret_cast<const uint4*>(tiles.inputs(place)) + lane % 4 * (kShareColumns / 8);
    float totals[kTileSums / kWarp][Tiles::kPasses] = {};
#pragma unroll
    for (int pass = 0; pass < Tiles::kPasses; ++pass) {
      for (int first = 0; first < shape.num_chunks; first += shape.tile_warps) {
        const int chunk = first + warp - first_warp;
        if (is_there && chunk < shape.num_chunks) {
          float sums[4] = {};
          const int end = min((chunk + 1) * kChunk, shape.width);
          for (int begin = chunk * kChunk; begin < end; begin += Layout::kColumns) {
            // Inputs are on their way while the weights' stage is waited for.
            uint4 inputs[Layout::kBlocks][kShareColumns / 8];
#pragma unroll
            for (int n = 0; n < Layout::kBlocks; ++n) {
              const int k = min(begin + n * kShareBlock, shape.width - kShareBlock);  // beyond, weights are zero
#pragma unroll
              for (int i = 0; i < kShareColumns / 8; ++i) inputs[n][i] = ptx::load_here(x + k / 8 + i);
            }
            const char* stage = ring.wait();
#pragma unroll
            for (int n = 0; n < Layout::kBlocks; ++n) {
              if (begin + n * kShareBlock >= end) break;
              Share share;
              ring.read(stage, n, share);
              share.prepare();
              if constexpr (Share::kScaledSum) {
                const TileWeights weights = tiles.weights(place, pass);
                float parts[4] = {};
                add_block(share, inputs[n], parts);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                  const int64_t row = min(weights.first_row + lane / 4 + 8 * r, weights.num_rows - 1);
                  share.load_scale(r, weights.scales, shape.width, row, begin + n * kShareBlock);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[i] += parts[i] * share.scale(i / 2);
              } else {
                add_block(share, inputs[n], sums);
              }
            }
            ring.release();
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) s_parts[turn][warp][i * kWarp + lane] = sums[i];
        }
        __syncthreads();
        if (is_there) {
          const int count = min(shape.tile_warps, shape.num_chunks - first);
#pragma unroll
          for (int i = 0; i < kTileSums / kWarp; ++i) {
            const int at = first_at + i * num_threads;
            if (at >= kTileSums) break;
            for (int part = 0; part < count; ++part) totals[i][pass] += s_parts[turn][first_warp + part][at];
          }
        }
        turn ^= 1;
      }
    }
#pragma unroll
    for (int i = 0; i < kTileSums / kWarp; ++i) {
      const int at = first_at + i * num_threads;
      if (!is_there || at >= kTileSums) break;
      tiles.store(place, at, totals[i]);
    }
  }
}

}  // namespace tessera::backends::cuda_common
