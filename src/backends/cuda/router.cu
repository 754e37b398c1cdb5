// SPDX-License-Identifier: Apache-2.0
// router: a thread block per token. An expert is chosen where fewer than top_k others come before it, so ids need no
// sorting and ties no care.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 128;

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

__global__ void router_kernel(Job job) {
  wait_for_previous();
  float* s_scores = dynamic_shared<float>();                                   // [num_experts]
  int32_t* s_chosen = reinterpret_cast<int32_t*>(s_scores + job.num_experts);  // [num_experts]
  const int64_t t = blockIdx.x;
  const float* logits = job.logits + t * job.num_experts;
  int32_t* experts = job.experts + t * job.top_k;
  float* weights = job.weights + t * job.top_k;
  for (int32_t e = threadIdx.x; e < job.num_experts; e += kBlock) {
    s_scores[e] = job.table == nullptr ? sqrt_softplus(logits[e]) + job.bias[e] : 0;
    s_chosen[e] = 0;
  }
  __syncthreads();
  if (job.table != nullptr) {
    const int32_t* row = job.table + static_cast<int64_t>(job.token_ids[t]) * job.top_k;
    for (int32_t i = threadIdx.x; i < job.top_k; i += kBlock) s_chosen[row[i]] = 1;
  } else {
    for (int32_t e = threadIdx.x; e < job.num_experts; e += kBlock) {
      int32_t rank = 0;
      for (int32_t other = 0; other < job.num_experts; ++other) {
        rank += is_before(s_scores[other], other, s_scores[e], e);
      }
      s_chosen[e] = rank < job.top_k;
    }
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < job.num_experts; e += kBlock) {
    if (s_chosen[e] == 0) continue;
    int32_t at = 0;  // chosen experts of lower id
    for (int32_t other = 0; other < e; ++other) at += s_chosen[other];
    experts[at] = e;
    weights[at] = sqrt_softplus(logits[e]);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0;
  for (int32_t i = 0; i < job.top_k; ++i) sum += weights[i];
  for (int32_t i = 0; i < job.top_k; ++i) {
    const float weight = job.is_normalized ? weights[i] / (sum + 1e-20f) : weights[i];
    weights[i] = weight * job.scaling;
  }
}

}  // namespace

void router(const ops::Router::Desc& desc, const ops::Router::Args& args, device::Queue& queue) {
  const Job job{
      args.logits,        args.bias,    desc.is_hashed ? args.table : nullptr,  args.token_ids,
      args.experts,       args.weights, static_cast<int32_t>(desc.num_experts), static_cast<int32_t>(desc.top_k),
      desc.is_normalized, desc.scaling};
  launch("router", queue, router_kernel, grid_for(args.num_tokens, 1), kBlock,
         static_cast<size_t>(desc.num_experts) * (sizeof(float) + sizeof(int32_t)), job);
}

}  // namespace tessera::backends::cuda
