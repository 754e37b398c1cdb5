// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles and stages of block_scaled_sums.cuh, and how many tokens a tile of a map has: plain numbers, for the kernel,
// its launches and predictions of its time (bench/plan).
#include <algorithm>
#include <cstdint>

#include "backends/sm100/input_tile.h"
#include "backends/sm100/packed_tiles.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"

namespace tessera::backends::sm100 {

// Of kBlocks thread blocks that take a tile together: 1; 2, a pair, whose products are one; 4, two pairs.
template <int kMatrices, int kTokens, int kBlocks>
struct SumsPlan {
  static constexpr int kPair = std::min(2, kBlocks), kPairs = kBlocks / kPair;
  static_assert(kPair * kPairs == kBlocks);
  // 256 columns.
  static constexpr int kInputBytes = InputTile::code_bytes(kTokens / kPair) + InputTile::scale_bytes(kTokens);
  static constexpr int kStageBytes = kMatrices * PackedTile::kBytes + kInputBytes;
  static constexpr int kMostBytes = 226 << 10;  // of 227 KiB; the rest is for barriers
  static constexpr int kStages = std::min(8, kMostBytes / kStageBytes);
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
};

// Tokens of a tile, slots of experts'; fewer where more would leave multiprocessors without one. The smaller kernel has
// more stages. Tiles of two blocks are for more than 128 tokens: of 256, or of 192, whose sums tensor memory holds
// twice (tensor_plan.h).
constexpr int kWidePairTileTokens = 256, kPairTileTokens = 192, kMostTileTokens = 128, kFewTileTokens = 32;

inline int64_t linear_tiles(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t tile_tokens) {
  const int64_t rows = tile_tokens > kMostTileTokens ? 2 * PackedTile::kRows : PackedTile::kRows;
  return desc.groups * ceil_div<int64_t>(desc.out, rows) * ceil_div<int64_t>(num_tokens, tile_tokens);
}

// Of pairs' tiles those whose products take less time, which is as many rounds of all pairs as there are tiles for; as
// the wide ones draw a sixth fewer bytes from L2, a seventh more products are worth it.
inline int32_t pair_tile_tokens(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  const auto columns = [&](int64_t tile_tokens) {
    return ceil_div(linear_tiles(desc, num_tokens, tile_tokens), std::max<int64_t>(1, multiprocessors / 2)) *
           tile_tokens;
  };
  const bool is_wide = num_tokens > kPairTileTokens && 7 * columns(kWidePairTileTokens) <= 8 * columns(kPairTileTokens);
  return is_wide ? kWidePairTileTokens : kPairTileTokens;
}

// Two pairs take tiles of 256 tokens together: of 512 rows.
inline int64_t two_pair_tiles(const ops::Linear::Desc& desc, int64_t num_tokens) {
  return desc.groups * ceil_div<int64_t>(desc.out, 4 * PackedTile::kRows) *
         ceil_div<int64_t>(num_tokens, kWidePairTileTokens);
}
// Whether they do, where `clusters` of four blocks are at work at once: they draw a quarter fewer bytes from L2 than
// each pair for itself, which is worth a seventh more rounds.
inline bool takes_two_pairs(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors,
                            int64_t clusters) {
  if (clusters < 1 || desc.out <= 2 * PackedTile::kRows) return false;
  const int64_t pairs = std::max<int64_t>(1, multiprocessors / 2);
  return 7 * ceil_div(two_pair_tiles(desc, num_tokens), clusters) <=
         8 * ceil_div(linear_tiles(desc, num_tokens, kWidePairTileTokens), pairs);
}

// The most tokens that leave no multiprocessor without a tile, or those of pairs.
inline int32_t linear_tile_tokens(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  int32_t tokens = kMostTileTokens;
  if (num_tokens > kMostTileTokens && 2 * linear_tiles(desc, num_tokens, kPairTileTokens) >= multiprocessors - 1) {
    return pair_tile_tokens(desc, num_tokens, multiprocessors);
  }
  while (tokens > kFewTileTokens && linear_tiles(desc, num_tokens, tokens) < multiprocessors) tokens /= 2;
  return tokens;
}

// Slots of a tile, by how many an expert has on average, here or on another rank.
inline int32_t expert_tile_slots(const ops::MoeExperts::Desc& desc, int64_t num_tokens) {
  return num_tokens * desc.top_k > kFewTileTokens / 2 * desc.all_experts() ? kMostTileTokens : kFewTileTokens;
}

}  // namespace tessera::backends::sm100
