// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sums of linear maps by tiles of at most 8 tokens, bit for bit those of mma_sums.cuh, with weights that stream through
// shared memory. A warp has a ring of stages of its own, some columns of 16 rows each, and copies stages ahead while it
// multiplies another, across tiles of rows too: what bounds a step of few tokens is how many bytes are on their way.
//   tile   16 rows; W warps share it, each takes every W-th chunk of 512 columns
//   block  T tiles at a time, W T warps; it walks over the tiles of the whole grid
//   pass   one of kPasses matrices whose sums belong together (an expert's gate and up)
// What the tiles of a launch are, a class Tiles says:
//   kPasses
//   place(tile)               what all else about a tile is worked out from
//   weights(place, pass)      TileWeights
//   inputs(place)             this lane's token (lane / 4) of the 8; any other token where there is none
//   store(place, at, sums, ticket)   takes the sums of row streamed_row(at) and token streamed_token(at), one of each
//                             pass
//   Ticket, ticket(place, at) what store() will need, loaded while the sums are worked out
// A ring is one of weights in the checkpoint's layout (weight_ring.cuh) or of packed ones (packed_ring.cuh):
//   kBytes                    of a stage
//   sum_chunk(chunk, x, sums) takes the stages of a chunk, the next in the order of StreamWalk, and has their places
//                             filled anew; x: this lane's token, from its own first column on
#include <algorithm>
#include <cstdint>

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/stream_plan.h"

namespace tessera::backends::cuda_common {

// Where a tile's rows are: the matrix, and the tile's first row (packed: a multiple of 16); rows from num_rows on are
// the last one again, or packed zeros.
struct TileWeights {
  const void *data, *scales;
  int64_t first_row, num_rows;
};

// How the work of a launch is dealt out.
struct StreamShape : StreamPlan {
  int width = 0, num_chunks = 0;  // columns, a multiple of 128

  unsigned threads() const { return static_cast<unsigned>(tile_warps * block_tiles * kWarp); }
  // Chunk sums of a round of tiles, twice: written by turns, so that one barrier a round is enough.
  TESSERA_HOST_DEVICE int round_sums(int passes) const { return block_tiles * num_chunks * passes * kTileSums; }
  // Of rings of these stages, and chunk sums.
  size_t shared_bytes(int stages, int stage_bytes, int passes) const {
    return static_cast<size_t>(tile_warps) * block_tiles * stages * stage_bytes +
           2 * static_cast<size_t>(round_sums(passes)) * sizeof(float);
  }
  unsigned blocks(int64_t num_tiles) const {
    return static_cast<unsigned>(stream_blocks(*this, num_tiles, multiprocessors()));
  }
};

// The thread blocks of a launch that have its tiles, and which of them this one is: all, or a part where others have
// tiles of another kind.
struct StreamBlocks {
  int index, count;
  __device__ static StreamBlocks of_launch() { return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)}; }
};

// Stages of a ring where so few blocks are launched that each may have a multiprocessor's shared memory, should rings
// have fewer elsewhere.
constexpr int kManyStages = 4;

inline bool can_stream(int64_t width) {
  return width % kShareBlock == 0;
}

// For at most num_tiles tiles (stream_plan.h).
inline StreamShape stream_shape(int64_t width, int64_t num_tiles, int passes) {
  const int64_t num_chunks = ceil_div<int64_t>(width, kChunk);
  const StreamPlan plan = stream_plan(num_chunks, num_tiles, passes, multiprocessors());
  return {{plan}, static_cast<int>(width), static_cast<int>(num_chunks)};
}

// Of a tile's sums, lane by lane what mma_bf16 gives: rows and tokens.
__device__ inline int streamed_row(int at) {
  return at / 16 + at % 4 / 2 * 8;
}
__device__ inline int streamed_token(int at) {
  return at / 4 % 4 * 2 + at % 2;
}

