// SPDX-License-Identifier: Apache-2.0
// Sampling without sorting the vocabulary: candidates are counted by probability, and only those that the draw can
// reach are sorted. The token is the reference's: its sums are made in the same order over what is sorted, and where
// the sum over everything is needed, an interval that holds it decides; a draw that falls into the interval sorts
// everything.
#include <algorithm>
#include <limits>

#include "backends/cpu_common/rows.h"
#include "ops/sample/sample_steps.h"

namespace tessera::backends::cpu_common {

using ops::Candidate;
using ops::Sample;
using ops::SamplingParams;

namespace {

constexpr int64_t kBlock = 1024;                      // logits of which the largest is sought at once
constexpr int kBucketsPerOctave = 16, kOctaves = 64;  // of probabilities; the last bucket has all smaller ones
constexpr int kBuckets = kBucketsPerOctave * kOctaves + 1;

// Rises as the probability, at most 1, falls.
int bucket_of(double probability) {
  const uint64_t gap = __builtin_bit_cast(uint64_t, 1.0) - __builtin_bit_cast(uint64_t, probability);
  return static_cast<int>(std::min<uint64_t>(gap >> 48, kBuckets - 1));
}

// The lowest id with the largest logit; NaN and minus infinity never win. -1 where there is no other.
int32_t likeliest(const RowKernels& kernels, const float* logits, int64_t vocab) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t found = vocab, found_end = vocab;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    const int64_t end = std::min(vocab, begin + kBlock), whole = begin + (end - begin) / kRowStep * kRowStep;
    float value = kernels.largest(logits + begin, whole - begin);
    for (int64_t i = whole; i < end; ++i) value = logits[i] > value ? logits[i] : value;
    if (value > most) most = value, found = begin, found_end = end;
  }
  while (found < found_end && !(logits[found] == most)) ++found;
  return found < vocab ? static_cast<int32_t>(found) : -1;
}

// All candidates by falling probability, as far as they are wanted.
class Candidates {
 public:
  Candidates(const double* probabilities, int64_t vocab, Candidate* sorted)
      : probabilities_(probabilities), vocab_(vocab), sorted_(sorted) {
    for (int64_t id = 0; id < vocab; ++id) {
      const double p = probabilities[id];
      if (!(p > 0)) continue;
      const int bucket = bucket_of(p);
      ++counts_[bucket];
      masses_[bucket] += p;
      ++num_all_;
    }
    for (const double mass : masses_) total_ += mass;
  }

  // Sorts those of buckets 0 to `last`.
  void sort_to(int last) {
    count_ = 0;
    for (int64_t id = 0; id < vocab_; ++id) {
      const double p = probabilities_[id];
      if (p > 0 && bucket_of(p) <= last) sorted_[count_++] = {p, static_cast<int32_t>(id)};
    }
    std::sort(sorted_, sorted_ + count_, ops::comes_before);
  }
  // The first bucket with which there are `count` candidates; the last one where there are fewer.
  int bucket_with_count(int64_t count) const {
    int bucket = 0;
    for (int64_t seen = counts_[0]; seen < count && bucket + 1 < kBuckets;) seen += counts_[++bucket];
    return bucket;
  }
  // The same for their sum.
  int bucket_with_mass(double mass) const {
    int bucket = 0;
    for (double seen = masses_[0]; seen < mass && bucket + 1 < kBuckets;) seen += masses_[++bucket];
    return bucket;
  }

  const Candidate* sorted() const { return sorted_; }
  int64_t count() const { return count_; }
  bool are_all_sorted() const { return count_ == num_all_; }
  double total() const { return total_; }
  // Bounds how far total() and any sum of all probabilities in another order are apart: each is within n roundings.
  double slack() const { return 4 * static_cast<double>(num_all_) * 0x1p-53 * total_; }

 private:
  const double* probabilities_;
  int64_t vocab_, num_all_ = 0, count_ = 0;
  Candidate* sorted_;
  int32_t counts_[kBuckets] = {};
  double masses_[kBuckets] = {}, total_ = 0;
};

int32_t draw(Candidates& candidates, const SamplingParams& params, uint64_t position) {
  int last = kBuckets - 1;
  if (params.top_k > 0) last = std::min(last, candidates.bucket_with_count(params.top_k));
  if (params.min_p > 0) last = std::min(last, bucket_of(std::min(1.0, static_cast<double>(params.min_p))));
  const double total = candidates.total(), slack = candidates.slack();
  if (params.top_k <= 0 && params.min_p <= 0) {
    const double share = params.top_p < 1 ? static_cast<double>(params.top_p) : ops::unit_draw(params, position);
    last = candidates.bucket_with_mass(share * total + 2 * slack);
  }
  candidates.sort_to(last);
  if (!candidates.are_all_sorted()) {
    const int32_t token =
        ops::draw_of_first(candidates.sorted(), candidates.count(), total - slack, total + slack, params, position);
    if (token >= 0) return token;
    candidates.sort_to(kBuckets - 1);
  }
  return ops::draw_candidate(candidates.sorted(), candidates.count(), params, position);
}

// What may be drawn: a copy of the logits in which the others are minus infinity.
const float* masked(const float* logits, const uint32_t* mask, int64_t vocab, float* out) {
  for (int64_t id = 0; id < vocab; ++id) {
    out[id] = ops::is_allowed(mask, id) ? logits[id] : -std::numeric_limits<float>::infinity();
  }
  return out;
}

int32_t draw_row(const RowKernels& kernels, int64_t vocab, const float* logits, const ops::SampleRow& row,
                 double* probabilities, device::Queue& queue) {
  const int32_t top = likeliest(kernels, logits, vocab);
  if (top < 0 || row.params.temperature == 0) return top;
  queue.parallel_for(vocab, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t id = begin; id < end; ++id) {
      probabilities[id] = ops::relative_probability(logits[id], logits[top], row.params.temperature);
    }
  });
  probabilities[top] = 1;
  Candidates candidates(probabilities, vocab, reinterpret_cast<Candidate*>(probabilities + vocab));
  return draw(candidates, row.params, row.position);
}

}  // namespace

bool sample_supports(const Sample::Desc&, std::string&) {
  return true;
}

int64_t sample_workspace(const Sample::Desc& desc, int64_t) {
  return desc.vocab * static_cast<int64_t>(sizeof(double) + sizeof(Candidate) + sizeof(float));
}

void sample_run(const RowKernels& kernels, const Sample::Desc& desc, const Sample::Args& args, device::Queue& queue) {
  ops::apply_bias_and_penalties(desc, args);
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const ops::SampleRow& row = args.rows[i];
    double* probabilities = static_cast<double*>(args.workspace);
    const float* logits = args.logits + row.logit_row * desc.vocab;
    if (const uint32_t* mask = ops::mask_of(args.masks, row, desc.vocab)) {
      auto* candidates = reinterpret_cast<Candidate*>(probabilities + desc.vocab);
      logits = masked(logits, mask, desc.vocab, reinterpret_cast<float*>(candidates + desc.vocab));
    }
    args.tokens[i] = draw_row(kernels, desc.vocab, logits, row, probabilities, queue);
  }
}

}  // namespace tessera::backends::cpu_common
