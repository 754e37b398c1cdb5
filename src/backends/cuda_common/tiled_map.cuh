// SPDX-License-Identifier: Apache-2.0
#pragma once
// A linear map cut into tiles of rows by tokens, whose inputs a kernel of its own has made ready before.
#include <cstdint>

#include "backends/cuda_common/values.cuh"
#include "base/integer_math.h"
#include "ops/linear/linear.h"

namespace tessera::backends::cuda_common {

// What every such map has; a backend adds its inputs.
struct TiledMap {
  const char* data;  // packed weights
  float tensor_scale;
  Values y;  // [tokens, groups * out]
  int64_t in, out, groups, num_tokens;
  int32_t tile_tokens;  // at most
};

inline TiledMap tiled_map(const ops::Linear::Desc& desc, const ops::Linear::Args& args, int32_t tile_tokens) {
  return {static_cast<const char*>(args.weight.data),
          args.weight.tensor_scale,
          values_of(args.y),
          desc.in,
          desc.out,
          desc.groups,
          args.num_tokens,
          tile_tokens};
}

// Of the tile that begins with this token.
__device__ inline int tile_tokens_of(const TiledMap& map, int64_t first_token) {
  return static_cast<int>(min(map.num_tokens - first_token, int64_t{map.tile_tokens}));
}

// How many tiles there are; what order they have is the backend's.
class MapTiles {
 public:
  struct Place {
    int64_t group, first_row, first_token;
  };
  __device__ int count() const { return static_cast<int>(map_.groups) * row_tiles_ * token_tiles_; }
  __device__ int tokens(const Place& place) const { return tile_tokens_of(map_, place.first_token); }

 protected:
  __device__ MapTiles(const TiledMap& map, int64_t tile_rows)
      : map_(map),
        row_tiles_(static_cast<int>(ceil_div<int64_t>(map.out, tile_rows))),
        token_tiles_(static_cast<int>(ceil_div<int64_t>(map.num_tokens, map.tile_tokens))) {}

  const TiledMap& map_;
  const int row_tiles_, token_tiles_;  // of a group
};

}  // namespace tessera::backends::cuda_common
