// SPDX-License-Identifier: Apache-2.0
// router: a thread block per token. An expert is chosen where fewer than top_k others come before it, so ids need no
// sorting and ties no care.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kMaxThreads = 1024, kShare = 4;

struct Job {
  const float *logits, *bias;
  const int32_t *table, *token_ids;  // table null: learned
  int32_t* experts;
  float* weights;
  int32_t num_experts, top_k;
  bool is_normalized;
  float scaling;
};

// max(x, 0) + log1p(exp(-|x|)), then the square root; each function rounded once. A NaN stays.
__device__ float sqrt_softplus(float x) {
  const float log = static_cast<float>(log1p(static_cast<double>(exp_rounded(-fabsf(x)))));
  return sqrtf((x < 0 ? 0 : x) + log);
}

// Whether expert a of score x is chosen before b of score y: larger first, ties to the lower id, NaN last.
__device__ bool is_before(float x, int32_t a, float y, int32_t b) {
  const bool is_x_nan = x != x, is_y_nan = y != y;
  if (is_x_nan != is_y_nan) return is_y_nan;
  return x > y || (!(x < y) && a < b);
}

// Four threads count what comes before an expert.
__global__ void __launch_bounds__(kMaxThreads) router_kernel(Job job) {
  extern __shared__ float s_scores[];                                     // [num_experts] what is compared
  float* s_raw = s_scores + job.num_experts;                              // [num_experts] what weighs
  float* s_weights = s_raw + job.num_experts;                             // [top_k]
  int32_t* s_chosen = reinterpret_cast<int32_t*>(s_weights + job.top_k);  // [top_k]
  wait_for_previous();
  const int64_t t = blockIdx.x;
  const float* logits = job.logits + t * job.num_experts;
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  for (int32_t e = i; e < job.num_experts; e += static_cast<int32_t>(blockDim.x)) {
    s_raw[e] = sqrt_softplus(logits[e]);
    s_scores[e] = job.table == nullptr ? s_raw[e] + job.bias[e] : 0;
  }
  if (job.table != nullptr && i < job.top_k) {
    s_chosen[i] = job.table[static_cast<int64_t>(job.token_ids[t]) * job.top_k + i];
  }
  __syncthreads();
  const int32_t experts_at_once = static_cast<int32_t>(blockDim.x) / kShare;
  for (int32_t first = 0; job.table == nullptr && first < job.num_experts; first += experts_at_once) {
    const int32_t e = min(first + i / kShare, job.num_experts - 1);
    const float score = s_scores[e];
    int32_t rank = 0;
#pragma unroll 8
    for (int32_t other = i % kShare; other < job.num_experts; other += kShare) {
      rank += is_before(s_scores[other], other, score, e);
    }
    for (int step = kShare / 2; step > 0; step /= 2) rank += __shfl_xor_sync(~0u, rank, step);
    if (rank < job.top_k) s_chosen[rank] = e;
  }
  __syncthreads();
  if (i < job.top_k) {
    const int32_t e = s_chosen[i];
    int32_t at = 0;  // chosen experts of lower id
    for (int32_t j = 0; j < job.top_k; ++j) at += s_chosen[j] < e || (s_chosen[j] == e && j < i);
    job.experts[t * job.top_k + at] = e;
    s_weights[at] = s_raw[e];
  }
  __syncthreads();
  if (i >= job.top_k) return;
  float sum = 0;
  for (int32_t j = 0; j < job.top_k; ++j) sum += s_weights[j];
  const float weight = job.is_normalized ? s_weights[i] / (sum + 1e-20f) : s_weights[i];
  job.weights[t * job.top_k + i] = weight * job.scaling;
}

}  // namespace

void router(const ops::Router::Desc& desc, const ops::Router::Args& args, device::Queue& queue) {
  const Job job{
      args.logits,        args.bias,    desc.is_hashed ? args.table : nullptr,  args.token_ids,
      args.experts,       args.weights, static_cast<int32_t>(desc.num_experts), static_cast<int32_t>(desc.top_k),
      desc.is_normalized, desc.scaling};
  const int64_t threads = round_up<int64_t>(std::max(desc.num_experts * kShare, desc.top_k), 32);
  launch("router", queue, router_kernel, grid_for(args.num_tokens, 1),
         static_cast<unsigned>(std::min<int64_t>(threads, kMaxThreads)),
         static_cast<size_t>(2 * (desc.num_experts + desc.top_k)) * sizeof(float), job);
}

}  // namespace tessera::backends::cuda
