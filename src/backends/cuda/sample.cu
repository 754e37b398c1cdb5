// SPDX-License-Identifier: Apache-2.0
// sample, in four kernels: the largest logit of each part of a row; what buckets of probabilities hold, in whole
// numbers that blocks may add in any order; the choice from these (sample_choice.cuh), a block a row; and, for rows
// that the choice leaves undecided, the draw from all candidates, sorted.
#include <algorithm>
#include <bit>
#include <cstdint>

#include "backends/cuda/kernels.h"
#include "backends/cuda/sample_choice.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/workspace.h"
#include "ops/sample/sample_steps.h"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using ops::Candidate;

constexpr int kBlock = 512;
// Parts of a row: at most so many for the GPU's sake, and as many as keep a histogram's counts within 32 bits.
constexpr int64_t kMostParts = 32, kLeastPart = 2048, kLargestPart = 1 << 16;
constexpr int64_t kSorters = 8;  // blocks that sort everything; they take the rows in turn

struct Best {
  float logit;
  int32_t id;  // -1: none
};
// Of a row, all parts together.
struct RowBuckets {
  unsigned long long masses[kFirstBuckets];
  uint32_t counts[kFirstBuckets];
  int32_t top;
};
using PartHistogram = Histogram<kFirstBuckets, 4>;

struct Job {
  float* logits;
  const ops::SampleRow* rows;
  const int32_t *counts, *bias_ids;
  const float* bias_values;
  const uint32_t* masks;
  int64_t num_rows, num_bias;
  int32_t* tokens;
  RowBuckets* buckets;    // [num_rows]
  Best* bests;            // [num_rows, num_parts]
  Candidate* candidates;  // [kSorters, num_padded]
  int32_t vocab, num_padded, num_parts, part;

  __device__ float* logits_of(const ops::SampleRow& how) const {
    return logits + how.logit_row * static_cast<int64_t>(vocab);
  }
  __device__ SampledRow row_of(const ops::SampleRow& how, int32_t top, float min_p) const {
    return {logits_of(how), ops::mask_of(masks, how, vocab), vocab, top, how.params.temperature, min_p};
  }
};

__device__ float no_logit() {
  return -__builtin_huge_valf();
}

// To one part of a row.
__device__ void apply_bias_and_penalties(const Job& job, int32_t begin, int32_t end) {
  float* logits = job.logits_of(job.rows[0]);
  // One by one: an id may come twice.
  for (int64_t i = 0; threadIdx.x == 0 && i < job.num_bias; ++i) {
    if (job.bias_ids[i] >= begin && job.bias_ids[i] < end) logits[job.bias_ids[i]] += job.bias_values[i];
  }
  __syncthreads();
  for (int32_t id = begin + static_cast<int32_t>(threadIdx.x); job.counts != nullptr && id < end; id += kBlock) {
    if (job.counts[id] != 0) logits[id] = ops::penalised(logits[id], job.rows[0].params, job.counts[id]);
  }
  __syncthreads();
}

// Whether token a of logit x is taken rather than token b of logit y; -1 is none.
__device__ bool is_better(float x, int32_t a, float y, int32_t b) {
  if (a < 0 || b < 0) return a >= 0;
  return x > y || (x == y && a < b);
}

__device__ Best better(const Best& a, const Best& b) {
  return is_better(a.logit, a.id, b.logit, b.id) ? a : b;
}
// The best of a warp's.
__device__ Best best_of_warp(Best own) {
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const Best other{__shfl_xor_sync(~0u, own.logit, lanes), __shfl_xor_sync(~0u, own.id, lanes)};
    own = better(own, other);
  }
  return own;
}
// The best of a row's parts.
__device__ Best best_of_parts(const Best* parts, int32_t num_parts) {
  __shared__ Best s_best;
  if (threadIdx.x < 32) {
    Best own{0, -1};
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_parts; i += 32) own = better(own, parts[i]);
    own = best_of_warp(own);
    if (threadIdx.x == 0) s_best = own;
  }
  __syncthreads();
  return s_best;
}

