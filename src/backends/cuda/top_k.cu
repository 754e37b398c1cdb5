// SPDX-License-Identifier: Apache-2.0
// top_k: a thread block finds the k-th largest score by its bits, then lists what is above it, and of what equals it
// the lowest indices. It finds it by rounds, which each count in which of 2,048 equal pieces of a range of bits the
// scores lie and go on with the piece that holds the k-th. The first range is from a bound that its threads' own
// largest give to the largest: scores of one magnitude spread over all pieces there, where pieces of all there is would
// be counted in a few places, one behind the other. Of tokens that have more scores than a block can hold, unless they
// are many, scores are taken in parts, a block each, and then from what the parts have listed. Scores are in shared
// memory from round to round. A thread has an odd number of neighbouring ones, so that lanes meet different banks, and
// all it lists takes one scan.
// What bounds it: the latency of a round, of many scores by going over them.
#include <algorithm>
#include <cmath>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/block_scan.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/ordered_bits.cuh"
#include "backends/cuda_common/ptx/cp_async.cuh"
#include "backends/cuda_common/spread.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

constexpr int kBlock = 512, kMostEach = 33, kMostHeld = kBlock * kMostEach;  // scores of a thread, and of a block
constexpr int kPieceBits = 11, kPieces = 1 << kPieceBits, kThreadPieces = kPieces / kBlock;
static_assert(kThreadPieces == 4);
constexpr int64_t kMostLists = 1024;

struct Job {
  const float* scores;
  int64_t stride;
  const int32_t* counts;
  int32_t* selected;
  int64_t k;
};

// A token's scores in parts of `part`, all but the last longer than k: the largest k of part p of token t, by index,
// are at lists + (t * parts + p) * k, and the scores in the same place of `scores`. Whoever is among the token's
// largest is among its part's, ties included. A token's lists have no gap; they ascend from part to part, so ties among
// the listed go by index too.
struct Parts {
  int32_t* lists;
  float* scores;
  int64_t part, parts;
};

// The score that is looked for is the one of rank `wanted` among those whose bits are in [low, high]; all above are
// among the largest. low == high: of those that equal it `wanted` are.
struct Range {
  uint32_t low, high;
  int32_t wanted;
};

// The ordered_bits of `count` scores. A thread has neighbouring ones, those behind the first kMostHeld by turns. By all
// threads of a block.
class Scores {
 public:
  __device__ Scores(const float* values, int32_t count)
      : values_(values),
        held_(dynamic_shared<uint32_t>()),
        count_(count),
        each_(min(kMostEach, ceil_div(count, kBlock) | 1)) {
    if (count <= kMostHeld) load(0);
  }
  // Threads that have as many scores as any.
  __device__ int32_t full_threads() const { return min(kBlock, count_ / each_); }

  // each_turn(first, num, bits): bits[i], i < num, are this thread's from score `first` on; num may be 0 or less.
  template <class EachTurn>
  __device__ void for_each_turn(const EachTurn& each_turn) const {
    const int own = static_cast<int>(threadIdx.x) * each_;
    for (int32_t begin = 0; begin < count_; begin += kMostHeld) {
      if (count_ > kMostHeld) {
        __syncthreads();  // the turn before has been read
        load(begin);
      }
      each_turn(begin + own, min(each_, count_ - begin - own), held_ + own);
    }
  }

 private:
  __device__ void load(int32_t begin) const {
    const int32_t end = min(count_ - begin, kMostHeld), thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll 4
    for (int32_t i = thread; i < end; i += kBlock) ptx::copy_async<4>(held_ + i, values_ + begin + i);
    ptx::commit_copies();
    ptx::wait_for_copies<0>();
#pragma unroll 4
    for (int32_t i = thread; i < end; i += kBlock) held_[i] = ordered_bits(__uint_as_float(held_[i]));
    __syncthreads();
  }

  const float* values_;
  uint32_t* held_;
  int32_t count_;
  int each_;
};

// As many threads as are full have a score that is at least the least of their largest, and each of them two that are
// at least the least of their second, and three.
__device__ Range first_range(const Scores& scores, int32_t kept) {
  constexpr int kWarps = kBlock / 32, kRanks = 3;
  __shared__ uint32_t s_low[kWarps], s_high[kWarps];
  uint32_t largest[kRanks] = {};
  scores.for_each_turn([&](int32_t, int32_t num, const uint32_t* bits) {
#pragma unroll 4
    for (int i = 0; i < num; ++i) {
      uint32_t next = bits[i];
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        const uint32_t lower = min(largest[rank], next);
        largest[rank] = max(largest[rank], next), next = lower;
      }
    }
  });
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int32_t full = scores.full_threads();
  const uint32_t own = thread >= full ? ~0u : kept <= full ? largest[0] : kept <= 2 * full ? largest[1] : largest[2];
  const uint32_t least = __reduce_min_sync(~0u, own), most = __reduce_max_sync(~0u, largest[0]);
  if (lane == 0) s_low[thread / 32] = least, s_high[thread / 32] = most;
  __syncthreads();
  const uint32_t bound = __reduce_min_sync(~0u, s_low[lane % kWarps]);
  return {kept <= kRanks * full ? bound : 0, __reduce_max_sync(~0u, s_high[lane % kWarps]), kept};
}

