// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the tiles of a launch of weight_stream.cuh are dealt out: plain numbers, for the kernels and for predictions of
// their time (bench/plan).
#include <algorithm>
#include <cstdint>

#include "base/integer_math.h"

namespace tessera::backends::cuda_common {

constexpr int kMaxWarps = 8;            // of a thread block
constexpr int kStreamBlocksAtOnce = 2;  // of a multiprocessor

struct StreamPlan {
  int tile_warps = 0, block_tiles = 0;
};

// For at most num_tiles tiles of num_chunks chunks of 512 columns. Many warps to a tile spread few tiles over the GPU;
// few warps to a tile have longer between two barriers. What takes the least time is taken, a barrier counted as some
// blocks of 128 columns.
inline StreamPlan stream_plan(int64_t num_chunks, int64_t num_tiles, int passes, int64_t multiprocessors) {
  constexpr int64_t kRoundBlocks = 4, kMostChunks = 16, kChunkBlocks = 4;
  StreamPlan best;
  int64_t least = 0;
  for (int64_t tile_warps = std::min<int64_t>(num_chunks, kMaxWarps); tile_warps > 0; tile_warps /= 2) {
    const int64_t block_tiles = kMaxWarps / tile_warps;
    if (block_tiles > 1 && block_tiles * num_chunks * passes > 2 * kMostChunks) break;  // shared memory
    const int64_t at_once = block_tiles * kStreamBlocksAtOnce * multiprocessors;
    const int64_t blocks = ceil_div(num_chunks, tile_warps) * passes * kChunkBlocks;
    const int64_t time = ceil_div(num_tiles, at_once) * (blocks + kRoundBlocks);
    if (best.tile_warps != 0 && time >= least) continue;
    least = time;
    best.tile_warps = static_cast<int>(tile_warps);
    // No more tiles to a block than spread over all of them.
    best.block_tiles = static_cast<int>(
        std::clamp<int64_t>(ceil_div<int64_t>(num_tiles, kStreamBlocksAtOnce * multiprocessors), 1, block_tiles));
  }
  return best;
}

inline int64_t stream_blocks(const StreamPlan& plan, int64_t num_tiles, int64_t multiprocessors) {
  return std::min(ceil_div<int64_t>(num_tiles, plan.block_tiles), kStreamBlocksAtOnce * multiprocessors);
}

}  // namespace tessera::backends::cuda_common