// The largest allowed logit of a part, ties to the lower id; NaN and minus infinity never win.
__global__ void __launch_bounds__(kBlock) sample_largest(Job job) {
  __shared__ Best s_bests[kBlock / 32];
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x);
  const ops::SampleRow how = job.rows[blockIdx.x];
  const auto begin = static_cast<int32_t>(blockIdx.y) * job.part, end = min(begin + job.part, job.vocab);
  if (job.num_rows == 1) apply_bias_and_penalties(job, begin, end);
  if (blockIdx.y == 0) {
    RowBuckets& buckets = job.buckets[blockIdx.x];
    for (int i = thread; i < kFirstBuckets; i += kBlock) buckets.masses[i] = 0, buckets.counts[i] = 0;
  }
  const float* logits = job.logits_of(how);
  const uint32_t* mask = ops::mask_of(job.masks, how, job.vocab);
  Best own{0, -1};
  constexpr int kAtOnce = 8;  // loads on their way together
  for (int32_t first = begin + thread; first < end; first += kAtOnce * kBlock) {
    float loaded[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t id = first + n * kBlock;
      loaded[n] = id < end ? logits[id] : no_logit();
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int32_t id = first + n * kBlock;
      if (loaded[n] != loaded[n] || loaded[n] == no_logit() || !ops::is_allowed(mask, id)) continue;
      own = better(own, {loaded[n], id});
    }
  }
  own = best_of_warp(own);
  if (thread % 32 == 0) s_bests[thread / 32] = own;
  __syncthreads();
  if (thread >= 32) return;
  own = best_of_warp(thread < kBlock / 32 ? s_bests[thread] : Best{0, -1});
  if (thread == 0) job.bests[blockIdx.x * job.num_parts + blockIdx.y] = own;
}

// Greedy tokens; else a part's share of the row's buckets.
__global__ void __launch_bounds__(kBlock) sample_masses(Job job) {
  __shared__ PartHistogram s_histogram;
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x);
  const ops::SampleRow how = job.rows[blockIdx.x];
  RowBuckets& buckets = job.buckets[blockIdx.x];
  const int32_t top = best_of_parts(job.bests + blockIdx.x * job.num_parts, job.num_parts).id;
  const bool is_chosen = top < 0 || how.params.temperature == 0;
  if (blockIdx.y == 0 && thread == 0) {
    buckets.top = top;
    if (is_chosen) job.tokens[blockIdx.x] = top;
  }
  if (is_chosen) return;
  s_histogram.clear();
  const SampledRow row = job.row_of(how, top, how.params.min_p);
  const auto begin = static_cast<int32_t>(blockIdx.y) * job.part, end = min(begin + job.part, job.vocab);
  for (int32_t id = begin + thread; id < end; id += kBlock) {
    const double p = row.probability(id);
    if (!(p > 0)) continue;
    const int bucket = first_bucket(key_of(p));
    s_histogram.add(bucket, mass_of(p, bucket));
  }
  __syncthreads();
  for (int i = thread; i < kFirstBuckets; i += kBlock) {
    const uint32_t count = s_histogram.count(i);
    if (count == 0) continue;
    atomicAdd(&buckets.counts[i], count);
    atomicAdd(&buckets.masses[i], static_cast<unsigned long long>(s_histogram.mass(i)));
  }
}

__global__ void __launch_bounds__(SampleChoice::kThreads) sample_choice(Job job) {
  __shared__ SampleChoice::Shared s_choice;
  wait_for_previous();
  const ops::SampleRow how = job.rows[blockIdx.x];
  const RowBuckets& buckets = job.buckets[blockIdx.x];
  const int32_t top = buckets.top;
  if (top < 0 || how.params.temperature == 0) return;
  SampleChoice choice(job.row_of(how, top, how.params.min_p), how, buckets.counts, buckets.masses, s_choice);
  const int32_t token = choice.token();
  if (threadIdx.x == 0) job.tokens[blockIdx.x] = token;
}

