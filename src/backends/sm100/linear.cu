// SPDX-License-Identifier: Apache-2.0
// linear and linear_group with NVFP4 weights and inputs: a kernel quantises the inputs into tiles, after their norm
// where one is before the maps, and for each map another multiplies them (block_scaled_sums.cuh).
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/map_groups.h"
#include "backends/cuda_common/ptx/float_pairs.cuh"
#include "backends/cuda_common/ptx/mma.cuh"
#include "backends/cuda_common/row_parts.cuh"
#include "backends/cuda_common/tiled_map.cuh"
#include "backends/sm100/block_scaled_sums.cuh"
#include "backends/sm100/kernels.h"

namespace tessera::backends::sm100 {

namespace {

using cuda_common::tile_tokens_of, cuda_common::Values;

struct LinearJob : cuda_common::TiledMap {
  Values x;             // [tokens, groups * in]
  char* tiles;          // [groups][token tiles] (input_tiles.cuh)
  float* factors;       // [groups, tokens up to a multiple of kFactorGroup]; of those that fill a tile too
  int32_t token_group;  // tiles are multiples of
};

constexpr int64_t kFactorGroup = 2 * InputTile::kGroup;

__device__ int64_t factor_at(const LinearJob& job, int64_t group, int64_t token) {
  return group * round_up<int64_t>(job.num_tokens, kFactorGroup) + token;
}

__device__ char* tile_of(const LinearJob& job, int64_t group, int64_t first_token) {
  const int64_t rows = round_up<int64_t>(job.num_tokens, job.token_group), tile = first_token / job.tile_tokens;
  const int64_t tiles = ceil_div<int64_t>(job.num_tokens, job.tile_tokens);
  const int atoms = InputTile::atoms(job.tile_tokens);
  return job.tiles + group * InputTile::bytes(rows, tiles * atoms, job.in) +
         InputTile::bytes(first_token, tile * atoms, job.in);
}

// By all threads of a block: values from x[begin] on become the inputs of a token of a group, which there may not be.
__device__ void quantize_token(const LinearJob& job, int64_t group, int64_t token, const Values& x, int64_t begin) {
  const int64_t first_token = token / job.tile_tokens * job.tile_tokens;
  const InputRow to(tile_of(job, group, first_token), round_up<int>(tile_tokens_of(job, first_token), job.token_group),
                    static_cast<int>(token - first_token));
  const bool is_there = token < job.num_tokens;
  const float g = quantize_into(to, x, begin, job.in, is_there);
  if (threadIdx.x == 0) job.factors[factor_at(job, group, token)] = g;
}

// Grid: tokens, up to a multiple of the job's group, by groups.
__global__ void __launch_bounds__(kQuantizeThreads) quantize_inputs(LinearJob job) {
  cuda_common::wait_for_previous();
  const int64_t token = blockIdx.x, group = blockIdx.y;
  quantize_token(job, group, token, job.x, (token * job.groups + group) * job.in);
}

// The same of one group, whose rows go through rms_norm before.
__global__ void __launch_bounds__(kQuantizeThreads) norm_and_quantize_inputs(LinearJob job, Values weight, float eps) {
  float* s_row = cuda_common::dynamic_shared<float>();  // [in]
  cuda_common::wait_for_previous();
  const int64_t token = blockIdx.x;
  if (token < job.num_tokens) cuda_common::norm_row(s_row, job.x, token * job.in, weight, job.in, eps);
  __syncthreads();
  quantize_token(job, 0, token, {s_row, false}, 0);
}

// Row tiles of a token tile of a group are neighbours, so that blocks at work share inputs.
template <int kTileTokens, int kTileBlocks = (kTileTokens > kMostTileTokens ? 2 : 1)>
class LinearTiles : public cuda_common::MapTiles {
 public:
  static constexpr int kMatrices = 1, kTokens = kTileTokens, kBlocks = kTileBlocks;
  __device__ explicit LinearTiles(const LinearJob& job)
      : MapTiles(job, kTileRows), job_(job), stride_(job.groups * job.out) {}

