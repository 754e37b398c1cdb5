// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps of at most 8 tokens, bit for bit those of mma_sums.cuh, with weights that stream through shared
// memory. A warp has a ring of stages of its own, 256 bytes of 16 rows each, and copies a stage ahead while it
// multiplies another, across tiles of rows too: what bounds a step of few tokens is how many bytes are on their way.
//   tile   16 rows; W warps share it, each takes every W-th chunk of 512 columns
//   block  T tiles at a time, W T warps; it walks over the tiles of the whole grid
//   pass   one of kPasses matrices whose sums belong together (an expert's gate and up)
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"

namespace tessera::backends::cuda_common {

constexpr int kStages = 2, kRowBytes = 256, kRowPieces = kRowBytes / 16, kStageCodes = kTileRows * kRowBytes;

// Stages of a format: columns in 256 bytes of a row, and the place of their 16-byte pieces. A lane (g, t) multiplies
// columns [32 t, 32 t + 32) of each 128 (weight_shares.cuh): its i-th piece of a row lies at slot 4 i + t, in odd rows
// with bit 2 flipped, which keeps the eight lanes that read at once on different banks.
template <ops::WeightFormat kFormat>
struct Stage {
  static constexpr bool kIsNvfp4 = kFormat == ops::WeightFormat::kNvfp4, kIsBf16 = kFormat == ops::WeightFormat::kBf16;
  static constexpr int kColumns = kIsNvfp4 ? 512 : kIsBf16 ? 128 : 256, kBlocks = kColumns / kShareBlock;
  static constexpr int kBytes = kStageCodes + (kIsNvfp4 ? kTileRows * kColumns / numeric::kNvfp4Block : 0);

  __device__ static int slot_of(int piece, int row) {
    const int i = kIsNvfp4 ? piece / 4 : kIsBf16 ? piece % 4 : piece / 8 * 2 + piece % 2;
    const int t = kIsNvfp4 ? piece % 4 : kIsBf16 ? piece / 4 : piece % 8 / 2;
    return (4 * i + t) ^ (row % 2 * 4);
  }
};

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
  size_t shared_bytes() const {
    return static_cast<size_t>(tile_warps) * block_tiles * kStages * Stage<kFormat>::kBytes;
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

// A warp's ring. tile_at(tile, pass) gives a tile's weights.
template <ops::WeightFormat kFormat, int kPasses, class TileAt>
class WeightRing {
 public:
  using Share = WeightShare<kFormat>;
  using Layout = Stage<kFormat>;

  // Begins to copy the first stages.
  __device__ WeightRing(const StreamShape& shape, int num_tiles, const TileAt& tile_at, char* s_stages)
      : shape_(shape), tile_at_(tile_at), num_tiles_(num_tiles), lane_(static_cast<int>(threadIdx.x) % kWarp) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    s_ring_ = s_stages + warp * (kStages * Layout::kBytes);
    first_chunk_ = warp % shape.tile_warps;
    next_chunk_ = first_chunk_;
    next_tile_ = static_cast<int>(blockIdx.x) * shape.block_tiles + warp / shape.tile_warps;
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy_next();
  }

  // Columns of a chunk that a warp steps through, a stage at a time.
  __device__ int num_steps(int chunk) const {
    const int columns = min(kChunk, shape_.width - chunk * kChunk);
    return (columns + Layout::kColumns - 1) / Layout::kColumns;
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

  // This lane's share of block n of a stage that begins at column `begin` of the tile.
  __device__ void read(const char* stage, int n, const TileWeights& tile, int begin, Share& share) const {
    const int g = lane_ / 4, t = lane_ % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4* row = reinterpret_cast<const uint4*>(stage + (g + 8 * r) * kRowBytes);
      const auto piece = [&](int i) { return row[(4 * i + t) ^ (g % 2 * 4)]; };
      if constexpr (kFormat == ops::WeightFormat::kNvfp4) {
        share.codes[r] = piece(n);
        share.scales[r] = *reinterpret_cast<const uint16_t*>(stage + kStageCodes + (r * 32 + 4 * g + n) * 8 + 2 * t);
      } else if constexpr (kFormat == ops::WeightFormat::kFp8Block) {
        share.codes[r][0] = piece(2 * n);
        share.codes[r][1] = piece(2 * n + 1);
        const int64_t row_index = min(tile.first_row + g + 8 * r, tile.num_rows - 1);
        share.load_scale(r, tile.scales, shape_.width, row_index, begin + n * kShareBlock);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) share.values[r][i] = piece(i);
      }
    }
  }

