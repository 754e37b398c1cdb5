// SPDX-License-Identifier: Apache-2.0
// index_scores: half a warp per key of a token. top_k: a thread block per token finds the k-th largest score by its
// bits, eight at a time, then lists what is above it, and of what equals it the lowest indices.
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/entries.cuh"
#include "backends/cuda_common/lanes.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ordered_bits.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kKeysPerBlock = 8;
constexpr int64_t kMaxWidth = 512;

struct ScoreJob {
  Values queries, weights;
  ops::PagedEntries<const uint8_t> keys;
  const int32_t* counts;
  float* scores;
  Entries entries;
  int64_t heads, width, stride;
  float scale;
  bool is_bf16;
};

// Grid: tokens by groups of keys.
template <ops::EntryFormat kFormat>
__global__ void __launch_bounds__(kKeysPerBlock* kLanes) score_keys(ScoreJob job) {
  wait_for_previous();
  __shared__ float s_keys[kKeysPerBlock][kMaxWidth + kLanes];  // the padding keeps both halves of a warp on other banks
  const int64_t t = blockIdx.x, count = job.counts[t];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kKeysPerBlock;
  if (first >= count) return;
  const int part = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t key = min(first + part, count - 1);
  const uint8_t* entry = job.keys.of_row(t).at(key, job.entries.bytes);
  // A lane writes and reads its own values only.
  for (int64_t c = lane; c < job.width; c += kLanes) {
    s_keys[part][c] = job.entries.value<kFormat>(entry, static_cast<int>(c));
  }
  float score = 0;
  for (int64_t h = 0; h < job.heads; ++h) {
    const int64_t query = (t * job.heads + h) * job.width;
    float sum = 0;
#pragma unroll 8
    for (int64_t c = lane; c < job.width; c += kLanes) sum += job.queries[query + c] * s_keys[part][c];
    const float product = add_lanes(sum);
    const float weight = round_to(job.is_bf16, job.weights[t * job.heads + h] * job.scale);
    score += weight * (product < 0 ? 0.0f : product);  // a NaN passes through
  }
  if (lane == 0 && first + part < count) job.scores[t * job.stride + key] = score;
}

constexpr int kBlock = 512;
constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;

__global__ void __launch_bounds__(kBlock)
    select_largest(const float* all_scores, int64_t stride, const int32_t* counts, int32_t* all_selected, int64_t k) {
  wait_for_previous();
  __shared__ int32_t s_histogram[kDigits];
  __shared__ uint32_t s_threshold;
  __shared__ int32_t s_wanted;
  const int64_t t = blockIdx.x;
  const float* scores = all_scores + t * stride;
  int32_t* selected = all_selected + t * k;
  const int32_t count = counts[t], kept = static_cast<int32_t>(min(k, static_cast<int64_t>(count)));
  for (int64_t i = kept + threadIdx.x; i < k; i += kBlock) selected[i] = -1;
  if (kept == count) {  // all of them
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kBlock) selected[i] = i;
    return;
  }
  // The score of rank `kept`, digit by digit from the top: s_wanted of those that share the digits so far.
  if (threadIdx.x == 0) s_threshold = 0, s_wanted = kept;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    if (threadIdx.x < kDigits) s_histogram[threadIdx.x] = 0;
    __syncthreads();
    const uint32_t prefix = s_threshold;
    const uint32_t above = shift + kDigitBits == 32 ? 0 : ~uint32_t{0} << (shift + kDigitBits);
    for (int32_t j = threadIdx.x; j < count; j += kBlock) {
      const uint32_t bits = ordered_bits(scores[j]);
      // Whole numbers: the order of these additions changes nothing.
      if ((bits & above) == prefix) atomicAdd(&s_histogram[bits >> shift & (kDigits - 1)], 1);
    }
    __syncthreads();
    // Digits from the top: the one in which the wanted rank falls.
    const int digit = kDigits - 1 - static_cast<int>(threadIdx.x);
    const int32_t here = digit >= 0 ? s_histogram[digit] : 0, wanted = s_wanted;
    const int32_t higher = sum_before(here).before;
    if (higher < wanted && wanted <= higher + here) {
      s_wanted = wanted - higher;
      s_threshold = prefix | static_cast<uint32_t>(digit) << shift;
    }
    __syncthreads();
  }
  const uint32_t threshold = s_threshold;
  const int32_t wanted = s_wanted;
  int32_t num_selected = 0, num_equal = 0;
  for (int32_t first = 0; first < count; first += kBlock) {
    const int32_t j = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t bits = j < count ? ordered_bits(scores[j]) : 0;
    const bool is_equal = j < count && bits == threshold;
    const auto equal = sum_before<int32_t>(is_equal);
    const bool is_selected = j < count && (bits > threshold || (is_equal && num_equal + equal.before < wanted));
    const auto chosen = sum_before<int32_t>(is_selected);
    if (is_selected) selected[num_selected + chosen.before] = j;
    num_equal += equal.total, num_selected += chosen.total;
  }
}

}  // namespace

void index_scores(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue) {
  const float scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width) * static_cast<double>(desc.heads)));
  const ScoreJob job{values_of(args.queries),
                     values_of(args.weights),
                     args.keys,
                     args.counts,
                     args.scores,
                     entries_of(desc.keys),
                     desc.heads,
                     desc.width,
                     args.stride,
                     scale,
                     desc.activation == DType::kBF16};
  const dim3 grid(static_cast<unsigned>(args.num_tokens),
                  static_cast<unsigned>(ceil_div<int64_t>(args.stride, kKeysPerBlock)));
  with_entries(desc.keys.format, [&](auto format) {
    launch("index_scores", queue, score_keys<format.value>, grid, kKeysPerBlock * kLanes, 0, job);
  });
}

void top_k(const ops::TopK::Desc& desc, const ops::TopK::Args& args, device::Queue& queue) {
  launch("top_k", queue, select_largest, grid_for(args.num_tokens, 1), kBlock, 0, args.scores, args.stride, args.counts,
         args.selected, desc.k);
}

}  // namespace tessera::backends::cuda
