// SPDX-License-Identifier: Apache-2.0
// mhc_pre and mhc_head, two kernels each: a thread block per row of fn and one for the sum of squares; then thread
// blocks that mix a token's streams, and one for the coefficients of what comes after the layer.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kS = ops::kHcStreams;
constexpr int kBlock = 512;
constexpr int kMixBlock = 128, kMixChannels = 4 * kMixBlock;

struct Job {
  Values x;             // [tokens, 4, hidden]
  const int32_t* rows;  // which tokens; null: all
  const float *fn, *base, *scale;
  float* sums;         // [rows, kCoefficients + 1], the workspace
  Values y;            // [rows, hidden]
  float *post, *comb;  // null: the head
  int64_t hidden;
  int iterations;
  float hc_eps, norm_eps;
};

__device__ float sigmoid(float x) {
  return 1 / (1 + exp_rounded(-x));
}

// Lane 4 j + k holds C[j][k]; every sum ascends, as in sinkhorn_reference. All of the warp takes part.
__device__ float sinkhorn(float c, int lane, int iterations, float eps) {
  const int j = lane / kS, k = lane % kS;
  const auto row_value = [&](int i) { return __shfl_sync(~0u, c, j * kS + i, kLanes); };
  const auto column_value = [&](int i) { return __shfl_sync(~0u, c, i * kS + k, kLanes); };
  const auto divide = [&](const auto& value_at, float added) {
    float sum = 0;
    for (int i = 0; i < kS; ++i) sum += value_at(i);
    c /= sum + added;
  };
  float max = row_value(0);
  for (int i = 1; i < kS; ++i) {
    const float other = row_value(i);
    max = max < other ? other : max;
  }
  c = exp_rounded(c - max);
  divide(row_value, 0.0f);
  c += eps;
  divide(column_value, eps);
  for (int i = 1; i < iterations; ++i) {
    divide(row_value, eps);
    divide(column_value, eps);
  }
  return c;
}

// Four values of a stream, at a multiple of four.
__device__ float4 load4(const Values& x, int64_t i) {
  if (!x.is_bf16) return *reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + i);
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(x.data) + i);
  return {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xFFFF0000), __uint_as_float(words.y << 16),
          __uint_as_float(words.y & 0xFFFF0000)};
}

