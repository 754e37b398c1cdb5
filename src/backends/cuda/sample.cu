// SPDX-License-Identifier: Apache-2.0
// sample: a thread block per row. Candidates are counted by probability, and only those that the draw can reach are
// sorted, by a bitonic network, whose order of comparisons is fixed; what the contract sums in falling order, one
// thread sums. The sum of everything is known as an interval, out of whole numbers that threads may add in any order; a
// draw that the interval does not decide sorts everything.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "ops/sample/sample_steps.h"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using ops::Candidate;

constexpr int kBlock = 1024;
constexpr int64_t kMostBlocks = 32;  // each has a workspace; they take the rows in turn
constexpr int kShared = 512;         // candidates that are sorted in shared memory
constexpr int kBucketBits = 3;       // buckets in an octave of probabilities, as a power of two
constexpr int kBuckets = 64 * (1 << kBucketBits) + 1;
constexpr double kMassUnit = 0x1p-40;

// The workspace: a candidate per token of the vocabulary, up to a power of two, per block.
struct Job {
  float* logits;
  const ops::SampleRow* rows;
  const int32_t *counts, *bias_ids;
  const float* bias_values;
  const uint32_t* masks;
  int64_t num_rows, num_bias;
  int32_t* tokens;
  Candidate* workspace;
  int32_t vocab, num_padded;
};

// A row that is drawn from.
struct Row {
  const float* logits;
  int32_t vocab, top;
  float temperature;
  const uint32_t* mask;  // null: all

  // 0: it has none.
  __device__ double probability(int32_t id) const {
    if (id == top) return 1;
    if (!ops::is_allowed(mask, id)) return 0;
    const double gap = static_cast<double>(logits[id]) - static_cast<double>(logits[top]);
    const double p = exp(gap / static_cast<double>(temperature));
    return p > 0 ? p : 0;
  }
};

// Counts and sums of the probabilities that buckets hold. Sums are in units of kMassUnit, each probability rounded
// down.
struct Buckets {
  int32_t counts[kBuckets];
  unsigned long long masses[kBuckets];
};

__device__ float no_logit() {
  return -__builtin_huge_valf();
}

// Rises as the probability, at most 1, falls; the last has all that are smaller.
__device__ int bucket_of(double probability) {
  const uint64_t gap = __builtin_bit_cast(uint64_t, 1.0) - __builtin_bit_cast(uint64_t, probability);
  const uint64_t bucket = gap >> (52 - kBucketBits);
  return bucket < kBuckets ? static_cast<int>(bucket) : kBuckets - 1;
}

__device__ void apply_bias_and_penalties(const Job& job) {
  float* logits = job.logits + job.rows[0].logit_row * static_cast<int64_t>(job.vocab);
  // One by one: an id may come twice.
  if (threadIdx.x == 0) {
    for (int64_t i = 0; i < job.num_bias; ++i) logits[job.bias_ids[i]] += job.bias_values[i];
  }
  __syncthreads();
  for (int32_t id = threadIdx.x; job.counts != nullptr && id < job.vocab; id += kBlock) {
    if (job.counts[id] != 0) logits[id] = ops::penalised(logits[id], job.rows[0].params, job.counts[id]);
  }
  __syncthreads();
}

// Whether token a of logit x is taken rather than token b of logit y; -1 is none.
__device__ bool is_better(float x, int32_t a, float y, int32_t b) {
  if (a < 0 || b < 0) return a >= 0;
  return x > y || (x == y && a < b);
}

// The largest allowed logit's id, ties to the lower id; NaN and minus infinity never win. -1 where there is no other.
__device__ int32_t largest(const float* logits, const uint32_t* mask, int32_t vocab) {
  __shared__ float s_logits[kBlock];
  __shared__ int32_t s_ids[kBlock];
  float best = 0;
  int32_t best_id = -1;
  constexpr int kAtOnce = 16;  // loads on their way together: of a greedy draw this is all there is to do
  for (int32_t first = threadIdx.x; first < vocab; first += kAtOnce * kBlock) {
    float loaded[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t id = first + n * kBlock;
      loaded[n] = id < vocab ? logits[id] : no_logit();
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t id = first + n * kBlock;
      if (loaded[n] != loaded[n] || loaded[n] == no_logit() || !ops::is_allowed(mask, id)) continue;
      if (is_better(loaded[n], id, best, best_id)) best = loaded[n], best_id = id;
    }
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
  const int32_t found = s_ids[0];
  __syncthreads();
  return found;
}

__device__ void count_into(const Row& row, Buckets& buckets) {
  for (int i = threadIdx.x; i < kBuckets; i += kBlock) buckets.counts[i] = 0, buckets.masses[i] = 0;
  __syncthreads();
  for (int32_t id = threadIdx.x; id < row.vocab; id += kBlock) {
    const double p = row.probability(id);
    if (!(p > 0)) continue;
    const int bucket = bucket_of(p);
    atomicAdd(&buckets.counts[bucket], 1);
    atomicAdd(&buckets.masses[bucket], static_cast<unsigned long long>(p / kMassUnit));
  }
  __syncthreads();
}

// The candidates of buckets 0 to `last`, in order. There is room up to the next power of two.
__device__ void gather_and_sort(const Row& row, int last, Candidate* candidates) {
  __shared__ int32_t s_count;
  if (threadIdx.x == 0) s_count = 0;
  __syncthreads();
  for (int32_t id = threadIdx.x; id < row.vocab; id += kBlock) {
    const double p = row.probability(id);
    if (p > 0 && bucket_of(p) <= last) candidates[atomicAdd(&s_count, 1)] = {p, id};
  }
  __syncthreads();
  const int32_t count = s_count;
  int32_t num_padded = 1;
  while (num_padded < count) num_padded *= 2;
  for (int32_t i = count + threadIdx.x; i < num_padded; i += kBlock) candidates[i] = {0, row.vocab};
  // The order is strict, so that sorting has one result, whatever order the candidates came in.
  for (int32_t size = 2; size <= num_padded; size *= 2) {
    for (int32_t step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int32_t i = threadIdx.x; i < num_padded; i += kBlock) {
        const int32_t j = i ^ step;
        if (j < i) continue;
        const Candidate a = candidates[i], b = candidates[j];
        if (ops::comes_before(a, b) != ((i & size) == 0)) candidates[i] = b, candidates[j] = a;
      }
    }
  }
  __syncthreads();
}