  __device__ int64_t width() const { return job_.in; }
  __device__ Place place(int tile, int rank) const {
    const int token_tile = tile / row_tiles_;
    return {token_tile / token_tiles_, int64_t{tile % row_tiles_} * kTileRows + rank * PackedTile::kRows,
            int64_t{token_tile % token_tiles_} * job_.tile_tokens};
  }
  __device__ const char* weights(const Place& place, int) const {
    // Where nobody has these rows, the last ones stand in for them.
    const int64_t row = min(place.first_row, (job_.out - 1) / PackedTile::kRows * PackedTile::kRows);
    return job_.data + PackedTile::offset(place.group * job_.out + row, job_.in);
  }
  __device__ const char* inputs(const Place& place) const { return tile_of(job_, place.group, place.first_token); }
  template <int kCount>
  __device__ void store(const Place& place, int row, int first_token, const float (&sums)[1][kCount]) const {
    const int64_t out_row = place.first_row + row;
    if (out_row >= job_.out) return;
    // All of them before the first store, behind which a load would wait: it could be of what is stored.
    float factors[kCount];
    load_numbers(factors, job_.factors + factor_at(job_, place.group, place.first_token) + first_token);
    // Sums of a tile's begin, which is worked out once, and of few instructions.
    const int64_t at = (place.first_token * job_.groups + place.group) * job_.out + out_row + first_token * stride_;
    const int tokens_left = tokens(place) - first_token;
    const auto store_all = [&](int count) {
      if (job_.y.is_bf16) {
        store_row(static_cast<uint16_t*>(job_.y.data) + at, count, factors, sums[0]);
      } else {
        store_row(static_cast<float*>(job_.y.data) + at, count, factors, sums[0]);
      }
    };
    if (tokens_left >= kCount) {
      store_all(kCount);  // a constant: no predicates
    } else {
      store_all(tokens_left);
    }
  }

 private:
  static constexpr int64_t kTileRows = kBlocks * PackedTile::kRows;
  // Of this thread's row: `count` neighbouring tokens.
  template <class Value, int kCount>
  __device__ void store_row(Value* to, int count, const float (&factors)[kCount], const float (&sums)[kCount]) const {
    namespace ptx = cuda_common::ptx;
    const float2 scale = {job_.tensor_scale, job_.tensor_scale};
#pragma unroll
    for (int j = 0; j < kCount; j += 2, to += 2 * stride_) {
      if (j >= count) break;
      const float2 factor = ptx::multiply_two({factors[j], factors[j + 1]}, scale);
      const float2 values = ptx::multiply_two({sums[j], sums[j + 1]}, factor);
      if constexpr (sizeof(Value) == sizeof(float)) {
        to[0] = values.x;
        if (j + 1 < count) to[stride_] = values.y;
      } else {
        const uint32_t both = ptx::round_to_bf16x2(values.x, values.y);
        to[0] = static_cast<Value>(both);
        if (j + 1 < count) to[stride_] = static_cast<Value>(both >> 16);
      }
    }
  }

