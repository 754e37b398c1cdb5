// SPDX-License-Identifier: Apache-2.0
#pragma once
// Probabilities by size, for sample.cu: keys that rise as a probability falls, buckets of keys, and what buckets hold.
#include <cstdint>

#include "backends/cuda_common/block_scan.cuh"
#include "ops/sample/sample_steps.h"

namespace tessera::backends::cuda {

// A row that is drawn from.
struct SampledRow {
  const float* logits;
  const uint32_t* mask;  // null: all
  int32_t vocab, top;    // the largest logit's id
  float temperature, min_p;

  // Relative to the top's; 0: it isn't drawn.
  __device__ double probability(int32_t id) const {
    const double p = id == top ? 1 : relative(id);
    return p >= static_cast<double>(min_p) ? p : 0;
  }

 private:
  __device__ double relative(int32_t id) const {
    if (!ops::is_allowed(mask, id)) return 0;
    const double gap = static_cast<double>(logits[id]) - static_cast<double>(logits[top]);
    const double p = exp(temperature == 1 ? gap : gap / static_cast<double>(temperature));
    return p > 0 ? p : 0;
  }
};

// Of a probability above 0 and at most 1: 0 for 1, and it rises by 1 with each smaller double.
__device__ inline uint64_t key_of(double probability) {
  return __builtin_bit_cast(uint64_t, 1.0) - __builtin_bit_cast(uint64_t, probability);
}
__device__ inline double probability_of(uint64_t key) {
  return __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, 1.0) - key);
}

// Buckets of the first level: eight to an octave for 64 octaves, and one of all that is smaller.
constexpr int kOctaveBits = 3, kMantissaBits = 52, kFirstShift = kMantissaBits - kOctaveBits;
constexpr int kLastBucket = 64 << kOctaveBits, kFirstBuckets = kLastBucket + 1;
// Each of them is cut into so many, those again, as often as it takes.
constexpr int kCutBits = 9, kCuts = 1 << kCutBits;
constexpr int kMostBuckets = kFirstBuckets > kCuts ? kFirstBuckets : kCuts;

__device__ inline int first_bucket(uint64_t key) {
  const uint64_t bucket = key >> kFirstShift;
  return bucket < kLastBucket ? static_cast<int>(bucket) : kLastBucket;
}

// A probability as a whole number of units that depend on the octave, rounded down: at most 2^kUnitBits, and less than
// 2^-(kUnitBits - 1) of it is lost. So sums of them are the same in any order.
constexpr int kUnitBits = 40;
// 2^exponent.
__device__ inline double power_of_two(int exponent) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(1023 + exponent) << kMantissaBits);
}
__device__ inline uint64_t mass_of(double probability, int bucket) {
  return static_cast<uint64_t>(probability * power_of_two((bucket >> kOctaveBits) + kUnitBits));
}
__device__ inline double sum_of_mass(uint64_t mass, int bucket) {
  return static_cast<double>(mass) * power_of_two(-(bucket >> kOctaveBits) - kUnitBits);
}

// Counts and masses of buckets in shared memory. A mass is kept in parts, since shared memory adds 32 bits at once: of
// up to 2^17 candidates none overflows. Several copies, each of other lanes, for buckets that many share.
template <int kBuckets, int kCopies>
struct Histogram {
  static constexpr int kParts = 3, kPartBits = 15;
  static_assert(kParts * kPartBits > kUnitBits);
  uint32_t counts[kBuckets][kCopies];
  uint32_t parts[kBuckets][kParts][kCopies];

  // All threads.
  __device__ void clear() {
    constexpr int kWords = static_cast<int>(sizeof(Histogram) / sizeof(uint32_t));
    for (int i = static_cast<int>(threadIdx.x); i < kWords; i += static_cast<int>(blockDim.x)) {
      reinterpret_cast<uint32_t*>(this)[i] = 0;
    }
    __syncthreads();
  }
  __device__ void add(int bucket, uint64_t mass) {
    const int copy = static_cast<int>(threadIdx.x) % kCopies;
    atomicAdd(&counts[bucket][copy], 1u);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const auto bits = static_cast<uint32_t>(mass >> (part * kPartBits)) & ((1u << kPartBits) - 1);
      atomicAdd(&parts[bucket][part][copy], bits);
    }
  }
  __device__ uint32_t count(int bucket) const {
    uint32_t sum = 0;
    for (int copy = 0; copy < kCopies; ++copy) sum += counts[bucket][copy];
    return sum;
  }
  __device__ uint64_t mass(int bucket) const {
    uint64_t sum = 0;
    for (int part = 0; part < kParts; ++part) {
      for (int copy = 0; copy < kCopies; ++copy) {
        sum += static_cast<uint64_t>(parts[bucket][part][copy]) << (part * kPartBits);
      }
    }
    return sum;
  }
};

// The sum of the values of all threads up to this one, in an order that their number alone gives.
template <class T>
__device__ T running_sum(T value) {
  constexpr int kMostWarps = 32;
  __shared__ T s_warps[kMostWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const T sum = cuda_common::sum_up_to(value);
  __syncthreads();  // the last call's sums have been read
  if (lane == 31) s_warps[warp] = sum;
  __syncthreads();
  const T sums = cuda_common::sum_up_to(lane * 32 < static_cast<int>(blockDim.x) ? s_warps[lane] : T{0});
  const T before = __shfl_sync(~0u, sums, max(warp - 1, 0));
  return warp == 0 ? sum : before + sum;
}

// Sorts candidates in place, behind `count` of which there is room up to the next power of two.
__device__ inline void sort_candidates(ops::Candidate* candidates, int32_t count, int32_t vocab) {
  int32_t num_padded = 1;
  while (num_padded < count) num_padded *= 2;
  const auto threads = static_cast<int32_t>(blockDim.x), thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = count + thread; i < num_padded; i += threads) candidates[i] = {0, vocab};
  // The order is strict, so that sorting has one result, whatever order the candidates came in.
  for (int32_t size = 2; size <= num_padded; size *= 2) {
    for (int32_t step = size / 2; step > 0; step /= 2) {
      __syncthreads();
      for (int32_t i = thread; i < num_padded; i += threads) {
        const int32_t j = i ^ step;
        if (j < i) continue;
        const ops::Candidate a = candidates[i], b = candidates[j];
        if (ops::comes_before(a, b) != ((i & size) == 0)) candidates[i] = b, candidates[j] = a;
      }
    }
  }
  __syncthreads();
}

}  // namespace tessera::backends::cuda
