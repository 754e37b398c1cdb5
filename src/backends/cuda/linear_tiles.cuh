// SPDX-License-Identifier: Apache-2.0
#pragma once
// A linear map's job on tensor cores, and its tiles for few tokens as weight_stream.cuh wants them.
#include <cstdint>

#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_stream.cuh"
#include "ops/linear/linear.h"

namespace tessera::backends::cuda::linear_tiles {

using namespace cuda_common;

struct Job {
  const uint16_t* x;  // [tokens, groups * in]
  const void *data, *scales;
  float tensor_scale;
  Values y;  // [tokens, groups * out]
  int64_t in, out, groups, num_tokens;
  FastDivisor tiles_per_group;
  FastDivisor token_tiles;  // of kTileTokens
};

inline Job job_of(const ops::Linear::Desc& desc, const ops::Linear::Args& args) {
  return {static_cast<const uint16_t*>(args.x.data),
          args.weight.data,
          args.weight.block_scales,
          args.weight.tensor_scale,
          values_of(args.y),
          desc.in,
          desc.out,
          desc.groups,
          args.num_tokens,
          FastDivisor(static_cast<uint32_t>(ceil_div<int64_t>(desc.out, kTileRows))),
          FastDivisor(static_cast<uint32_t>(ceil_div<int64_t>(args.num_tokens, kTileTokens)))};
}

// Tiles of 16 rows, group by group, each for 8 tokens after another (weight_stream.cuh): neighbours find the weights in
// L2.
template <class Share>
class Tiles {
 public:
  static constexpr int kPasses = 1;
  struct Place {
    int64_t group, first_row;  // in the group
    int64_t first_token;
  };

  __device__ explicit Tiles(const Job& job) : job_(job) {}

  __device__ Place place(int tile) const {
    const uint32_t at = job_.token_tiles.quotient(static_cast<uint32_t>(tile));
    const uint32_t token_tile = static_cast<uint32_t>(tile) - at * job_.token_tiles.divisor();
    const uint32_t group = job_.tiles_per_group.quotient(at);
    return {group, static_cast<int64_t>((at - group * job_.tiles_per_group.divisor()) * kTileRows),
            static_cast<int64_t>(token_tile) * kTileTokens};
  }
  __device__ TileWeights weights(const Place& place, int) const {
    const int64_t before = place.group * job_.out;
    return {job_.data, job_.scales, before + place.first_row, before + job_.out};
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    const int64_t token = min(place.first_token + threadIdx.x % kWarp / 4, job_.num_tokens - 1);
    return job_.x + (token * job_.groups + place.group) * job_.in;
  }
  struct Ticket {};
  __device__ Ticket ticket(const Place&, int) const { return {}; }
  __device__ void store(const Place& place, int at, const float (&sums)[1], Ticket) const {
    const int64_t row = place.first_row + streamed_row(at), token = place.first_token + streamed_token(at);
    if (row >= job_.out || token >= job_.num_tokens) return;
    job_.y.store((token * job_.groups + place.group) * job_.out + row, sums[0] * Share::kFactor * job_.tensor_scale);
  }

 private:
  const Job& job_;
};

}  // namespace tessera::backends::cuda::linear_tiles
