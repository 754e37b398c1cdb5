// SPDX-License-Identifier: Apache-2.0
// router: a thread block per token; one of its warps chooses. What bounds it is latency, so of up to 512 experts the
// warp has keys and choice in registers.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ordered_bits.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 256, kWarp = 32;

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
__device__ void choose_of_any(uint32_t* s_keys, const Job& job, int32_t* s_chosen) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  uint32_t best = 0;
  int32_t best_id = job.num_experts;
  const auto look = [&] {
    best = 0, best_id = job.num_experts;
#pragma unroll 4
    for (int32_t e = lane; e < job.num_experts; e += kWarp) {
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

// The same of at most kEach experts to a lane, whose keys are in registers.
template <int kEach>
__device__ void choose_of_few(const uint32_t* s_keys, const Job& job, int32_t* s_chosen) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x);
  uint32_t keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t e = i * kWarp + lane;
    keys[i] = e < job.num_experts ? s_keys[e] : 0;
  }
#pragma unroll 1
  for (int32_t n = 0; n < job.top_k; ++n) {
    uint32_t best = keys[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) best = max(best, keys[i]);
    const uint32_t largest = __reduce_max_sync(~0u, best);
    int32_t first = kEach * kWarp;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) first = keys[i] == largest ? i * kWarp + lane : first;
    const int32_t id = __reduce_min_sync(~0u, first);
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = id == i * kWarp + lane ? 0 : keys[i];
    if (lane == 0) s_chosen[n] = id;
  }
}

// kEach: experts of a lane at most; 0: any number.
template <int kEach>
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
  __syncthreads();
  if (i >= kWarp) return;
  if (job.table != nullptr) {
    const int32_t* row = job.table + static_cast<int64_t>(max(job.token_ids[t], 0)) * job.top_k;
    for (int32_t n = i; n < job.top_k; n += kWarp) s_chosen[n] = row[n];
  } else if constexpr (kEach > 0) {
    choose_of_few<kEach>(s_keys, job, s_chosen);
  } else {
    choose_of_any(s_keys, job, s_chosen);
  }
  __syncwarp();
  for (int32_t n = i; n < job.top_k; n += kWarp) {
    const int32_t e = s_chosen[n];
    int32_t at = 0;  // chosen experts of lower id
#pragma unroll 4
    for (int32_t j = 0; j < job.top_k; ++j) at += s_chosen[j] < e || (s_chosen[j] == e && j < n);
    job.experts[t * job.top_k + at] = e;
    s_weights[at] = s_raw[e];
  }
  __syncwarp();
  float sum = 0;
#pragma unroll 4
  for (int32_t j = 0; j < job.top_k; ++j) sum += s_weights[j];
  for (int32_t n = i; n < job.top_k; n += kWarp) {
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
  const auto start = [&](auto kernel) {
    launch("router", queue, kernel, grid_for(args.num_tokens, 1), kBlock,
           static_cast<size_t>(2 * (desc.num_experts + desc.top_k)) * sizeof(float), job);
  };
  if (desc.num_experts <= 8 * kWarp) return start(router_kernel<8>);
  if (desc.num_experts <= 16 * kWarp) return start(router_kernel<16>);
  start(router_kernel<0>);
}

}  // namespace tessera::backends::cuda
