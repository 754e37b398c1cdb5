// SPDX-License-Identifier: Apache-2.0
// router: a thread block per token; one of its warps chooses.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ordered_bits.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 256;

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

// The top_k experts of largest key, ties to the lower id, by one warp; s_keys loses them. A lane knows the best of
// every 32nd expert and looks again only where it was the winner.
__device__ void choose(uint32_t* s_keys, const Job& job, int32_t* s_chosen) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  uint32_t best = 0;
  int32_t best_id = job.num_experts;
  const auto look = [&] {
    best = 0, best_id = job.num_experts;
#pragma unroll 4
    for (int32_t e = lane; e < job.num_experts; e += 32) {
      if (s_keys[e] > best) best = s_keys[e], best_id = e;
    }
  };
  look();
  for (int32_t n = 0; n < job.top_k; ++n) {
    const uint32_t largest = __reduce_max_sync(~0u, best);
    const int32_t id = __reduce_min_sync(~0u, best == largest ? best_id : job.num_experts);
    if (lane == 0) s_chosen[n] = id;
    if (id != best_id) continue;
    s_keys[id] = 0;
    look();
  }
}

__global__ void __launch_bounds__(kBlock) router_kernel(Job job) {
  float* s_raw = dynamic_shared<float>();                                   // [num_experts] what weighs
  uint32_t* s_keys = reinterpret_cast<uint32_t*>(s_raw + job.num_experts);  // [num_experts] what is compared, 0: taken
  float* s_weights = s_raw + 2 * job.num_experts;                           // [top_k]
  int32_t* s_chosen = reinterpret_cast<int32_t*>(s_weights + job.top_k);    // [top_k]
  const int32_t i = static_cast<int32_t>(threadIdx.x);
  const auto bias_of = [&](int32_t e) { return job.table == nullptr && e < job.num_experts ? job.bias[e] : 0; };
  float bias = bias_of(i);
  wait_for_previous();
  const int64_t t = blockIdx.x;
  const float* logits = job.logits + t * job.num_experts;
  for (int32_t e = i; e < job.num_experts; e += kBlock) {
    if (e > i) bias = bias_of(e);
    s_raw[e] = sqrt_softplus(logits[e]);
    if (job.table == nullptr) s_keys[e] = ordered_bits(s_raw[e] + bias) + 1;
  }
  if (job.table != nullptr) {
    const int32_t* row = job.table + static_cast<int64_t>(max(job.token_ids[t], 0)) * job.top_k;
    for (int32_t n = i; n < job.top_k; n += kBlock) s_chosen[n] = row[n];
  }
  __syncthreads();
  if (job.table == nullptr && i < 32) choose(s_keys, job, s_chosen);
  __syncthreads();
  for (int32_t n = i; n < job.top_k; n += kBlock) {
    const int32_t e = s_chosen[n];
    int32_t at = 0;  // chosen experts of lower id
    for (int32_t j = 0; j < job.top_k; ++j) at += s_chosen[j] < e || (s_chosen[j] == e && j < n);
    job.experts[t * job.top_k + at] = e;
    s_weights[at] = s_raw[e];
  }
  __syncthreads();
  float sum = 0;
  for (int32_t j = 0; j < job.top_k; ++j) sum += s_weights[j];
  for (int32_t n = i; n < job.top_k; n += kBlock) {
    const float weight = job.is_normalized ? s_weights[n] / (sum + 1e-20f) : s_weights[n];
    job.weights[t * job.top_k + n] = weight * job.scaling;
  }
}

}  // namespace

void router(const ops::Router::Desc& desc, const ops::Router::Args& args, device::Queue& queue) {
  const Job job{
      args.logits,        args.bias,    desc.is_hashed ? args.table : nullptr,  args.token_ids,
      args.experts,       args.weights, static_cast<int32_t>(desc.num_experts), static_cast<int32_t>(desc.top_k),
      desc.is_normalized, desc.scaling};
  launch("router", queue, router_kernel, grid_for(args.num_tokens, 1), kBlock,
         static_cast<size_t>(2 * (desc.num_experts + desc.top_k)) * sizeof(float), job);
}

}  // namespace tessera::backends::cuda