// The `kept` largest, fewer than there are: low == high in what it returns.
__device__ Range find_largest(const Scores& scores, int32_t kept) {
  __shared__ uint4 s_bins[kPieces / kThreadPieces];  // how many scores are in a piece
  __shared__ Range s_range;
  const int thread = static_cast<int>(threadIdx.x);
  s_bins[thread] = uint4{0, 0, 0, 0};
  Range range = first_range(scores, kept);
  while (range.low < range.high) {
    const uint32_t span = range.high - range.low;
    const int shift = max(32 - __clz(static_cast<int>(span)) - kPieceBits, 0);
    uint32_t* s_counts = &s_bins[0].x;
    scores.for_each_turn([&](int32_t, int32_t num, const uint32_t* bits) {
#pragma unroll 4
      for (int i = 0; i < num; ++i) {
        // Whole numbers: the order of these additions changes nothing.
        const uint32_t place = bits[i] - range.low;
        if (place <= span) atomicAdd(s_counts + (place >> shift), 1u);
      }
    });
    __syncthreads();
    // Pieces from the top: the one in which the wanted rank falls.
    const int last = kBlock - 1 - thread;
    const uint4 bins = s_bins[last];
    s_bins[last] = uint4{0, 0, 0, 0};
    const int32_t here[kThreadPieces] = {static_cast<int32_t>(bins.w), static_cast<int32_t>(bins.z),
                                         static_cast<int32_t>(bins.y), static_cast<int32_t>(bins.x)};
    int32_t higher = sum_before(here[0] + here[1] + here[2] + here[3]).before;
#pragma unroll
    for (int i = 0; i < kThreadPieces; ++i) {
      const int32_t wanted = range.wanted - higher;
      if (wanted > 0 && wanted <= here[i]) {
        const uint32_t piece = static_cast<uint32_t>(last * kThreadPieces + kThreadPieces - 1 - i);
        const uint32_t low = range.low + (piece << shift), high = min(range.high, low + (1u << shift) - 1);
        // A whole piece ends the search: all that is not below it. Since not all are kept it does not begin at 0.
        s_range = wanted == here[i] ? Range{low - 1, low - 1, 0} : Range{low, high, wanted};
      }
      higher += here[i];
    }
    __syncthreads();
    range = s_range;
  }
  return range;
}

// put(place, i, bits) of each score i that is chosen, in order.
template <class Put>
__device__ void list_chosen(const Scores& scores, const Range& range, const Put& put) {
  const uint32_t threshold = range.low;
  const int32_t wanted = range.wanted;
  int32_t num_above = 0, num_equal = 0;
  scores.for_each_turn([&](int32_t first, int32_t num, const uint32_t* bits) {
    uint64_t are_above = 0, are_equal = 0;
#pragma unroll 4
    for (int i = 0; i < num; ++i) {
      are_above |= uint64_t{bits[i] > threshold} << i;
      are_equal |= uint64_t{bits[i] == threshold} << i;
    }
    // Both counts in a word: at most kMostHeld each.
    constexpr uint32_t kAbove = 1 << 16;
    static_assert(kMostHeld < kAbove && kMostEach <= 64);
    const auto sums = sum_before(static_cast<uint32_t>(__popcll(are_above)) * kAbove + __popcll(are_equal));
    int32_t above = num_above + static_cast<int32_t>(sums.before / kAbove);
    int32_t equal = num_equal + static_cast<int32_t>(sums.before % kAbove);
    for (uint64_t left = wanted > 0 ? are_above | are_equal : are_above; left != 0; left &= left - 1) {
      const int i = __ffsll(static_cast<int64_t>(left)) - 1;
      const bool is_equal = (are_equal >> i & 1) != 0;
      if (!is_equal || equal < wanted) put(above + min(equal, wanted), first + i, bits[i]);
      above += !is_equal, equal += is_equal;
    }
    num_above += static_cast<int32_t>(sums.total / kAbove), num_equal += static_cast<int32_t>(sums.total % kAbove);
  });
}