 private:
  // Each lane copies 16 bytes of every second row, a row's pieces by 16 lanes.
  __device__ void copy_next() {
    if (next_tile_ < num_tiles_) {
      const TileWeights tile = tile_at_(next_tile_, next_pass_);
      char* stage = s_ring_ + write_ * Layout::kBytes;
      const int64_t row_bytes = static_cast<int64_t>(shape_.width) * kRowBytes / Layout::kColumns;
      const int piece = lane_ % kRowPieces, first_row = lane_ / kRowPieces;
      const int begin = next_chunk_ * kChunk + next_step_ * Layout::kColumns;
      const int64_t at = static_cast<int64_t>(begin) * kRowBytes / Layout::kColumns + piece * 16;
      const bool is_there = at < row_bytes;
      const char* data = static_cast<const char*>(tile.data) + (is_there ? at : 0);
      char* to = stage + first_row * kRowBytes + Layout::slot_of(piece, first_row) * 16;
#pragma unroll
      for (int i = 0; i < kTileRows / 2; ++i) {
        const int64_t row = min(tile.first_row + first_row + 2 * i, tile.num_rows - 1);
        ptx::copy_async<16>(to + i * 2 * kRowBytes, data + row * row_bytes, is_there);
      }
      if constexpr (Layout::kIsNvfp4) {
        const int64_t scale_bytes = shape_.width / numeric::kNvfp4Block;
        const int64_t scale_at = begin / numeric::kNvfp4Block + lane_ % 4 * 8;
        const bool has_scale = scale_at < scale_bytes;
        const char* scales = static_cast<const char*>(tile.scales) + (has_scale ? scale_at : 0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int64_t row = min(tile.first_row + lane_ / 4 + 8 * r, tile.num_rows - 1);
          ptx::copy_async<8>(stage + kStageCodes + (r * 32 + lane_) * 8, scales + row * scale_bytes, has_scale);
        }
      }
      write_ = (write_ + 1) % kStages;
      advance();
    }
    ptx::commit_copies();  // an empty group keeps the count
  }

  __device__ void advance() {
    if (++next_step_ < num_steps(next_chunk_)) return;
    next_step_ = 0;
    next_chunk_ += shape_.tile_warps;
    if (next_chunk_ < shape_.num_chunks) return;
    next_chunk_ = first_chunk_;
    if (++next_pass_ < kPasses) return;
    next_pass_ = 0;
    next_tile_ += static_cast<int>(gridDim.x) * shape_.block_tiles;
  }

  const StreamShape& shape_;
  const TileAt& tile_at_;
  const int num_tiles_, lane_;
  char* s_ring_;
  int first_chunk_, read_ = 0, write_ = 0;
  int next_tile_, next_pass_ = 0, next_chunk_, next_step_ = 0;
};

// All tiles of this block. inputs_of(tile): this lane's token (lane / 4) of the 8, null where there is none.
// store(tile, at, sums): the sums of row row_of_sum(at) and token token_of_sum(at), one of each pass.
template <ops::WeightFormat kFormat, int kPasses, class TileAt, class InputsOf, class Store>
__device__ void stream_tiles(const StreamShape& shape, int num_tiles, const TileAt& tile_at,
                             WeightRing<kFormat, kPasses, TileAt>& ring, const InputsOf& inputs_of,
                             const Store& store) {
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
    const uint16_t* x = is_there ? inputs_of(tile) : nullptr;
    float totals[kTileSums / kWarp][kPasses] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      for (int first = 0; first < shape.num_chunks; first += shape.tile_warps) {
        const int chunk = first + warp - first_warp;
        if (is_there && chunk < shape.num_chunks) {
          const TileWeights weights = tile_at(tile, pass);
          Operands<1> operands;
          operands.x[0] = x;
          float sums[1][4] = {};
          const int num_steps = ring.num_steps(chunk);
          for (int step = 0; step < num_steps; ++step) {
            const int begin = chunk * kChunk + step * Layout::kColumns;
            const char* stage = ring.wait();
#pragma unroll
            for (int n = 0; n < Layout::kBlocks; ++n) {
              const int64_t k = begin + n * kShareBlock + lane % 4 * kShareColumns;
              uint4 inputs[kShareColumns / 8];
#pragma unroll
              for (int i = 0; i < kShareColumns / 8; ++i) inputs[i] = input_share(x, shape.width, k, i);
              Share share;
              ring.read(stage, n, weights, begin, share);
              if constexpr (Share::kScaledSum) {
                float parts[1][4] = {};
                add_block(share, operands, inputs, shape.width, k, parts);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[0][i] += parts[0][i] * share.scale(i / 2);
              } else {
                add_block(share, operands, inputs, shape.width, k, sums);
              }
            }
            ring.release();
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) s_parts[turn][warp][i * kWarp + lane] = sums[0][i];
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
      store(tile, at, totals[i]);
    }
  }
}

}  // namespace tessera::backends::cuda_common
