// SPDX-License-Identifier: Apache-2.0
// mhc_pre and mhc_head, two kernels each: a thread block per row of fn and one for the sum of squares, all of whose
// threads bring products and half a warp of which adds them in the order of the contract; then a thread block per
// token.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kS = ops::kHcStreams;
constexpr int kBlock = 256, kTile = 2048;  // products that are in shared memory at once

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

// Grid: rows of fn, and behind them the streams themselves, by tokens.
__global__ void __launch_bounds__(kBlock) sum_products(Job job) {
  __shared__ float s_products[kTile];
  wait_for_previous();
  const int64_t t = job.rows == nullptr ? blockIdx.y : job.rows[blockIdx.y];
  const int64_t width = kS * job.hidden, base = t * width;
  const bool is_row = blockIdx.x + 1 < gridDim.x;
  const float* fn = job.fn + blockIdx.x * width;
  float sum = 0;
  for (int64_t begin = 0; begin < width; begin += kTile) {
    const int count = static_cast<int>(min(int64_t{kTile}, width - begin));
    for (int i = threadIdx.x; i < count; i += kBlock) {
      const float value = job.x[base + begin + i];
      s_products[i] = (is_row ? fn[begin + i] : value) * value;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
#pragma unroll 16
      for (int i = threadIdx.x % kLanes; i < count; i += kLanes) sum += s_products[i];
    }
    __syncthreads();
  }
  if (threadIdx.x >= 32) return;
  sum = add_lanes(sum);
  if (threadIdx.x == 0) job.sums[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// Grid: tokens.
template <int kCoefficients>
__global__ void __launch_bounds__(kBlock) mix(Job job) {
  __shared__ float s_m[kCoefficients + 1], s_pre[kS];
  wait_for_previous();
  const int64_t row = blockIdx.x, t = job.rows == nullptr ? row : job.rows[row];
  const int64_t width = kS * job.hidden, base = t * width;
  const int lane = threadIdx.x % kLanes;
  if (threadIdx.x <= kCoefficients) s_m[threadIdx.x] = job.sums[row * (kCoefficients + 1) + threadIdx.x];
  __syncthreads();
  const float rr = 1 / sqrtf(s_m[kCoefficients] / static_cast<float>(width) + job.norm_eps);
  if (threadIdx.x < 32) {
    const auto logit = [&](int c, float scale) { return s_m[c] * rr * scale + job.base[c]; };
    const int j = lane % kS;
    if (threadIdx.x < kS) s_pre[j] = sigmoid(logit(j, job.scale[0])) + job.hc_eps;
    if constexpr (kCoefficients > kS) {
      if (threadIdx.x < kS) job.post[row * kS + j] = 2 * sigmoid(logit(kS + j, job.scale[1]));
      const float c = sinkhorn(logit(2 * kS + lane, job.scale[2]), lane, job.iterations, job.hc_eps);
      if (threadIdx.x < kLanes) job.comb[row * kS * kS + lane] = c;
    }
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < job.hidden; i += kBlock) {
    float y = 0;
    for (int j = 0; j < kS; ++j) y += s_pre[j] * job.x[base + j * job.hidden + i];
    job.y.store(row * job.hidden + i, y);
  }
}

template <int kCoefficients>
void run(const char* name, const Job& job, int64_t num_rows, device::Queue& queue) {
  launch(name, queue, sum_products, dim3(kCoefficients + 1, static_cast<unsigned>(num_rows)), kBlock, 0, job);
  launch(name, queue, mix<kCoefficients>, grid_for(num_rows, 1), kBlock, 0, job);
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