// What a block chooses among: all scores of a token, those of a part, or what parts have listed.
enum class From { kScores, kPart, kLists };

// Grid: tokens by parts (From::kPart).
__global__ void __launch_bounds__(kBlock) choose_largest(Job job, Parts parts, From from) {
  const int64_t t = blockIdx.x, visible = job.counts[t], begin = blockIdx.y * parts.part;
  wait_for_previous();
  const float* values = job.scores + t * job.stride + begin;
  const int32_t* listed = nullptr;
  int32_t* chosen = job.selected + t * job.k;
  float* chosen_scores = nullptr;
  int64_t count = visible;
  if (from == From::kPart) {
    if (begin >= visible) return;
    const int64_t list = (t * parts.parts + blockIdx.y) * job.k;
    chosen = parts.lists + list, chosen_scores = parts.scores + list;
    count = min(parts.part, visible - begin);
  } else if (from == From::kLists) {
    listed = parts.lists + t * parts.parts * job.k, values = parts.scores + t * parts.parts * job.k;
    count = visible / parts.part * job.k + min(job.k, visible % parts.part);
  }
  const int32_t thread = static_cast<int32_t>(threadIdx.x), kept = static_cast<int32_t>(min(job.k, count));
  if (from != From::kPart) {
    for (int64_t i = kept + thread; i < job.k; i += kBlock) chosen[i] = -1;
  }
  if (from == From::kScores && kept == count) {
    for (int32_t i = thread; i < kept; i += kBlock) chosen[i] = i;
    return;
  }
  const Scores scores(values, static_cast<int32_t>(count));
  // All, where no more are there than are kept: the lowest bits are 0.
  const Range range = kept == count ? Range{0, 0, kept} : find_largest(scores, kept);
  list_chosen(scores, range, [&](int32_t place, int32_t i, uint32_t bits) {
    chosen[place] = static_cast<int32_t>(begin) + i;
    if (chosen_scores != nullptr) chosen_scores[place] = score_of_bits(bits);
  });
  if (listed == nullptr) return;
  // Until here where they are listed: no lane waits for what another one loads.
  __syncthreads();
  for (int32_t i = thread; i < kept; i += kBlock) chosen[i] = listed[chosen[i]];
}

// Bytes of a block that has so many scores.
size_t held_bytes(int64_t count) {
  return static_cast<size_t>(std::min<int64_t>(kMostEach, ceil_div<int64_t>(count, kBlock) | 1)) * kBlock *
         sizeof(uint32_t);
}

}  // namespace

int64_t top_k_workspace(const ops::TopK::Desc& desc, int64_t /*max_tokens*/) {
  return 2 * kMostLists * desc.k * static_cast<int64_t>(sizeof(int32_t));
}

void top_k(const ops::TopK::Desc& desc, const ops::TopK::Args& args, device::Queue& queue) {
  const Job job{args.scores, args.stride, args.counts, args.selected, desc.k};
  // With as many listed as there are scores in a part, both kernels have the same to do.
  const int64_t even = static_cast<int64_t>(std::sqrt(static_cast<double>(args.stride * desc.k)));
  const int64_t most_parts = kMostLists / std::max<int64_t>(args.num_tokens, 1);
  const int64_t least = std::max(even, most_parts == 0 ? args.stride : ceil_div(args.stride, most_parts));
  const int64_t part = (ceil_div<int64_t>(least, kBlock) | 1) * kBlock;
  const int64_t num_parts = ceil_div(args.stride, part);
  int32_t* lists = static_cast<int32_t*>(args.workspace);
  const Parts parts{lists, reinterpret_cast<float*>(lists + kMostLists * desc.k), part, num_parts};
  const auto start = [&](From from, int64_t blocks, size_t bytes) {
    launch("top_k", queue, choose_largest, dim3(static_cast<unsigned>(args.num_tokens), static_cast<unsigned>(blocks)),
           kBlock, bytes, job, parts, from);
  };
  // Scores that a block can hold it goes over faster than parts and a second kernel do, of one token or of hundreds;
  // of more, two parts that can be held are faster than one block that takes turns, or three that cannot.
  const int64_t least_parts = part <= kMostHeld ? 2 : 3;
  if (args.stride > kMostHeld && num_parts >= least_parts && part > desc.k) {
    start(From::kPart, num_parts, spread_bytes(queue, held_bytes(part), num_parts * args.num_tokens));
    start(From::kLists, 1, spread_bytes(queue, held_bytes(num_parts * desc.k), args.num_tokens));
  } else {
    start(From::kScores, 1, spread_bytes(queue, held_bytes(args.stride), args.num_tokens));
  }
}

}  // namespace tessera::backends::cuda