  const LinearJob& job_;
  const int64_t stride_;  // from a token's outputs to the next one's
};

// The workspace: input tiles, then factors.
int64_t tile_bytes(const ops::Linear::Desc& desc, int64_t num_tokens) {
  return desc.groups * InputTile::bytes(round_up<int64_t>(num_tokens, 2 * InputTile::kGroup),
                                        ceil_div<int64_t>(num_tokens, kFewTileTokens), desc.in);
}

// All of a map but the tiles' places.
LinearJob job_of(const ops::Linear::Desc& desc, const ops::Linear::Args& args, int32_t tile_tokens) {
  char* workspace = static_cast<char*>(args.workspace);
  return {cuda_common::tiled_map(desc, args, tile_tokens), cuda_common::values_of(args.x), workspace,
          reinterpret_cast<float*>(workspace + tile_bytes(desc, args.num_tokens)),
          tile_tokens > kMostTileTokens ? 2 * InputTile::kGroup : InputTile::kGroup};
}

dim3 input_rows(const LinearJob& job) {
  return dim3(static_cast<unsigned>(round_up<int64_t>(job.num_tokens, job.token_group)),
              static_cast<unsigned>(job.groups));
}

// Inputs are in their tiles.
void multiply(const ops::Linear::Desc& desc, const LinearJob& job, int64_t multiprocessors, device::Queue& queue) {
  const int64_t tiles = linear_tiles(desc, job.num_tokens, job.tile_tokens), pairs = multiprocessors / 2;
  if (job.tile_tokens == kWidePairTileTokens) {
    using TwoPairs = LinearTiles<kWidePairTileTokens, 4>;
    const int64_t clusters = clusters_at_once<TwoPairs, LinearJob>();
    if (takes_two_pairs(desc, job.num_tokens, multiprocessors, clusters)) {
      launch_sums<TwoPairs>("linear_tcgen05_two_pairs", queue, two_pair_tiles(desc, job.num_tokens), job, clusters);
    } else {
      launch_sums<LinearTiles<kWidePairTileTokens>>("linear_tcgen05_pair", queue, tiles, job, pairs);
    }
  } else if (job.tile_tokens == kPairTileTokens) {
    launch_sums<LinearTiles<kPairTileTokens>>("linear_tcgen05_pair", queue, tiles, job, pairs);
  } else if (job.tile_tokens == kFewTileTokens) {
    launch_sums<LinearTiles<kFewTileTokens>>("linear_tcgen05", queue, tiles, job, multiprocessors);
  } else {
    launch_sums<LinearTiles<kMostTileTokens>>("linear_tcgen05", queue, tiles, job, multiprocessors);
  }
}

}  // namespace

bool linear_supports(const ops::Linear::Desc& desc, std::string& why_not) {
  if (desc.format != ops::WeightFormat::kNvfp4 || desc.input != ops::InputMode::kA4) {
    why_not = "weights and inputs are not both NVFP4 (a4)";
  } else if (desc.in % numeric::kNvfp4Block != 0) {
    why_not = "the input width is not a multiple of 16";
  } else if (desc.groups > 1 && desc.out % PackedTile::kRows != 0) {
    why_not = "a group's outputs are no multiple of 128";
  } else {
    return ops::linear_reference_supports(desc, why_not);
  }
  return false;
}

int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens) {
  return tile_bytes(desc, max_tokens) +
         desc.groups * round_up<int64_t>(max_tokens, kFactorGroup) * static_cast<int64_t>(sizeof(float));
}

void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t multiprocessors = cuda_common::multiprocessors();
  const LinearJob job = job_of(desc, args, linear_tile_tokens(desc, args.num_tokens, multiprocessors));
  cuda_common::launch("quantize_inputs", queue, quantize_inputs, input_rows(job), kQuantizeThreads, 0, job);
  multiply(desc, job, multiprocessors, queue);
}

bool linear_group_supports(const ops::LinearGroup::Desc& desc, std::string& why_not) {
  return cuda_common::map_group_supports(desc, linear_supports, cuda::rms_norm_supports, why_not);
}

int64_t linear_group_workspace(const ops::LinearGroup::Desc& desc, int64_t max_tokens) {
  return linear_workspace(desc.maps.front(), max_tokens);  // of their one input
}

void linear_group(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t multiprocessors = cuda_common::multiprocessors();
  const int32_t tile_tokens = cuda_common::map_group_tile_tokens(
      desc, [&](const ops::Linear::Desc& map) { return linear_tile_tokens(map, args.num_tokens, multiprocessors); });
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    const LinearJob job = job_of(desc.maps[i], ops::linear_of_group(args, i), tile_tokens);
    if (i == 0 && desc.norm) {
      cuda_common::launch("norm_and_quantize_inputs", queue, norm_and_quantize_inputs, input_rows(job),
                          kQuantizeThreads, static_cast<size_t>(job.in) * sizeof(float), job,
                          cuda_common::values_of(args.norm_weight), desc.norm->eps);
    } else if (i == 0) {
      cuda_common::launch("quantize_inputs", queue, quantize_inputs, input_rows(job), kQuantizeThreads, 0, job);
    }
    multiply(desc.maps[i], job, multiprocessors, queue);
  }
  if (desc.swiglu) cuda::swiglu(*desc.swiglu, ops::swiglu_of_group(args), queue);
}

}  // namespace tessera::backends::sm100
