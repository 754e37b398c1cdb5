// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles and stages of block_scaled_sums.cuh, and how many tokens a tile of a map has: plain numbers, for the kernel,
// its launches and predictions of its time (bench/plan).
#include <algorithm>
#include <cstdint>

#include "backends/sm100/input_tile.h"
#include "backends/sm100/packed_tiles.h"
#include "ops/linear/linear.h"

namespace tessera::backends::sm100 {

template <int kMatrices, int kTokens>
struct SumsPlan {
  // 256 columns.
  static constexpr int kStageBytes = kMatrices * PackedTile::kBytes + InputTile::stage_bytes(kTokens);
  static constexpr int kMostBytes = 226 << 10;  // of 227 KiB; the rest is for barriers
  static constexpr int kStages = std::min(8, kMostBytes / kStageBytes);
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
};

// Tokens of a tile; fewer where more would leave multiprocessors without one. The smaller kernel has more stages.
constexpr int kMostTileTokens = 128, kFewTileTokens = 32;

inline int64_t linear_tiles(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t tile_tokens) {
  return desc.groups * ceil_div<int64_t>(desc.out, PackedTile::kRows) * ceil_div<int64_t>(num_tokens, tile_tokens);
}

// The most tokens that leave no multiprocessor without a tile.
inline int32_t linear_tile_tokens(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  int32_t tokens = kMostTileTokens;
  while (tokens > kFewTileTokens && linear_tiles(desc, num_tokens, tokens) < multiprocessors) tokens /= 2;
  return tokens;
}

}  // namespace tessera::backends::sm100
