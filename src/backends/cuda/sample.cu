// SPDX-License-Identifier: Apache-2.0
// sample: one thread block. Probabilities are sorted by a bitonic network, whose order of comparisons is fixed; what
// the contract sums in falling order, one thread sums.
#include <bit>
#include <cstdint>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "base/rng.h"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 1024;

// The workspace: a candidate per token of the vocabulary, up to a power of two.
struct Candidate {
  double probability;
  int32_t id;
};

struct Job {
  float* logits;
  const int32_t *counts, *bias_ids;
  const float* bias_values;
  int64_t num_bias;
  int32_t* token;
  Candidate* candidates;
  int32_t vocab, num_padded;
  ops::SamplingParams params;
  double uniform;  // in [0, 1)
};

__device__ float no_logit() {
  return -__builtin_huge_valf();
}

__device__ void apply_bias_and_penalties(const Job& job) {
  // One by one: an id may come twice.
  if (threadIdx.x == 0) {
    for (int64_t i = 0; i < job.num_bias; ++i) job.logits[job.bias_ids[i]] += job.bias_values[i];
  }
  __syncthreads();
  for (int32_t id = threadIdx.x; job.counts != nullptr && id < job.vocab; id += kBlock) {
    const int32_t count = job.counts[id];
    if (count == 0) continue;
    float logit = job.logits[id];
    logit = logit > 0 ? logit / job.params.repetition_penalty : logit * job.params.repetition_penalty;
    logit -= job.params.frequency_penalty * static_cast<float>(count) + job.params.presence_penalty;
    job.logits[id] = logit;
  }
  __syncthreads();
}

// Whether token a of logit x is taken rather than token b of logit y; -1 is none.
__device__ bool is_better(float x, int32_t a, float y, int32_t b) {
  if (a < 0 || b < 0) return a >= 0;
  return x > y || (x == y && a < b);
}

// The largest logit's id, ties to the lower id; NaN and minus infinity never win. -1 where there is no other.
__device__ int32_t largest(const Job& job) {
  __shared__ float s_logits[kBlock];
  __shared__ int32_t s_ids[kBlock];
  float best = 0;
  int32_t best_id = -1;
  for (int32_t id = threadIdx.x; id < job.vocab; id += kBlock) {
    const float logit = job.logits[id];
    if (logit != logit || logit == no_logit()) continue;
    if (is_better(logit, id, best, best_id)) best = logit, best_id = id;
  }
  s_logits[threadIdx.x] = best, s_ids[threadIdx.x] = best_id;
  for (int half = kBlock / 2; half > 0; half /= 2) {
    __syncthreads();
    const int other = threadIdx.x + half;
    if (threadIdx.x < half && is_better(s_logits[other], s_ids[other], s_logits[threadIdx.x], s_ids[threadIdx.x])) {
      s_logits[threadIdx.x] = s_logits[other], s_ids[threadIdx.x] = s_ids[other];
    }
  }
  __syncthreads();
  return s_ids[0];
}

// Falling probability, ties to the lower id: a strict order, so that sorting has one result.
__device__ bool comes_before(const Candidate& a, const Candidate& b) {
  return a.probability > b.probability || (a.probability == b.probability && a.id < b.id);
}

// Unnormalised probabilities relative to the largest. What has none gets 0 and ends up last. Returns how many have one.
__device__ int32_t fill_and_sort(const Job& job, int32_t top) {
  __shared__ int32_t s_count;
  if (threadIdx.x == 0) s_count = 0;
  __syncthreads();
  const double top_logit = static_cast<double>(job.logits[top]);
  for (int32_t id = threadIdx.x; id < job.num_padded; id += kBlock) {
    double p = 0;
    if (id < job.vocab) {
      const double gap = static_cast<double>(job.logits[id]) - top_logit;
      p = id == top ? 1 : exp(gap / static_cast<double>(job.params.temperature));
    }
    if (p > 0) atomicAdd(&s_count, 1);
    job.candidates[id] = {p > 0 ? p : 0, id};
  }
  for (int32_t size = 2; size <= job.num_padded; size *= 2) {
    for (int32_t step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int32_t i = threadIdx.x; i < job.num_padded; i += kBlock) {
        const int32_t j = i ^ step;
        if (j < i) continue;
        const Candidate a = job.candidates[i], b = job.candidates[j];
        if (comes_before(a, b) != ((i & size) == 0)) job.candidates[i] = b, job.candidates[j] = a;
      }
    }
  }
  __syncthreads();
  return s_count;
}

// One thread. Probabilities are summed in falling order.
__device__ int32_t draw(const Job& job, int64_t count) {
  const Candidate* candidates = job.candidates;
  if (job.params.top_k > 0) count = min(count, static_cast<int64_t>(job.params.top_k));
  int64_t kept = 1;  // the first always stays
  while (kept < count && candidates[kept].probability >= static_cast<double>(job.params.min_p)) ++kept;
  double total = 0;
  for (int64_t i = 0; i < kept; ++i) total += candidates[i].probability;
  if (job.params.top_p < 1) {
    double running = 0;
    int64_t nucleus = 0;
    while (nucleus < kept && running < static_cast<double>(job.params.top_p) * total) {
      running += candidates[nucleus++].probability;
    }
    kept = max(int64_t{1}, nucleus);
    total = kept == 1 ? candidates[0].probability : running;
  }
  const double target = job.uniform * total;
  double running = 0;
  int64_t chosen = 0;
  for (; chosen + 1 < kept; ++chosen) {
    running += candidates[chosen].probability;
    if (target < running) break;
  }
  return candidates[chosen].id;
}

__global__ void __launch_bounds__(kBlock) sample_kernel(Job job) {
  wait_for_previous();
  apply_bias_and_penalties(job);
  const int32_t top = largest(job);
  int32_t token = top;
  if (top >= 0 && job.params.temperature != 0) {
    const int32_t count = fill_and_sort(job, top);
    if (threadIdx.x == 0) token = draw(job, count);
  }
  if (threadIdx.x == 0) *job.token = token;
}

int64_t num_padded(const ops::Sample::Desc& desc) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(desc.vocab)));
}

}  // namespace

int64_t sample_workspace(const ops::Sample::Desc& desc, int64_t) {
  return num_padded(desc) * static_cast<int64_t>(sizeof(Candidate));
}

void sample(const ops::Sample::Desc& desc, const ops::Sample::Args& args, device::Queue& queue) {
  const auto bits = philox(args.params.seed, args.position);
  const uint64_t mantissa = (static_cast<uint64_t>(bits[0]) << 32 | bits[1]) >> 11;  // 53 bits
  const Job job{args.logits,
                args.counts,
                args.bias_ids,
                args.bias_values,
                args.num_bias,
                args.token,
                static_cast<Candidate*>(args.workspace),
                static_cast<int32_t>(desc.vocab),
                static_cast<int32_t>(num_padded(desc)),
                args.params,
                static_cast<double>(mantissa) * 0x1p-53};
  launch("sample", queue, sample_kernel, dim3(1), kBlock, 0, job);
}

}  // namespace tessera::backends::cuda
