// SPDX-License-Identifier: Apache-2.0
#pragma once
// The choice of a token from what a row's buckets hold, by a thread block, for sample.cu. The candidate at which the
// running sum of probabilities reaches a bound lies in one bucket; that one's candidates alone are sorted, or the
// bucket is cut into smaller ones first. What the contract adds up one by one is known here within `slack` of itself;
// where that does not tell, the answer is kUndecided.
#include <cstdint>

#include "backends/cuda/sample_buckets.cuh"

namespace tessera::backends::cuda {

constexpr int kUndecided = -2;  // a token: to be drawn from all candidates, sorted

class SampleChoice {
 public:
  static constexpr int kThreads = 1024, kMostSorted = 1024;  // one a thread

  struct Shared {
    Histogram<kCuts, 1> cuts;
    ops::Candidate candidates[kMostSorted];
    double running[kMostBuckets > kMostSorted ? kMostBuckets : kMostSorted];  // sums up to a bucket or candidate
    int32_t num_candidates, found, token;
    double reached;
  };

  // All threads, of the first level's counts and masses.
  __device__ SampleChoice(const SampledRow& row, const ops::SampleRow& how, const uint32_t* counts,
                          const unsigned long long* masses, Shared& s)
      : row_(row), how_(how), s_(s) {
    const bool is_bucket = thread() < kFirstBuckets;
    first_.count = is_bucket ? static_cast<int32_t>(counts[thread()]) : 0;
    first_.mass = is_bucket ? sum_of_mass(masses[thread()], thread()) : 0;
    const auto before = cuda_common::sum_before(first_.count);
    first_.count_before = before.before, num_all_ = before.total;
    first_.running = running_sum(first_.mass);
    total_ = shared_value(first_.running, kThreads - 1);
    // A sum one by one has a rounding for each candidate, a product of shares one more, a mass less than a unit.
    slack_ = (num_all_ + 8) * 0x1p-52 + 0x1p-38;
  }

  __device__ int32_t token() {
    const ops::SamplingParams& params = how_.params;
    if (params.min_p > 1) return kUndecided;
    if (params.top_k > 0 && params.top_k < num_all_) return among_first(params.top_k);
    double total = total_;
    if (params.top_p < 1) {
      if (locate(static_cast<double>(params.top_p) * total) == kUndecided) return kUndecided;
      total = s_.reached;
    }
    return locate(ops::unit_draw(params, how_.position) * total);
  }

 private:
  // What a thread's bucket holds, and those before it.
  struct Bucket {
    int32_t count, count_before;
    double mass, running;  // the sum with its own
  };
  // Keys from `first` on, and what candidates before them hold.
  struct Range {
    uint64_t first;
    int shift;   // there are 2^shift keys
    int bucket;  // of the first level
    int32_t count, count_before;
    double before;
  };

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  // A thread's value, for all.
  template <class T>
  __device__ T shared_value(T value, int from) {
    __shared__ T s_value;
    __syncthreads();
    if (thread() == from) s_value = value;
    __syncthreads();
    return s_value;
  }

  // Whether a sum passes `bound` between two sums known within the slack, for certain. Nothing comes before the first.
  __device__ bool crosses(double before, double after, bool is_first, double bound) const {
    const bool was_below = is_first || before * (1 + slack_) < bound * (1 - 2 * slack_);
    return was_below && after * (1 - slack_) > bound * (1 + 2 * slack_);
  }
  // The one thread of which is_here holds; -1: none.
  __device__ int the_one(bool is_here) {
    __syncthreads();
    if (thread() == 0) s_.found = -1;
    __syncthreads();
    if (is_here) s_.found = thread();
    __syncthreads();
    return s_.found;
  }
  // The range of bucket `found`, which is of `shift` bits, behind `begin`.
  __device__ Range range_of(const Bucket& own, uint64_t begin, int shift, int bucket, int found) {
    const Bucket one = shared_value(own, found);
    return {begin + (static_cast<uint64_t>(found) << shift),
            shift,
            bucket,
            one.count,
            one.count_before,
            one.running - one.mass};
  }

  // Logits that can't belong to keys in [first, end) are told apart in FP32; NaN, of infinite logits or temperatures,
  // excludes none.
  struct Logits {
    float least, most;
    __device__ bool may_have(float logit) const { return !(logit < least) && !(logit > most); }
  };
  __device__ Logits logits_of(uint64_t first, uint64_t end) const {
    const double top = row_.logits[row_.top], temperature = row_.temperature;
    const double margin = 1e-6 * (fabs(top) + 100 * temperature);
    return {static_cast<float>(top + temperature * log(probability_of(end - 1)) - margin),
            static_cast<float>(top + temperature * log(probability_of(first)) + margin)};
  }

  // Every candidate whose key is in [first, end): visit(id, probability, key).
  template <class Visit>
  __device__ void each(uint64_t first, uint64_t end, const Visit& visit) const {
    const Logits logits = logits_of(first, end);
    constexpr int kAtOnce = 16;  // loads on their way together
    for (int32_t begin = thread(); begin < row_.vocab; begin += kAtOnce * kThreads) {
      float loaded[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int32_t id = begin + n * kThreads;
        loaded[n] = id < row_.vocab ? row_.logits[id] : -__builtin_huge_valf();
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const int32_t id = begin + n * kThreads;
        if (id >= row_.vocab || !logits.may_have(loaded[n])) continue;
        const double p = row_.probability(id);
        if (!(p > 0)) continue;
        const uint64_t key = key_of(p);
        if (key >= first && key < end) visit(id, p, key);
      }
    }
    __syncthreads();
  }

