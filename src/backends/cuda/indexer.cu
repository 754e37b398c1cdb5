// SPDX-License-Identifier: Apache-2.0
// index_scores: half a warp per key of a token. top_k: a thread block finds the k-th largest score by its bits, eleven
// at a time (fewer, and scores that lie close together would all be counted in one place), then lists what is above it,
// and of what equals it the lowest indices. Bound by the latency of a round, of long contexts by counting: there a few
// tokens' scores are taken in parts, a block each, and a second kernel chooses from what the parts have listed.
#include <algorithm>
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

constexpr int kBlock = 512, kEach = 4, kChunk = kBlock * kEach;  // a thread has neighbouring scores of a chunk
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
static_assert(kDigits == kChunk && 3 * kDigitBits >= 32);

// A token's scores in parts of `part`: the largest k of part p of token t are listed at lists + (t * parts + p) * k.
// Whoever is among the token's largest is among its part's, ties included. All parts but the last are longer than k, so
// a token's lists have no gap; they ascend from part to part, so ties among the listed go by index too.
struct Lists {
  int32_t* lists;  // null: each token's scores are one part
  int64_t part, parts;
};
constexpr int64_t kMostLists = 1024;
constexpr int kHeldOfMany = 1, kHeldOfFew = 6;  // chunks in registers: many blocks share a multiprocessor, few need not

enum class Choice { kOfScores, kOfParts, kOfLists };

// Grid: tokens by parts (kOfParts).
template <Choice kChoice, int kHeld>
__global__ void __launch_bounds__(kBlock) select_largest(const float* all_scores, int64_t stride, const int32_t* counts,
                                                         int32_t* all_selected, int64_t k, Lists parts) {
  wait_for_previous();
  __shared__ uint4 s_bins[kDigits / kEach];  // how many scores have a digit
  __shared__ uint32_t s_threshold;
  __shared__ int32_t s_wanted;
  const int64_t t = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const float* scores = all_scores + t * stride;
  int32_t* selected = all_selected + t * k;
  const int32_t* list = nullptr;
  int32_t begin = 0, count = counts[t];
  if constexpr (kChoice == Choice::kOfParts) {
    const int64_t first = blockIdx.y * parts.part;
    if (first >= count) return;
    begin = static_cast<int32_t>(first);
    count = static_cast<int32_t>(min(parts.part, count - first));
    selected = parts.lists + (t * parts.parts + blockIdx.y) * k;
  } else if constexpr (kChoice == Choice::kOfLists) {
    list = parts.lists + t * parts.parts * k;
    count = static_cast<int32_t>(count / parts.part * k + min(k, count % parts.part));
  }
  // The index of the score at place i of those to choose from.
  const auto index_at = [&](int32_t i) { return kChoice == Choice::kOfLists ? list[i] : begin + i; };
  const int32_t kept = static_cast<int32_t>(min(k, static_cast<int64_t>(count)));
  if (kChoice != Choice::kOfParts) {
    for (int64_t i = kept + thread; i < k; i += kBlock) selected[i] = -1;
  }
  if (kept == count) {  // all of them
    for (int32_t i = thread; i < count; i += kBlock) selected[i] = index_at(i);
    return;
  }
  // Calls each_chunk(first, bits) with this thread's scores of each chunk, from `first` on; of the first chunks they
  // stay in registers from round to round.
  const auto load = [&](int32_t first, uint32_t(&bits)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) bits[i] = first + i < count ? ordered_bits(scores[index_at(first + i)]) : 0;
  };
  uint32_t held[kHeld][kEach];
