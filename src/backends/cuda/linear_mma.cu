// SPDX-License-Identifier: Apache-2.0
// linear on tensor cores. What and bound: at few tokens the weights are read once at the memory's speed.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/values.cuh"

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

template <ops::WeightFormat kFormat>
void launch_for(const Job& job, device::Queue& queue) {
  const unsigned row_tiles = static_cast<unsigned>(job.groups * ceil_div<int64_t>(job.out, kTileRows));
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