// Grid: rows of fn, and behind them the streams themselves, by tokens. A thread adds four columns of every 4 kBlock,
// then lanes are added by halves, then warps in turn: an order of its own that no batch changes.
__global__ void __launch_bounds__(kBlock) sum_products(Job job) {
  __shared__ float s_warps[kBlock / 32];
  constexpr int kLoads = 8;  // of four columns that are on their way at once
  const bool is_row = blockIdx.x + 1 < gridDim.x;
  const int64_t width = kS * job.hidden, first = 4 * static_cast<int64_t>(threadIdx.x);
  const float* fn = job.fn + blockIdx.x * width;
  float4 values[kLoads], factors[kLoads];
  const auto load_factors = [&](int64_t begin) {
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t i = begin + n * (4 * kBlock);
      if (is_row && i < width) factors[n] = *reinterpret_cast<const float4*>(fn + i);
    }
  };
  load_factors(first);
  wait_for_previous();
  const int64_t t = job.rows == nullptr ? blockIdx.y : job.rows[blockIdx.y], base = t * width;
  float sum = 0;
  for (int64_t begin = first; begin < width; begin += kLoads * 4 * kBlock) {
    if (begin != first) load_factors(begin);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int64_t i = begin + n * (4 * kBlock);
      if (i < width) values[n] = load4(job.x, base + i);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      if (begin + n * (4 * kBlock) >= width) break;
      const float4 a = values[n], b = is_row ? factors[n] : a;
      sum += a.x * b.x;
      sum += a.y * b.y;
      sum += a.z * b.z;
      sum += a.w * b.w;
    }
  }
  for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(~0u, sum, half);
  if (threadIdx.x % 32 == 0) s_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kBlock / 32; ++warp) sum += s_warps[warp];
  job.sums[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// Grid: tokens by pieces of kMixChannels; where there are coefficients of the layer's output, they are a piece of their
// own.
template <int kCoefficients>
__global__ void __launch_bounds__(kMixBlock) mix(Job job) {
  __shared__ float s_m[kCoefficients + 1], s_pre[kS];
  const int lane = threadIdx.x % kLanes, j_of_lane = lane % kS;
  const bool is_piece = blockIdx.y * int64_t{kMixChannels} < job.hidden;
  float base_pre = 0, base_post = 0, base_comb = 0, scales[3] = {};
  if (is_piece) {
    base_pre = job.base[j_of_lane], scales[0] = job.scale[0];
  } else if constexpr (kCoefficients > kS) {
    base_post = job.base[kS + j_of_lane], scales[1] = job.scale[1];
    base_comb = job.base[2 * kS + lane], scales[2] = job.scale[2];
  }
  wait_for_previous();
  const int64_t row = blockIdx.x, t = job.rows == nullptr ? row : job.rows[row];
  const int64_t width = kS * job.hidden, base = t * width;
  const int64_t first = blockIdx.y * int64_t{kMixChannels} + threadIdx.x;
  constexpr int kEach = kMixChannels / kMixBlock;
  float values[kEach][kS];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int64_t i = first + n * kMixBlock;
    if (i >= job.hidden) break;
#pragma unroll
    for (int j = 0; j < kS; ++j) values[n][j] = job.x[base + j * job.hidden + i];
  }
  if (threadIdx.x <= kCoefficients) s_m[threadIdx.x] = job.sums[row * (kCoefficients + 1) + threadIdx.x];
  __syncthreads();
  const float rr = 1 / sqrtf(s_m[kCoefficients] / static_cast<float>(width) + job.norm_eps);
  if (!is_piece) {
    if constexpr (kCoefficients > kS) {
      if (threadIdx.x >= 32) return;
      const float post = s_m[kS + j_of_lane] * rr * scales[1] + base_post;
      if (threadIdx.x < kS) job.post[row * kS + j_of_lane] = 2 * sigmoid(post);
      const float c = sinkhorn(s_m[2 * kS + lane] * rr * scales[2] + base_comb, lane, job.iterations, job.hc_eps);
      if (threadIdx.x < kLanes) job.comb[row * kS * kS + lane] = c;
    }
    return;
  }
  if (threadIdx.x < kS) s_pre[threadIdx.x] = sigmoid(s_m[threadIdx.x] * rr * scales[0] + base_pre) + job.hc_eps;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int64_t i = first + n * kMixBlock;
    if (i >= job.hidden) break;
    float y = 0;
#pragma unroll
    for (int j = 0; j < kS; ++j) y += s_pre[j] * values[n][j];
    job.y.store(row * job.hidden + i, y);
  }
}

template <int kCoefficients>
void run(const char* name, const Job& job, int64_t num_rows, device::Queue& queue) {
  launch(name, queue, sum_products, dim3(kCoefficients + 1, static_cast<unsigned>(num_rows)), kBlock, 0, job);
  const int64_t pieces = ceil_div<int64_t>(job.hidden, kMixChannels) + (kCoefficients > kS ? 1 : 0);
  launch(name, queue, mix<kCoefficients>, dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(pieces)),
         kMixBlock, 0, job);
}

}  // namespace

int64_t mhc_workspace(const ops::MhcDesc&, int64_t max_tokens) {
  return max_tokens * (ops::kHcCoefficients + 1) * static_cast<int64_t>(sizeof(float));
}

void mhc_pre(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, device::Queue& queue) {
  const Job job{values_of(args.x),
                nullptr,
                args.fn,
                args.base,
                args.scale,
                static_cast<float*>(args.workspace),
                values_of(args.y),
                args.post,
                args.comb,
                desc.hidden,
                desc.sinkhorn_iterations,
                desc.hc_eps,
                desc.norm_eps};
  run<ops::kHcCoefficients>("mhc_pre", job, args.num_tokens, queue);
}

void mhc_head(const ops::MhcDesc& desc, const ops::MhcHead::Args& args, device::Queue& queue) {
  const Job job{values_of(args.x), args.rows, args.fn, args.base,   args.scale, static_cast<float*>(args.workspace),
                values_of(args.h), nullptr,   nullptr, desc.hidden, 0,          desc.hc_eps,
                desc.norm_eps};
  run<kS>("mhc_head", job, args.num_rows, queue);
}

}  // namespace tessera::backends::cuda
