// SPDX-License-Identifier: Apache-2.0
// mhc_pre and mhc_head: a thread block per token, half a warp per row of fn and one for the sum of squares.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kS = ops::kHcStreams;
constexpr int kBlock = 416;  // 26 halves of warps: 24 rows of fn, the sum of squares, and one without work
static_assert(kBlock / kLanes > ops::kHcCoefficients);

struct Job {
  Values x;             // [tokens, 4, hidden]
  const int32_t* rows;  // which tokens; null: all
  const float *fn, *base, *scale;
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

template <int kCoefficients>
__global__ void __launch_bounds__(kBlock) mix(Job job) {
  wait_for_previous();
  __shared__ float s_m[kBlock / kLanes], s_pre[kS];
  const int64_t row = blockIdx.x, t = job.rows == nullptr ? row : job.rows[row];
  const int64_t width = kS * job.hidden, base = t * width;
  const int lane = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
  // Row `part` of fn; from kCoefficients on, the streams themselves: the sum of squares.
  const bool is_row = part < kCoefficients;
  static_assert(kCoefficients % 2 == 0);
  if (part <= kCoefficients + 1) {  // the other half of the last one's warp comes along
    float sum = 0;
    if (is_row) {
      const float* fn = job.fn + part * width;
#pragma unroll 16
      for (int64_t i = lane; i < width; i += kLanes) sum += fn[i] * job.x[base + i];
    } else {
#pragma unroll 16
      for (int64_t i = lane; i < width; i += kLanes) sum += job.x[base + i] * job.x[base + i];
    }
    sum = add_lanes(sum);
    if (lane == 0) s_m[part] = sum;
  }
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

}  // namespace

void mhc_pre(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, device::Queue& queue) {
  const Job job{values_of(args.x), nullptr,      args.fn,   args.base,   args.scale,
                values_of(args.y), args.post,    args.comb, desc.hidden, desc.sinkhorn_iterations,
                desc.hc_eps,       desc.norm_eps};
  launch("mhc_pre", queue, mix<ops::kHcCoefficients>, grid_for(args.num_tokens, 1), kBlock, 0, job);
}

void mhc_head(const ops::MhcDesc& desc, const ops::MhcHead::Args& args, device::Queue& queue) {
  const Job job{values_of(args.x), args.rows, args.fn,     args.base, args.scale,  values_of(args.h),
                nullptr,           nullptr,   desc.hidden, 0,         desc.hc_eps, desc.norm_eps};
  launch("mhc_head", queue, mix<kS>, grid_for(args.num_rows, 1), kBlock, 0, job);
}

}  // namespace tessera::backends::cuda