__global__ void __launch_bounds__(SampleChoice::kThreads) sample_sorted(Job job) {
  __shared__ int32_t s_count;
  wait_for_previous();
  Candidate* candidates = job.candidates + blockIdx.x * static_cast<int64_t>(job.num_padded);
  for (int64_t i = blockIdx.x; i < job.num_rows; i += gridDim.x) {
    if (job.tokens[i] != kUndecided) continue;
    const ops::SampleRow how = job.rows[i];
    const SampledRow row = job.row_of(how, job.buckets[i].top, 0);
    __syncthreads();
    if (threadIdx.x == 0) s_count = 0;
    __syncthreads();
    for (int32_t id = static_cast<int32_t>(threadIdx.x); id < job.vocab; id += SampleChoice::kThreads) {
      const double p = row.probability(id);
      if (p > 0) candidates[atomicAdd(&s_count, 1)] = {p, id};
    }
    __syncthreads();
    const int32_t count = s_count;
    sort_candidates(candidates, count, job.vocab);
    if (threadIdx.x == 0) job.tokens[i] = ops::draw_candidate(candidates, count, how.params, how.position);
  }
}

int64_t num_padded(const ops::Sample::Desc& desc) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(desc.vocab)));
}

// Parts of a row; the most that any number of rows has where that is 0.
int64_t parts_of(const ops::Sample::Desc& desc, int64_t num_rows) {
  const int64_t useful = std::min(kMostParts, ceil_div(desc.vocab, kLeastPart));
  const int64_t wanted =
      num_rows == 0 ? useful : std::min<int64_t>(useful, ceil_div<int64_t>(2 * multiprocessors(), num_rows));
  return std::max(wanted, ceil_div(desc.vocab, kLargestPart));
}

// Bytes; fills the job where `base` is not null.
int64_t lay_out(const ops::Sample::Desc& desc, int64_t num_rows, int64_t num_parts, void* base, Job& job) {
  Workspace workspace(base);
  job.buckets = workspace.take<RowBuckets>(num_rows);
  job.bests = workspace.take<Best>(num_rows * num_parts);
  job.candidates = workspace.take<Candidate>(std::min(num_rows, kSorters) * num_padded(desc));
  return workspace.used();
}

}  // namespace

int64_t sample_workspace(const ops::Sample::Desc& desc, int64_t max_rows) {
  Job unused{};
  return lay_out(desc, max_rows, parts_of(desc, 0), nullptr, unused);
}

void sample(const ops::Sample::Desc& desc, const ops::Sample::Args& args, device::Queue& queue) {
  const int64_t num_parts = parts_of(desc, std::max<int64_t>(args.num_rows, 1));
  Job job{};
  job.logits = args.logits, job.rows = args.rows, job.masks = args.masks, job.tokens = args.tokens;
  job.counts = args.counts, job.bias_ids = args.bias_ids, job.bias_values = args.bias_values;
  job.num_rows = args.num_rows, job.num_bias = args.num_bias;
  job.vocab = static_cast<int32_t>(desc.vocab), job.num_padded = static_cast<int32_t>(num_padded(desc));
  job.num_parts = static_cast<int32_t>(num_parts), job.part = static_cast<int32_t>(ceil_div(desc.vocab, num_parts));
  lay_out(desc, args.num_rows, num_parts, args.workspace, job);
  const auto rows = static_cast<unsigned>(args.num_rows), parts = static_cast<unsigned>(num_parts);
  launch("sample_largest", queue, sample_largest, dim3(rows, parts), kBlock, 0, job);
  launch("sample_masses", queue, sample_masses, dim3(rows, parts), kBlock, 0, job);
  launch("sample_choice", queue, sample_choice, dim3(rows), SampleChoice::kThreads, 0, job);
  launch("sample_sorted", queue, sample_sorted, grid_for(std::min(args.num_rows, kSorters), 1), SampleChoice::kThreads,
         0, job);
}

}  // namespace tessera::backends::cuda