// What is sorted before the first attempt at a draw, and what is known about the rest.
struct Reach {
  int last;       // bucket
  int32_t count;  // candidates up to it
  int32_t num_all;
  double low, high;  // around the sum of all probabilities, in any order
};

// One thread.
__device__ Reach reach_of(const Buckets& buckets, const ops::SampleRow& row) {
  int32_t num_all = 0;
  unsigned long long mass = 0;
  for (int i = 0; i < kBuckets; ++i) num_all += buckets.counts[i], mass += buckets.masses[i];
  // Each is rounded down by less than a unit, and each of two sums in FP64 by less than a rounding per addend.
  const double rounding = (num_all + 4) * 0x1p-51;
  const double low = static_cast<double>(mass) * kMassUnit * (1 - rounding);
  const double high = (static_cast<double>(mass) + num_all) * kMassUnit * (1 + rounding);
  const ops::SamplingParams& params = row.params;
  const bool is_cut = params.top_k > 0 || params.min_p > 0;
  const double share = params.top_p < 1 ? static_cast<double>(params.top_p) : ops::unit_draw(params, row.position);
  const int least = params.min_p <= 0  ? kBuckets - 1
                    : params.min_p < 1 ? bucket_of(static_cast<double>(params.min_p))
                                       : 0;
  Reach reach{0, buckets.counts[0], num_all, low, high};
  double below = static_cast<double>(buckets.masses[0]) * kMassUnit;
  while (reach.last + 1 < kBuckets) {
    const bool has_all = is_cut ? reach.last >= least || (params.top_k > 0 && reach.count >= params.top_k)
                                : below * (1 - rounding) > share * high;
    if (has_all) break;
    ++reach.last;
    reach.count += buckets.counts[reach.last];
    below += static_cast<double>(buckets.masses[reach.last]) * kMassUnit;
  }
  return reach;
}

// Thread 0 returns the token.
__device__ int32_t draw(const Row& row, const ops::SampleRow& how, Candidate* workspace) {
  __shared__ Buckets s_buckets;
  __shared__ Candidate s_candidates[kShared];
  __shared__ Reach s_reach;
  __shared__ int32_t s_token;
  count_into(row, s_buckets);
  if (threadIdx.x == 0) s_reach = reach_of(s_buckets, how), s_token = -1;
  __syncthreads();
  const Reach reach = s_reach;
  if (reach.count < reach.num_all) {
    Candidate* first = reach.count <= kShared ? s_candidates : workspace;
    gather_and_sort(row, reach.last, first);
    if (threadIdx.x == 0) {
      s_token = ops::draw_of_first(first, reach.count, reach.low, reach.high, how.params, how.position);
    }
    __syncthreads();
  }
  if (s_token >= 0) return s_token;
  Candidate* all = reach.num_all <= kShared ? s_candidates : workspace;
  gather_and_sort(row, kBuckets - 1, all);
  return threadIdx.x == 0 ? ops::draw_candidate(all, reach.num_all, how.params, how.position) : -1;
}

__global__ void __launch_bounds__(kBlock) sample_kernel(Job job) {
  wait_for_previous();
  if (job.num_rows == 1) apply_bias_and_penalties(job);
  for (int64_t i = blockIdx.x; i < job.num_rows; i += gridDim.x) {
    const ops::SampleRow how = job.rows[i];
    const float* logits = job.logits + how.logit_row * static_cast<int64_t>(job.vocab);
    const uint32_t* mask = ops::mask_of(job.masks, how, job.vocab);
    const int32_t top = largest(logits, mask, job.vocab);
    int32_t token = top;
    if (top >= 0 && how.params.temperature != 0) {
      const Row row{logits, job.vocab, top, how.params.temperature, mask};
      token = draw(row, how, job.workspace + blockIdx.x * static_cast<int64_t>(job.num_padded));
    }
    if (threadIdx.x == 0) job.tokens[i] = token;
    __syncthreads();
  }
}

int64_t num_padded(const ops::Sample::Desc& desc) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(desc.vocab)));
}

}  // namespace

int64_t sample_workspace(const ops::Sample::Desc& desc, int64_t max_rows) {
  return std::min(max_rows, kMostBlocks) * num_padded(desc) * static_cast<int64_t>(sizeof(Candidate));
}

void sample(const ops::Sample::Desc& desc, const ops::Sample::Args& args, device::Queue& queue) {
  const Job job{args.logits,
                args.rows,
                args.counts,
                args.bias_ids,
                args.bias_values,
                args.masks,
                args.num_rows,
                args.num_bias,
                args.tokens,
                static_cast<Candidate*>(args.workspace),
                static_cast<int32_t>(desc.vocab),
                static_cast<int32_t>(num_padded(desc))};
  launch("sample", queue, sample_kernel, grid_for(std::min(args.num_rows, kMostBlocks), 1), kBlock, 0, job);
}

}  // namespace tessera::backends::cuda
