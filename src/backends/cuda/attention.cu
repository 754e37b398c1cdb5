// SPDX-License-Identifier: Apache-2.0
// attention: a thread block per token and head; half a warp computes a key's logit, a thread a channel of the output.
// Parts and their order are the contract's.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = static_cast<int>(ops::kMaxHeadDim);
constexpr int kPart = static_cast<int>(ops::kAttentionPart);
constexpr int kKeysAtOnce = kBlock / kLanes;

struct Job {
  Values q;
  const int64_t* positions;
  ops::SequenceBases<const uint8_t> window_cache;
  int64_t window, window_slots;
  ops::PagedEntries<const uint8_t> entry_cache;
  const int32_t *num_entries, *selected;
  int64_t selected_stride;
  const float* sink;
  Values out;
  Entries entries;
  int64_t heads;
  int width;
  float scale;
};

// Running result: softmax maximum and denominator, and this thread's channel of the unnormalised output.
struct Partial {
  float max, sum, output;
};

__device__ Partial nothing() {
  return {-__builtin_huge_valf(), 0, 0};
}

// Folds `part` into `total`. Both may be empty.
__device__ void merge(Partial& total, const Partial& part) {
  const float max = part.max != part.max || part.max > total.max ? part.max : total.max;
  if (max == nothing().max) return;  // exp(-inf - -inf) would be NaN
  const float keep = exp_rounded(total.max - max), add = exp_rounded(part.max - max);
  total.max = max;
  total.sum = total.sum * keep + part.sum * add;
  total.output = total.output * keep + part.output * add;
}

struct Shared {
  float q[kBlock], logits[kPart], probabilities[kPart];
  const uint8_t* keys[kPart];
};

// The largest of the `count` logits, or NaN where one is; the same in every thread.
__device__ float largest_logit(const float* logits, int count) {
  float max = nothing().max;
  for (int n = static_cast<int>(threadIdx.x) % 32; n < count; n += 32) {
    max = logits[n] != logits[n] || logits[n] > max ? logits[n] : max;
  }
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, max, step);
    max = other != other || other > max ? other : max;
  }
  return max;
}

// Softmax over the `count` keys at shared.keys, which are values too.
template <ops::EntryFormat kFormat>
__device__ Partial attend_part(const Job& job, Shared& shared, int count) {
  const int c = threadIdx.x, lane = c % kLanes;
  for (int first = 0; first < count; first += kKeysAtOnce) {
    const int n = first + c / kLanes;
    const uint8_t* key = shared.keys[min(n, count - 1)];  // the other half of a warp needs this one
    float sum = 0;
#pragma unroll 16
    for (int i = lane; i < job.width; i += kLanes) sum += shared.q[i] * job.entries.value<kFormat>(key, i);
    const float logit = add_lanes(sum) * job.scale;
    if (lane == 0 && n < count) shared.logits[n] = logit;
  }
  __syncthreads();
  Partial part = nothing();
  part.max = largest_logit(shared.logits, count);
  if (c < count) shared.probabilities[c] = exp_rounded(shared.logits[c] - part.max);
  __syncthreads();
  const int channel = min(c, job.width - 1);  // threads beyond the width repeat the last
#pragma unroll 16
  for (int n = 0; n < count; ++n) {
    const float p = shared.probabilities[n];
    part.sum += p;
    part.output += round_to(job.out.is_bf16, p) * job.entries.value<kFormat>(shared.keys[n], channel);
  }
  __syncthreads();  // the next part overwrites what this one read
  return part;
}

// Grid: tokens by heads.
template <ops::EntryFormat kFormat>
__global__ void __launch_bounds__(kBlock) attention_kernel(Job job) {
  wait_for_previous();
  __shared__ Shared shared;
  const int64_t t = blockIdx.x, h = blockIdx.y, row = (t * job.heads + h) * job.width;
  const int c = threadIdx.x;
  if (c < job.width) shared.q[c] = job.q[row + c];
  const int64_t position = job.positions[t], window_begin = max(int64_t{0}, position - job.window + 1);
  const int64_t num_window = position + 1 - window_begin;
  const int64_t num_entries = job.entry_cache.exists() ? job.num_entries[t] : 0;
  Partial total = nothing();
  const auto visit_parts = [&](int64_t num_keys, const auto& key_at) {
    for (int64_t first = 0; first < num_keys; first += kPart) {
      const int count = static_cast<int>(min(int64_t{kPart}, num_keys - first));
      if (c < count) shared.keys[c] = key_at(first + c);
      __syncthreads();
      merge(total, attend_part<kFormat>(job, shared, count));
    }
  };
  const uint8_t* window = job.window_cache.of_row(t);
  const ops::SequenceEntries<const uint8_t> entries = job.entry_cache.of_row(t);
  visit_parts(num_window,
              [&](int64_t rank) { return window + (window_begin + rank) % job.window_slots * job.entries.bytes; });
  visit_parts(num_entries, [&](int64_t rank) {
    const int64_t index = job.selected == nullptr ? rank : job.selected[t * job.selected_stride + rank];
    return entries.at(index, job.entries.bytes);
  });
  merge(total, {job.sink[h], 1, 0});  // one more term of the denominator, without a value
  if (c < job.width) job.out.store(row + c, total.output / total.sum);
}

}  // namespace

void attention(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue) {
  const Job job{values_of(args.q),
                args.positions,
                args.window_cache,
                desc.window,
                args.window_slots,
                args.entry_cache,
                args.num_entries,
                args.selected,
                args.selected_stride,
                args.sink,
                values_of(args.out),
                entries_of(desc.layout),
                desc.heads,
                static_cast<int>(desc.head_dim),
                desc.scale};
  const dim3 grid(static_cast<unsigned>(args.num_tokens), static_cast<unsigned>(desc.heads));
  with_entries(desc.layout.format, [&](auto format) {
    if constexpr (format.value != ops::EntryFormat::kIndexFp4) {  // of index keys only
      launch("attention", queue, attention_kernel<format.value>, grid, kBlock, 0, job);
    }
  });
}

}  // namespace tessera::backends::cuda
