// SPDX-License-Identifier: Apache-2.0
// The k largest scores by their k-th largest value, found digit by digit: every pass reads all scores in order, and the
// selection comes out in ascending index, so nothing is sorted.
#include <algorithm>

#include "backends/cpu_common/rows.h"

namespace tessera::backends::cpu_common {

using ops::TopK;

namespace {

// Rises with the score; zeros of both signs are equal, NaN is the smallest.
uint32_t rank_of(float score) {
  if (score != score) return 0;
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000;
}

// The rank of the k-th largest score, and in `equal` how many of that rank belong to the k.
uint32_t kth_rank(const float* scores, int64_t count, int64_t k, int64_t& equal) {
  constexpr int kBits = 8, kDigits = 1 << kBits;
  uint32_t prefix = 0;
  int64_t wanted = k;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    int32_t counts[kDigits] = {};
    const uint32_t mask = shift == 32 - kBits ? 0 : ~uint32_t{0} << (shift + kBits);
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t rank = rank_of(scores[j]);
      counts[rank >> shift & (kDigits - 1)] += (rank & mask) == prefix ? 1 : 0;
    }
    uint32_t digit = kDigits - 1;
    while (counts[digit] < wanted) wanted -= counts[digit--];
    prefix |= digit << shift;
  }
  equal = wanted;
  return prefix;
}

}  // namespace

void top_k_run(const TopK::Desc& desc, const TopK::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* scores = args.scores + t * args.stride;
      int32_t* selected = args.selected + t * desc.k;
      const int32_t count = args.counts[t];
      int64_t taken = 0;
      if (count <= desc.k) {
        for (; taken < count; ++taken) selected[taken] = static_cast<int32_t>(taken);
      } else if (desc.k > 0) {
        int64_t equal = 0;
        const uint32_t least = kth_rank(scores, count, desc.k, equal);
        for (int32_t j = 0; j < count && taken < desc.k; ++j) {
          const uint32_t rank = rank_of(scores[j]);
          if (rank < least || (rank == least && equal-- <= 0)) continue;
          selected[taken++] = j;
        }
      }
      std::fill(selected + taken, selected + desc.k, -1);
    }
  });
}

}  // namespace tessera::backends::cpu_common
