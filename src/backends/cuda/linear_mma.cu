// SPDX-License-Identifier: Apache-2.0
// linear on tensor cores. What and bound: at few tokens the weights are read once at the memory's speed; weights are
// the A operand, so that 8 tokens fill a product. K is cut into chunks of 512 (docs/contracts/numerics.md, section 4):
// a chunk is one chain of products from zero (a chain per 128 columns, times its scale, where FP8 blocks have one),
// chunk sums add in ascending order. The warps of a thread block take chunks by turns; neither their number nor the
// tile of tokens changes a sum.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/weight_shares.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kWarp = 32, kTileRows = 16, kTileTokens = 8, kChunk = 512, kMaxWarps = 8;
constexpr int kTileSums = kTileRows * kTileTokens;

struct Job {
  const uint16_t* x;  // [tokens, groups * in]
  const void *data, *scales;
  float tensor_scale;
  Values y;  // [tokens, groups * out]
  int64_t in, out, groups, num_tokens;
};

// What a lane multiplies: its two weight rows, and a token per tile.
template <int kTiles>
struct Operands {
  int64_t rows[2];
  const uint16_t* x[kTiles];  // null: no such token
};

// sums[tile] += the products of 128 columns from `k` on (k is the lane's own).
template <ops::WeightFormat kFormat, int kTiles>
__device__ void add_block(const WeightShare<kFormat>& share, const Operands<kTiles>& operands, int64_t width, int64_t k,
                          float (&sums)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kShareColumns / 8; ++i) {
    uint32_t w[2][4];
    share.decode(0, i, w[0]);
    share.decode(1, i, w[1]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint4 v{0, 0, 0, 0};
      if (operands.x[tile] != nullptr && k + 8 * i < width) {
        v = __ldg(reinterpret_cast<const uint4*>(operands.x[tile] + k) + i);
      }
      uint32_t b[4] = {v.x, v.y, v.z, v.w};
      if constexpr (WeightShare<kFormat>::kIsSplit) {
        b[0] = __byte_perm(v.x, v.z, 0x5410), b[1] = __byte_perm(v.x, v.z, 0x7632);
        b[2] = __byte_perm(v.y, v.w, 0x5410), b[3] = __byte_perm(v.y, v.w, 0x7632);
      }
      ptx::mma_bf16(sums[tile], w[0][0], w[1][0], w[0][1], w[1][1], b[0], b[1]);
      ptx::mma_bf16(sums[tile], w[0][2], w[1][2], w[0][3], w[1][3], b[2], b[3]);
    }
  }
}

// sums = the chunk's, from column `begin` on.
template <ops::WeightFormat kFormat, bool kIsWide, int kTiles>
__device__ void sum_chunk(const Job& job, const Operands<kTiles>& operands, int64_t begin, float (&sums)[kTiles][4]) {
  using Share = WeightShare<kFormat>;
#pragma unroll
  for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] = 0;
  const int64_t first = begin + threadIdx.x % 4 * kShareColumns;
#pragma unroll
  for (int at = 0; at < kChunk / kShareBlock; at += Share::kInFlight) {
    Share shares[Share::kInFlight];
#pragma unroll
    for (int n = 0; n < Share::kInFlight; ++n) {
      shares[n].template load<kIsWide>(job.data, job.scales, job.in, operands.rows, first + (at + n) * kShareBlock);
    }
#pragma unroll
    for (int n = 0; n < Share::kInFlight; ++n) {
      const int64_t k = first + (at + n) * kShareBlock;
      if constexpr (Share::kScaledSum) {
        float parts[kTiles][4] = {};
        add_block(shares[n], operands, job.in, k, parts);
#pragma unroll
        for (int i = 0; i < kTiles * 4; ++i) sums[i / 4][i % 4] += parts[i / 4][i % 4] * shares[n].scale(i % 4 / 2);
      } else {
        add_block(shares[n], operands, job.in, k, sums);
      }
    }
  }
}

// Grid: tiles of 16 rows, group by group; by tiles of 8 * kTiles tokens. A warp per chunk at a time.
template <ops::WeightFormat kFormat, int kTiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp) linear_mma_kernel(Job job) {
  __shared__ float s_parts[kMaxWarps][kTiles * kTileSums];  // chunk sums, as lanes hold them
  __shared__ float s_sums[kTiles * kTileSums];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
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

  const int num_chunks = static_cast<int>((job.in + kChunk - 1) / kChunk);
  for (int begin = 0; begin < num_chunks; begin += num_warps) {
    if (begin + warp < num_chunks) {
      float sums[kTiles][4];
      const int64_t first = static_cast<int64_t>(begin + warp) * kChunk;
      if (job.in % kShareColumns == 0) {
        sum_chunk<kFormat, true>(job, operands, first, sums);
      } else {
        sum_chunk<kFormat, false>(job, operands, first, sums);
      }
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) s_parts[warp][i * kWarp + lane] = sums[i / 4][i % 4];
    }
    __syncthreads();
    const int count = min(num_warps, num_chunks - begin);
    for (int at = static_cast<int>(threadIdx.x); at < kTiles * kTileSums; at += static_cast<int>(blockDim.x)) {
      float sum = begin == 0 ? 0.0f : s_sums[at];
      for (int part = 0; part < count; ++part) sum += s_parts[part][at];
      s_sums[at] = sum;
    }
    __syncthreads();
  }

  for (int at = static_cast<int>(threadIdx.x); at < kTiles * kTileSums; at += static_cast<int>(blockDim.x)) {
    const int held = at / kWarp, holder = at % kWarp;  // sum `held` of lane `holder`
    const int64_t row = first_row + holder / 4 + held % 4 / 2 * 8;
    const int64_t token = first_token + held / 4 * kTileTokens + holder % 4 * 2 + held % 2;
    if (row >= job.out || token >= job.num_tokens) continue;
    job.y.store(token * num_rows + group * job.out + row,
                s_sums[at] * WeightShare<kFormat>::kFactor * job.tensor_scale);
  }
}

template <ops::WeightFormat kFormat>
void launch_for(const Job& job, device::Queue& queue) {
  const unsigned row_tiles = static_cast<unsigned>(job.groups * ceil_div<int64_t>(job.out, kTileRows));
  const unsigned warps = static_cast<unsigned>(std::clamp<int64_t>(ceil_div<int64_t>(job.in, kChunk), 1, kMaxWarps));
  const auto start = [&](auto kernel, int64_t tokens) {
    const dim3 grid(row_tiles, static_cast<unsigned>(ceil_div(job.num_tokens, tokens)));
    launch("linear_mma", queue, kernel, grid, warps * kWarp, 0, job);
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