#pragma unroll
  for (int c = 0; c < kHeld; ++c) load(c * kChunk + thread * kEach, held[c]);
  const auto for_each_chunk = [&](const auto& each_chunk) {
#pragma unroll
    for (int c = 0; c < kHeld; ++c) {
      if (c * kChunk < count) each_chunk(c * kChunk + thread * kEach, held[c]);
    }
    for (int32_t first = kHeld * kChunk; first < count; first += kChunk) {
      uint32_t bits[kEach];
      load(first + thread * kEach, bits);
      each_chunk(first + thread * kEach, bits);
    }
  };
  // The score of rank `kept`, digit by digit from the top: s_wanted of those that share the digits so far.
  if (thread == 0) s_threshold = 0, s_wanted = kept;
  for (int end = 32; end > 0; end -= kDigitBits) {
    const int shift = max(end - kDigitBits, 0);
    s_bins[thread] = uint4{0, 0, 0, 0};
    __syncthreads();
    const uint32_t prefix = s_threshold, above = end == 32 ? 0 : ~uint32_t{0} << end;
    uint32_t* s_counts = &s_bins[0].x;
    for_each_chunk([&](int32_t first, const uint32_t(&bits)[kEach]) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        // Whole numbers: the order of these additions changes nothing.
        if (first + i < count && (bits[i] & above) == prefix) atomicAdd(s_counts + ((bits[i] & ~above) >> shift), 1u);
      }
    });
    __syncthreads();
    // Digits from the top: the one in which the wanted rank falls.
    const int last = kBlock - 1 - thread;
    const uint4 bins = s_bins[last];
    const int32_t wanted = s_wanted, here[kEach] = {static_cast<int32_t>(bins.w), static_cast<int32_t>(bins.z),
                                                    static_cast<int32_t>(bins.y), static_cast<int32_t>(bins.x)};
    int32_t higher = sum_before(here[0] + here[1] + here[2] + here[3]).before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (higher < wanted && wanted <= higher + here[i]) {
        s_wanted = wanted - higher;
        s_threshold = prefix | static_cast<uint32_t>(last * kEach + kEach - 1 - i) << shift;
      }
      higher += here[i];
    }
    __syncthreads();
  }
  const uint32_t threshold = s_threshold;
  const int32_t wanted = s_wanted;
  int32_t num_above = 0, num_equal = 0;
  for_each_chunk([&](int32_t first, const uint32_t(&bits)[kEach]) {
    const auto is_above = [&](int i) { return first + i < count && bits[i] > threshold; };
    const auto is_equal = [&](int i) { return first + i < count && bits[i] == threshold; };
    // Both counts in a word: at most kChunk each.
    uint32_t counted = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) counted += is_above(i) ? 1u << 16 : is_equal(i) ? 1u : 0u;
    const auto sums = sum_before(counted);
    int32_t above = num_above + static_cast<int32_t>(sums.before >> 16);
    int32_t equal = num_equal + static_cast<int32_t>(sums.before & 0xFFFF);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (is_above(i) || (is_equal(i) && equal < wanted)) selected[above + min(equal, wanted)] = index_at(first + i);
      above += is_above(i), equal += is_equal(i);
    }
    num_above += static_cast<int32_t>(sums.total >> 16), num_equal += static_cast<int32_t>(sums.total & 0xFFFF);
  });
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

int64_t top_k_workspace(const ops::TopK::Desc& desc, int64_t /*max_tokens*/) {
  return kMostLists * desc.k * static_cast<int64_t>(sizeof(int32_t));
}

void top_k(const ops::TopK::Desc& desc, const ops::TopK::Args& args, device::Queue& queue) {
  constexpr int64_t kLeastToPart = 4 * kChunk, kLeastParts = 5, kFewTokens = 128;
  // With as many listed as there are scores in a part, both kernels have the same to do.
  const int64_t even = static_cast<int64_t>(std::sqrt(static_cast<double>(args.stride * desc.k)));
  const int64_t most_parts = kMostLists / std::max<int64_t>(args.num_tokens, 1);
  const int64_t least = std::max(even, most_parts == 0 ? args.stride : ceil_div(args.stride, most_parts));
  const int64_t part = std::max<int64_t>(ceil_div<int64_t>(least, kChunk), 1) * kChunk;  // no scores at all: one
  const Lists lists{static_cast<int32_t*>(args.workspace), part, ceil_div(args.stride, part)};
  const auto start = [&](auto* kernel, int64_t parts) {
    launch("top_k", queue, kernel, dim3(static_cast<unsigned>(args.num_tokens), static_cast<unsigned>(parts)), kBlock,
           0, args.scores, args.stride, args.counts, args.selected, desc.k, lists);
  };
  if (args.stride > kLeastToPart && lists.parts >= kLeastParts && part > desc.k) {
    start(select_largest<Choice::kOfParts, kHeldOfFew>, lists.parts);
    start(select_largest<Choice::kOfLists, kHeldOfFew>, 1);
  } else if (args.num_tokens <= kFewTokens) {
    start(select_largest<Choice::kOfScores, kHeldOfFew>, 1);
  } else {
    start(select_largest<Choice::kOfScores, kHeldOfMany>, 1);
  }
}

}  // namespace tessera::backends::cuda
