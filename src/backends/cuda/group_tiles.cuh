// SPDX-License-Identifier: Apache-2.0
#pragma once
// The job of linear_group's one launch for few tokens, and its tiles as weight_stream.cuh wants them.
#include <cstdint>

#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_stream.cuh"
#include "ops/linear_group/linear_group.h"

namespace tessera::backends::cuda::group_tiles {

using namespace cuda_common;

struct Map {
  int end;                    // of its tiles
  const void *data, *scales;  // packed_units.h
  float tensor_scale;
  Values y;  // [tokens, out]
  int out;
};

struct Job {
  const uint16_t* x;  // [tokens, in]
  Map maps[ops::LinearGroup::kMostMaps];
  int64_t in;
  int num_tokens;
  FastDivisor token_tiles;  // of kTileTokens
  float limit;              // of swiglu
};

inline Job job_of(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args) {
  Job job{};
  job.x = static_cast<const uint16_t*>(args.x.data);
  job.in = desc.maps.front().in;
  job.num_tokens = static_cast<int>(args.num_tokens);
  job.token_tiles = FastDivisor(static_cast<uint32_t>(ceil_div<int64_t>(args.num_tokens, kTileTokens)));
  int end = 0;
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    const ops::WeightView& weight = args.weights[i];
    const int out = static_cast<int>(desc.maps[i].out);
    end += ceil_div(out, kTileRows);
    job.maps[i] = {end, weight.data, weight.block_scales, weight.tensor_scale, values_of(args.y[i]), out};
  }
  if (desc.swiglu) job.limit = desc.swiglu->limit;
  return job;
}

// Of the tiles of 8 tokens, gate's and up's together: GatedTiles; else MapTiles.
inline int row_tiles_of(const ops::LinearGroup::Desc& desc, const Job& job) {
  return job.maps[desc.swiglu ? 0 : desc.maps.size() - 1].end;
}

// A tile's rows, counted over all maps, and its 8 tokens.
struct RowsAndTokens {
  int row_tile, first_token;
};
__device__ inline RowsAndTokens rows_and_tokens(const Job& job, int tile) {
  const uint32_t row_tile = job.token_tiles.quotient(static_cast<uint32_t>(tile));
  const uint32_t token_tile = static_cast<uint32_t>(tile) - row_tile * job.token_tiles.divisor();
  return {static_cast<int>(row_tile), static_cast<int>(token_tile) * kTileTokens};
}
// This lane's token of a tile's 8.
__device__ inline const uint16_t* inputs_from(const Job& job, int first_token) {
  const int token = min(first_token + static_cast<int>(threadIdx.x) % kWarp / 4, job.num_tokens - 1);
  return job.x + token * job.in;
}

// Tiles of 16 rows, map by map, each for 8 tokens after another.
template <class Share>
class MapTiles {
 public:
  static constexpr int kPasses = 1;
  struct Place {
    int map, first_row, first_token;
  };

  __device__ explicit MapTiles(const Job& job) : job_(job) {}

  __device__ Place place(int tile) const {
    const RowsAndTokens at = rows_and_tokens(job_, tile);
    int map = 0, begin = 0;
    while (at.row_tile >= job_.maps[map].end) begin = job_.maps[map++].end;
    return {map, (at.row_tile - begin) * kTileRows, at.first_token};
  }
  __device__ TileWeights weights(const Place& place, int) const {
    const Map& map = job_.maps[place.map];
    return {map.data, map.scales, place.first_row, map.out};
  }
  __device__ const uint16_t* inputs(const Place& place) const { return inputs_from(job_, place.first_token); }
  struct Ticket {};
  __device__ Ticket ticket(const Place&, int) const { return {}; }
  __device__ void store(const Place& place, int at, const float (&sums)[1], Ticket) const {
    const Map& map = job_.maps[place.map];
    const int row = place.first_row + streamed_row(at), token = place.first_token + streamed_token(at);
    if (row >= map.out || token >= job_.num_tokens) return;
    map.y.store(static_cast<int64_t>(token) * map.out + row, sums[0] * Share::kFactor * map.tensor_scale);
  }

 private:
  const Job& job_;
};

// Tiles of 16 rows of gate and up, the first two maps, each for 8 tokens after another.
template <class Share>
class GatedTiles {
 public:
  static constexpr int kPasses = 2;
  struct Place {
    int first_row, first_token;
  };

  __device__ explicit GatedTiles(const Job& job) : job_(job) {}

  __device__ Place place(int tile) const {
    const RowsAndTokens at = rows_and_tokens(job_, tile);
    return {at.row_tile * kTileRows, at.first_token};
  }
  __device__ TileWeights weights(const Place& place, int pass) const {
    const Map& map = job_.maps[pass];
    return {map.data, map.scales, place.first_row, map.out};
  }
  __device__ const uint16_t* inputs(const Place& place) const { return inputs_from(job_, place.first_token); }
  struct Ticket {};
  __device__ Ticket ticket(const Place&, int) const { return {}; }
  __device__ void store(const Place& place, int at, const float (&sums)[2], Ticket) const {
    const Map &gate = job_.maps[0], &up = job_.maps[1];
    const int row = place.first_row + streamed_row(at), token = place.first_token + streamed_token(at);
    if (row >= gate.out || token >= job_.num_tokens) return;
    const auto rounded = [&](const Map& map, float sum) {
      return round_to(true, sum * Share::kFactor * map.tensor_scale);
    };
    gate.y.store(static_cast<int64_t>(token) * gate.out + row,
                 swiglu_value(rounded(gate, sums[0]), rounded(up, sums[1]), job_.limit));
  }

 private:
  const Job& job_;
};

}  // namespace tessera::backends::cuda::group_tiles
