// SPDX-License-Identifier: Apache-2.0
// linear on tensor cores. What and bound: at few tokens the weights are read once at the memory's speed; up to 8 tokens
// they stream through shared memory (weight_ring.cuh), more load them into registers tile by tile. The sums are the
// same.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_ring.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

struct Job {
  const uint16_t* x;  // [tokens, groups * in]
  const void *data, *scales;
  float tensor_scale;
  Values y;  // [tokens, groups * out]
  int64_t in, out, groups, num_tokens;
};

// Grid: tiles of 16 rows, group by group; by tiles of 8 * kTiles tokens. A warp per chunk at a time.
template <ops::WeightFormat kFormat, int kTiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp) linear_mma_kernel(Job job) {
  wait_for_previous();
  __shared__ float s_parts[kMaxWarps][kTiles * kTileSums];  // chunk sums, as lanes hold them
  __shared__ float s_sums[kTiles * kTileSums];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t tiles_per_group = (job.out + kTileRows - 1) / kTileRows, num_rows = job.groups * job.out;
  const int64_t group = blockIdx.x / tiles_per_group, first_row = blockIdx.x % tiles_per_group * kTileRows;
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * (kTiles * kTileTokens);

  Operands<kTiles> operands;
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // rows that aren't there are the last one again
    operands.rows[r] = group * job.out + min(first_row + lane / 4 + 8 * r, job.out - 1);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t token = first_token + tile * kTileTokens + lane / 4;
    operands.x[tile] = token < job.num_tokens ? job.x + (token * job.groups + group) * job.in : nullptr;
  }

  sum_tile<kFormat>({job.data, job.scales, job.in}, operands, s_parts, s_sums);

  for (int at = static_cast<int>(threadIdx.x); at < kTiles * kTileSums; at += static_cast<int>(blockDim.x)) {
    const int64_t row = first_row + row_of_sum(at), token = first_token + token_of_sum(at);
    if (row >= job.out || token >= job.num_tokens) continue;
    job.y.store(token * num_rows + group * job.out + row,
                s_sums[at] * WeightShare<kFormat>::kFactor * job.tensor_scale);
  }
}

// Tiles of 16 rows, group by group (weight_ring.cuh).
template <ops::WeightFormat kFormat>
class Tiles {
 public:
  static constexpr int kPasses = 1;
  struct Place {
    int64_t group, first_row;  // in the group
  };

  __device__ explicit Tiles(const Job& job)
      : job_(job), tiles_per_group_((static_cast<unsigned>(job.out) + kTileRows - 1) / kTileRows) {}

  __device__ Place place(int tile) const {
    const unsigned group = static_cast<unsigned>(tile) / tiles_per_group_;
    return {group, static_cast<int64_t>((static_cast<unsigned>(tile) - group * tiles_per_group_) * kTileRows)};
  }
  __device__ TileWeights weights(const Place& place, int) const {
    const int64_t before = place.group * job_.out;
    return {job_.data, job_.scales, before + place.first_row, before + job_.out};
  }
  __device__ const uint16_t* inputs(const Place& place) const {
    const int64_t token = min(static_cast<int64_t>(threadIdx.x) % kWarp / 4, job_.num_tokens - 1);
    return job_.x + (token * job_.groups + place.group) * job_.in;
  }
  __device__ void store(const Place& place, int at, const float (&sums)[1]) const {
    const int64_t row = place.first_row + row_of_sum(at), token = token_of_sum(at);
    if (row >= job_.out || token >= job_.num_tokens) return;
    job_.y.store((token * job_.groups + place.group) * job_.out + row,
                 sums[0] * WeightShare<kFormat>::kFactor * job_.tensor_scale);
  }

 private:
  const Job& job_;
  const unsigned tiles_per_group_;
};

template <ops::WeightFormat kFormat, int kStages>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2) linear_stream_kernel(Job job, StreamShape shape, int num_tiles) {
  const Tiles<kFormat> tiles(job);
  WeightRing<kFormat, kStages, Tiles<kFormat>> ring(shape, num_tiles, tiles, dynamic_shared<char>());
  wait_for_previous();
  stream_tiles(shape, num_tiles, tiles, ring);
}

template <ops::WeightFormat kFormat>
void launch_for(const Job& job, device::Queue& queue) {
  if (job.num_tokens == 0) return;
  const unsigned row_tiles = static_cast<unsigned>(job.groups * ceil_div<int64_t>(job.out, kTileRows));
  if (job.num_tokens <= kTileTokens && can_stream(job.in)) {
    const StreamShape shape = stream_shape(job.in, row_tiles);
    const unsigned blocks = shape.blocks(row_tiles);
    const auto start = [&](auto kernel, int stages) {
      launch("linear_stream", queue, kernel, dim3(blocks), shape.threads(), shape.shared_bytes<kFormat>(stages), job,
             shape, static_cast<int>(row_tiles));
    };
    constexpr int kFew = kFewStages<kFormat>;
    if (kFew < kManyStages && static_cast<int>(blocks) <= multiprocessors() &&
        shape.shared_bytes<kFormat>(kManyStages) <= most_shared_bytes()) {
      start(linear_stream_kernel<kFormat, kManyStages>, kManyStages);
    } else {
      start(linear_stream_kernel<kFormat, kFew>, kFew);
    }
    return;
  }
  const auto start = [&](auto kernel, int64_t tokens) {
    const dim3 grid(row_tiles, static_cast<unsigned>(ceil_div(job.num_tokens, tokens)));
    launch("linear_mma", queue, kernel, grid, threads_for(job.in), 0, job);
  };
  if (job.num_tokens <= kTileTokens) {
    start(linear_mma_kernel<kFormat, 1>, kTileTokens);
  } else if (job.num_tokens <= 2 * kTileTokens) {
    start(linear_mma_kernel<kFormat, 2>, 2 * kTileTokens);
  } else {
    start(linear_mma_kernel<kFormat, 4>, 4 * kTileTokens);
  }
}

}  // namespace

bool linear_mma_supports(const ops::Linear::Desc& desc, std::string& why_not) {
  if (desc.input != ops::InputMode::kA16 || desc.activation != DType::kBF16) {
    why_not = "inputs are not plain BF16 (a16)";
  } else if (desc.format == ops::WeightFormat::kF32) {
    why_not = "weights are FP32";
  } else if (desc.in % 16 != 0) {
    why_not = "the input width is not a multiple of 16";
  } else {
    return true;
  }
  return false;
}

void linear_mma(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  const Job job{static_cast<const uint16_t*>(args.x.data),
                args.weight.data,
                args.weight.block_scales,
                args.weight.tensor_scale,
                values_of(args.y),
                desc.in,
                desc.out,
                desc.groups,
                args.num_tokens};
  switch (desc.format) {
    case ops::WeightFormat::kNvfp4:
      return launch_for<ops::WeightFormat::kNvfp4>(job, queue);
    case ops::WeightFormat::kFp8Block:
      return launch_for<ops::WeightFormat::kFp8Block>(job, queue);
    case ops::WeightFormat::kBf16:
      return launch_for<ops::WeightFormat::kBf16>(job, queue);
    case ops::WeightFormat::kF32:
      break;  // declined
  }
}

}  // namespace tessera::backends::cuda
