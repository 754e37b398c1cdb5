// SPDX-License-Identifier: Apache-2.0
// The k largest scores by their k-th largest value, found digit by digit until few can be it: every pass reads all
// scores in order, and the selection comes out in ascending index, so nothing is sorted. Loops have no branches that
// scores decide.
#include <algorithm>

#include "backends/cpu_common/rows.h"

namespace tessera::backends::cpu_common {

using ops::TopK;

namespace {

constexpr int64_t kBlock = 256;
// Scores that are looked at one by one once no more can be the k-th.
constexpr int64_t kFew = 2048;

// Rises with the score; zeros of both signs are equal, NaN is the smallest.
uint32_t rank_of(float score) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);
  const uint32_t rank = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000);
  return score == score ? rank : 0;
}

// Calls function(first, ranks, size) for blocks of scores, ascending, until it returns false.
template <class Function>
void for_each_block(const float* scores, int64_t count, const Function& function) {
  uint32_t ranks[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    for (int64_t i = 0; i < size; ++i) ranks[i] = rank_of(scores[first + i]);
    if (!function(first, ranks, size)) return;
  }
}

// Of the scores whose rank has `prefix` under `mask`, at most kFew, the rank of the `wanted`-th largest; `wanted`
// becomes how many of that rank are wanted.
uint32_t rank_among_few(const float* scores, int64_t count, uint32_t mask, uint32_t prefix, int64_t& wanted) {
  uint32_t few[kFew + 1] = {};
  int64_t found = 0;
  for_each_block(scores, count, [&](int64_t, const uint32_t* ranks, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      few[found] = ranks[i];
      found += (ranks[i] & mask) == prefix ? 1 : 0;
    }
    return true;
  });
  std::nth_element(few, few + found - wanted, few + found);
  const uint32_t rank = few[found - wanted];
  for (int64_t i = 0; i < found; ++i) wanted -= few[i] > rank ? 1 : 0;
  return rank;
}

// The rank of the k-th largest score, and in `equal` how many of that rank belong to the k.
uint32_t kth_rank(const float* scores, int64_t count, int64_t k, int64_t& equal) {
  constexpr int kBits = 11;
  uint32_t prefix = 0, mask = 0;
  equal = k;
  for (int shift = 32 - kBits; mask != ~uint32_t{0}; shift = std::max(0, shift - kBits)) {
    // Two tables, so that neighbours of one digit do not wait for each other.
    int32_t counts[2][1 << kBits] = {};
    for_each_block(scores, count, [&](int64_t, const uint32_t* ranks, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        counts[i % 2][ranks[i] >> shift & ((1 << kBits) - 1)] += (ranks[i] & mask) == prefix ? 1 : 0;
      }
      return true;
    });
    // Where the last digit overlaps the one before, only digits with its bits have counts.
    uint32_t digit = (1 << kBits) - 1;
    const auto size_of = [&](uint32_t d) { return counts[0][d] + counts[1][d]; };
    while (size_of(digit) < equal) equal -= size_of(digit--);
    prefix |= digit << shift;
    mask |= ~uint32_t{0} << shift;
    if (size_of(digit) <= kFew && shift > 0) return rank_among_few(scores, count, mask, prefix, equal);
  }
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
        for_each_block(scores, count, [&](int64_t first, const uint32_t* ranks, int64_t size) {
          for (int64_t i = 0; i < size && taken < desc.k; ++i) {
            const int64_t is_equal = ranks[i] == least ? 1 : 0, is_taken = is_equal & (equal > 0 ? 1 : 0);
            selected[taken] = static_cast<int32_t>(first + i);
            taken += is_taken | (ranks[i] > least ? 1 : 0);
            equal -= is_equal;
          }
          return taken < desc.k;
        });
      }
      std::fill(selected + taken, selected + desc.k, -1);
    }
  });
}

}  // namespace tessera::backends::cpu_common
