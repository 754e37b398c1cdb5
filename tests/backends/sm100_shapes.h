// SPDX-License-Identifier: Apache-2.0
#pragma once
// Maps for which sm100 takes one kernel or another, on a GPU of any size: for tests that run them and, as nobody sees
// there which one it was, for one that holds what chooses to this list.
#include <cstdint>
#include <vector>

#include "backends/sm100/sums_plan.h"

namespace tessera::testing {

// Rows of a group from `rows` to rows + more_rows, tokens likewise. `tile_blocks` as tile_blocks_of() has it.
struct TiledShape {
  int32_t tile_tokens;
  int tile_blocks;
  int64_t rows, more_rows, tokens, more_tokens;
  int64_t groups = 1;
};

inline ops::Linear::Desc map_of_rows(int64_t rows, int64_t groups = 1) {
  return {.in = 16,
          .out = rows,
          .groups = groups,
          .format = ops::WeightFormat::kNvfp4,
          .input = ops::InputMode::kA4,
          .output = DType::kBF16};
}

// Blocks that take a tile together, where from a sixth to a quarter of the multiprocessors are places for clusters of
// four at once; 0: that depends.
inline int tile_blocks_of(const ops::Linear::Desc& desc, int64_t tokens, int64_t multiprocessors) {
  using namespace backends::sm100;
  const int32_t tile_tokens = linear_tile_tokens(desc, tokens, multiprocessors);
  if (tile_tokens <= kMostTileTokens) return 1;
  if (tile_tokens < kWidePairTileTokens) return 2;
  const bool fewest = takes_two_pairs(desc, tokens, multiprocessors, multiprocessors / 6);
  const bool most = takes_two_pairs(desc, tokens, multiprocessors, multiprocessors / 4);
  return fewest != most ? 0 : most ? 4 : 2;
}

// Every form of the kernel, first the smallest map of it, then what blocks take several tiles of.
inline std::vector<TiledShape> tiled_shapes(int64_t multiprocessors) {
  constexpr int64_t kRows = backends::sm100::PackedTile::kRows;
  const int64_t pairs = multiprocessors / 2, two_pairs = multiprocessors / 4;
  return {
      {32, 1, 1, 511, 1, 63},
      {64, 1, (multiprocessors / 2 + 1) * kRows - 100, 100, 65, 63},
      {128, 1, multiprocessors * kRows + 1, 100, 65, 63},
      {192, 2, pairs * 2 * kRows + 1, 100, 129, 63},
      {256, 4, (two_pairs + 1) * 4 * kRows + 1, 127, 193, 15},  // rows for one block of the four in the last tile
      // Few rows, which two pairs would not share; the last tile has fewer tokens than sets of sums share.
      {256, 2, 129, 127, (2 * pairs - 1) * 256 + 1, 46},
      {192, 2, (pairs / 2 + 2) * 2 * kRows + 1, 100, 300, 60},
      {192, 2, pairs * 4 * kRows + 1, 200, 129, 63},
      {256, 4, (multiprocessors / 2 + 1) * kRows, 0, 200, 55, 2},
      {256, 0, (pairs * 2 / 3 - 1) * 2 * kRows + 1, 254, 769, 46},
  };
}

}  // namespace tessera::testing