  // Of what a range is cut into.
  __device__ static int shift_below(int shift) {
    return max(shift - kCutBits, 0);
  }
  // Cuts a range into smaller ones; what this thread's holds.
  __device__ Bucket cut(const Range& range) {
    __syncthreads();
    s_.cuts.clear();
    const int shift = shift_below(range.shift);
    each(range.first, range.first + (uint64_t{1} << range.shift), [&](int32_t, double p, uint64_t key) {
      s_.cuts.add(static_cast<int>((key - range.first) >> shift), mass_of(p, range.bucket));
    });
    Bucket own{};
    if (thread() < kCuts) {
      own.count = static_cast<int32_t>(s_.cuts.count(thread()));
      own.mass = sum_of_mass(s_.cuts.mass(thread()), range.bucket);
    }
    own.count_before = range.count_before + cuda_common::sum_before(own.count).before;
    own.running = range.before + running_sum(own.mass);
    return own;
  }

  // Sorts the candidates in [first, end), of which there have to be `count`.
  __device__ bool gather(uint64_t first, uint64_t end, int32_t count) {
    __syncthreads();
    if (thread() == 0) s_.num_candidates = 0;
    __syncthreads();
    each(first, end, [&](int32_t id, double p, uint64_t) {
      const int32_t at = atomicAdd(&s_.num_candidates, 1);
      if (at < kMostSorted) s_.candidates[at] = {p, id};
    });
    if (s_.num_candidates != count) return false;
    sort_candidates(s_.candidates, count, row_.vocab);
    return true;
  }

  // The candidate with which the running sum passes `bound`; s_.reached is the sum up to it.
  __device__ int32_t locate(double bound) {
    const auto is_here = [&](const Bucket& own) {
      const bool is_first = own.count_before == 0;
      return own.count > 0 && crosses(own.running - own.mass, own.running, is_first, bound);
    };
    int found = the_one(is_here(first_));
    if (found < 0 || found == kLastBucket) return kUndecided;
    Range range = range_of(first_, 0, kFirstShift, found, found);
    while (range.count > kMostSorted) {
      if (range.shift == 0) return among_equals(range, bound);
      const Bucket own = cut(range);
      found = the_one(is_here(own));
      if (found < 0) return kUndecided;
      range = range_of(own, range.first, shift_below(range.shift), range.bucket, found);
    }
    if (!gather(range.first, range.first + (uint64_t{1} << range.shift), range.count)) return kUndecided;
    const bool is_there = thread() < range.count;
    const double running = range.before + running_sum(is_there ? s_.candidates[thread()].probability : 0.0);
    s_.running[thread()] = running;
    __syncthreads();
    const bool is_first = thread() == 0 && range.count_before == 0;
    const double before = thread() == 0 ? range.before : s_.running[thread() - 1];
    found = the_one(is_there && crosses(before, running, is_first, bound));
    if (found < 0) return kUndecided;
    if (thread() == found) s_.reached = running;
    __syncthreads();
    return s_.candidates[found].id;
  }

  // The same among candidates of one probability, too many to sort: their order is that of their ids.
  __device__ int32_t among_equals(const Range& range, double bound) {
    const double p = probability_of(range.first);
    const double number = floor((bound - range.before) / p);  // of those before it
    if (!(number >= 0 && number < range.count)) return kUndecided;
    const double before = range.before + number * p;
    const bool is_first = range.count_before == 0 && number == 0;
    if (!crosses(before, before + p, is_first, bound)) return kUndecided;
    const Logits logits = logits_of(range.first, range.first + 1);
    const int32_t part = (row_.vocab + kThreads - 1) / kThreads, begin = min(thread() * part, row_.vocab);
    const int32_t end = min(begin + part, row_.vocab);
    const auto is_one = [&](int32_t id) {
      if (!logits.may_have(row_.logits[id])) return false;
      const double found = row_.probability(id);
      return found > 0 && key_of(found) == range.first;
    };
    int32_t count = 0;
    for (int32_t id = begin; id < end; ++id) count += is_one(id) ? 1 : 0;
    int32_t left = static_cast<int32_t>(number) - cuda_common::sum_before(count).before;
    if (thread() == 0) s_.token = kUndecided;
    __syncthreads();
    for (int32_t id = begin; left >= 0 && left < count && id < end; ++id) {
      if (is_one(id) && left-- == 0) s_.token = id, s_.reached = before + p;
    }
    __syncthreads();
    return s_.token;
  }

  // The draw from the `count` likeliest.
  __device__ int32_t among_first(int32_t count) {
    const auto is_here = [&](const Bucket& own) {
      return own.count_before < count && own.count_before + own.count >= count;
    };
    int found = count > kMostSorted ? -1 : the_one(is_here(first_));
    if (found < 0 || found == kLastBucket) return kUndecided;
    Range range = range_of(first_, 0, kFirstShift, found, found);
    while (range.count_before + range.count > kMostSorted) {
      if (range.shift == 0) return kUndecided;
      const Bucket own = cut(range);
      found = the_one(is_here(own));
      if (found < 0) return kUndecided;
      range = range_of(own, range.first, shift_below(range.shift), range.bucket, found);
    }
    const int32_t num_first = range.count_before + range.count;
    if (!gather(0, range.first + (uint64_t{1} << range.shift), num_first)) return kUndecided;
    if (thread() == 0) s_.token = ops::draw_candidate(s_.candidates, num_first, how_.params, how_.position);
    __syncthreads();
    return s_.token;
  }

  const SampledRow row_;
  const ops::SampleRow how_;
  Shared& s_;
  Bucket first_;
  int32_t num_all_;
  double total_, slack_;
};

}  // namespace tessera::backends::cuda
