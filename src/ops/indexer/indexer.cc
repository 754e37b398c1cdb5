// SPDX-License-Identifier: Apache-2.0
#include "ops/indexer/indexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/integer_math.h"
#include "ops/reference_rows.h"

namespace tessera::ops {

namespace {

constexpr int64_t kMaxWidth = 512;
constexpr int64_t kKeyBlock = 64;  // keys that one work item scores

}  // namespace

std::string IndexScores::Desc::to_string() const {
  return fmt::format("{} x {}, keys {}", heads, width, keys.to_string());
}
std::string TopK::Desc::to_string() const {
  return fmt::format("k {}", k);
}

bool index_scores_reference_supports(const IndexScores::Desc& desc, std::string& why_not) {
  if (desc.width > kMaxWidth || desc.heads > kMaxIndexHeads) {
    why_not = fmt::format("at most {} heads of {}", kMaxIndexHeads, kMaxWidth);
    return false;
  }
  return true;
}

void index_scores_reference(const IndexScores::Desc& desc, const IndexScores::Args& args, device::Queue& queue) {
  const float scale =
      static_cast<float>(1 / std::sqrt(static_cast<double>(desc.width) * static_cast<double>(desc.heads)));
  const int64_t blocks = ceil_div(args.stride, kKeyBlock);
  const int64_t entry_bytes = desc.keys.entry_bytes();
  queue.parallel_for(args.num_tokens * blocks, 1, [&](int64_t begin, int64_t end) {
    float keys[kKeyBlock * kMaxWidth], query[kMaxWidth], weights[kMaxIndexHeads];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / blocks, first = item % blocks * kKeyBlock;
      const int64_t last = std::min<int64_t>(first + kKeyBlock, args.counts[t]);
      if (first >= last) continue;
      load_floats(args.weights, t * desc.heads, desc.heads, weights);
      for (int64_t h = 0; h < desc.heads; ++h) weights[h] = round_to(desc.activation, weights[h] * scale);
      for (int64_t j = first; j < last; ++j) {
        decode_entry(desc.keys, args.keys.of_row(t).at(j, entry_bytes), keys + (j - first) * desc.width);
      }
      float* scores = args.scores + t * args.stride;
      std::fill(scores + first, scores + last, 0.0f);
      for (int64_t h = 0; h < desc.heads; ++h) {
        load_floats(args.queries, (t * desc.heads + h) * desc.width, desc.width, query);
        for (int64_t j = first; j < last; ++j) {
          const float product = dot(query, keys + (j - first) * desc.width, desc.width);
          scores[j] += weights[h] * (product < 0 ? 0.0f : product);  // a NaN passes through
        }
      }
    }
  });
}

void top_k_reference(const TopK::Desc& desc, const TopK::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* scores = args.scores + t * args.stride;
      int32_t* selected = args.selected + t * desc.k;
      const int64_t count = std::min<int64_t>(desc.k, args.counts[t]);
      // Larger score first, then lower index; a NaN counts as the smallest.
      const auto is_before = [&](int32_t a, int32_t b) {
        const float x = scores[a], y = scores[b];
        if (std::isnan(x) != std::isnan(y)) return std::isnan(y);
        return x > y || (!(x < y) && a < b);
      };
      // selected[0, count) is a heap whose top is the entry that leaves first.
      for (int32_t j = 0; j < args.counts[t]; ++j) {
        if (j < count) {
          selected[j] = j;
          std::push_heap(selected, selected + j + 1, is_before);
        } else if (is_before(j, selected[0])) {
          std::pop_heap(selected, selected + count, is_before);
          selected[count - 1] = j;
          std::push_heap(selected, selected + count, is_before);
        }
      }
      std::sort(selected, selected + count);
      std::fill(selected + count, selected + desc.k, -1);
    }
  });
}

}  // namespace tessera::ops