// Which stage a warp copies next: a chunk's stages, the warp's chunks, passes, then tiles. Where the weights of the
// pass after the next one lie is loaded ahead, so that nobody waits for it.
template <int kColumns, class Tiles>
class StreamWalk {
 public:
  __device__ StreamWalk(const StreamShape& shape, int num_tiles, const Tiles& tiles, StreamBlocks blocks)
      : shape_(shape), tiles_(tiles), num_tiles_(num_tiles), num_blocks_(blocks.count) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    first_column_ = warp % shape.tile_warps * kChunk;
    ahead_tile_ = blocks.index * shape.block_tiles + warp / shape.tile_warps;
    load_ahead();
    enter();
  }
  __device__ bool is_done() const { return is_done_; }
  __device__ int column() const { return column_; }
  __device__ const TileWeights& weights() const { return weights_; }
  // True where another pass or tile begins.
  __device__ bool advance() {
    column_ += kColumns;
    if (column_ % kChunk != 0 && column_ < shape_.width) return false;
    column_ = round_up(column_, kChunk) + (shape_.tile_warps - 1) * kChunk;
    if (column_ < shape_.width) return false;
    enter();
    return true;
  }

 private:
  __device__ void enter() {
    weights_ = ahead_;
    is_done_ = ahead_tile_ >= num_tiles_;
    column_ = first_column_;
    if (++ahead_pass_ == Tiles::kPasses) {
      ahead_pass_ = 0;
      ahead_tile_ += num_blocks_ * shape_.block_tiles;
    }
    load_ahead();
  }
  __device__ void load_ahead() {
    if (ahead_tile_ < num_tiles_) ahead_ = tiles_.weights(tiles_.place(ahead_tile_), ahead_pass_);
  }

  const StreamShape& shape_;
  const Tiles& tiles_;
  const int num_tiles_, num_blocks_;
  int first_column_, column_, ahead_tile_, ahead_pass_ = 0;
  bool is_done_;
  TileWeights weights_, ahead_ = {};
};

// A result of a tile: its sums, s_sums on, of chunks in ascending order, each of them of all passes, kStride apart.
template <int kStride, class Tiles>
__device__ void finish_sum(int num_chunks, const Tiles& tiles, const typename Tiles::Place& place, int at,
                           const float* s_sums, const typename Tiles::Ticket& ticket) {
  constexpr int kPasses = Tiles::kPasses;
  float totals[kPasses] = {};
#pragma unroll 4
  for (int part = 0; part < num_chunks; ++part) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) totals[pass] += s_sums[(part * kPasses + pass) * kStride];
  }
  tiles.store(place, at, totals, ticket);
}

// All tiles of this block. s_sums: the rounds' chunk sums.
template <class Ring, class Tiles>
__device__ void stream_tiles(const StreamShape& shape, int num_tiles, const Tiles& tiles, Ring& ring, float* s_sums,
                             StreamBlocks blocks = StreamBlocks::of_launch()) {
  constexpr int kPasses = Tiles::kPasses;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const int num_sums = shape.block_tiles * kTileSums, num_threads = shape.tile_warps * shape.block_tiles * kWarp;
  const int tile_sums = shape.num_chunks * kPasses * kTileSums, stride = blocks.count * shape.block_tiles;
  const int tile_in_block = warp / shape.tile_warps, own_tile = thread / kTileSums, own_at = thread % kTileSums;
  const auto inputs = [&](int tile) {
    return reinterpret_cast<const uint4*>(tiles.inputs(tiles.place(tile))) + lane % 4 * (kShareColumns / 8);
  };
  int base = blocks.index * shape.block_tiles, turn = 0;
  const uint4* x = base + tile_in_block < num_tiles ? inputs(base + tile_in_block) : nullptr;
  for (; base < num_tiles; base += stride, turn ^= 1) {
    float* s_round = s_sums + turn * shape.round_sums(kPasses);
    // Of this thread's first result, on their way while sums are worked out; and the next round's inputs.
    const bool has_own = thread < num_sums && base + own_tile < num_tiles;
    typename Tiles::Place place;
    typename Tiles::Ticket ticket;
    if (has_own) place = tiles.place(base + own_tile), ticket = tiles.ticket(place, own_at);
    const int tile = base + tile_in_block;
    const uint4* next_x = tile + stride < num_tiles ? inputs(tile + stride) : nullptr;
    if (tile < num_tiles) {
      float* s_tile = s_round + tile_in_block * tile_sums + lane * 4;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        for (int chunk = warp % shape.tile_warps; chunk < shape.num_chunks; chunk += shape.tile_warps) {
          float sums[4];
          ring.sum_chunk(chunk, x, sums);
          float4* s_chunk = reinterpret_cast<float4*>(s_tile + (chunk * kPasses + pass) * kTileSums);
          *s_chunk = {sums[0], sums[1], sums[2], sums[3]};
        }
      }
    }
    x = next_x;
    __syncthreads();
    const auto finish = [&](int i, const typename Tiles::Place& its_place, const typename Tiles::Ticket& its_ticket) {
      const int at = i % kTileSums;
      finish_sum<kTileSums>(shape.num_chunks, tiles, its_place, at, s_round + i / kTileSums * tile_sums + at,
                            its_ticket);
    };
    if (has_own) finish(thread, place, ticket);
    for (int i = thread + num_threads; i < num_sums; i += num_threads) {
      if (base + i / kTileSums >= num_tiles) break;
      const auto other = tiles.place(base + i / kTileSums);
      finish(i, other, tiles.ticket(other, i % kTileSums));
    }
  }
}

}  // namespace tessera::backends::cuda_common
