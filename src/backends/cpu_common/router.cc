// SPDX-License-Identifier: Apache-2.0
// The router's choice: vectors give scores that are nearly right, and only experts that these leave near the least
// chosen score are scored exactly. So the choice is the reference's, ties included.
#include <algorithm>

#include "backends/cpu_common/rows.h"

namespace tessera::backends::cpu_common {

using ops::Router;

namespace {

constexpr int64_t kMostExperts = 1024, kMostChosen = 32;

// Finds `count` >= top_k ascending ids among which the top_k best are; false where a score is not finite.
bool narrow(const float* scores, const float* bias, int64_t num_experts, int64_t top_k, int32_t* ids, int64_t& count) {
  float best[kMostChosen];
  int64_t taken = 0;
  float largest_score = 0, largest_bias = 0, check = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    const float score = scores[e];
    check += score - score;  // NaN where it is not finite
    largest_score = std::max(largest_score, score < 0 ? -score : score);
    largest_bias = std::max(largest_bias, bias[e] < 0 ? -bias[e] : bias[e]);
    if (taken == top_k && !(score > best[top_k - 1])) continue;
    int64_t at = taken < top_k ? taken++ : top_k - 1;
    for (; at > 0 && score > best[at - 1]; --at) best[at] = best[at - 1];
    best[at] = score;
  }
  if (!(check == 0)) return false;
  // An expert of the exact choice scores at least the least of these exactly, less one error; its own is another.
  const float least = best[top_k - 1] - 2 * (kRouteError * (largest_score + largest_bias) + kRouteFloor);
  count = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (scores[e] >= least) ids[count++] = static_cast<int32_t>(e);
  }
  return true;
}

}  // namespace

bool router_supports(const Router::Desc& desc, std::string& why_not) {
  if (desc.num_experts % kRowStep == 0 && desc.num_experts <= kMostExperts && desc.top_k >= 1 &&
      desc.top_k <= std::min(kMostChosen, desc.num_experts)) {
    return true;
  }
  why_not = "needs a multiple of 16 experts, at most 1024, of which at most 32 are chosen";
  return false;
}

void router_run(const RowKernels& kernels, const Router::Desc& desc, const Router::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 8, [&](int64_t begin, int64_t end) {
    float scores[kMostExperts];
    int32_t near[kMostExperts];
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = args.logits + t * desc.num_experts;
      int32_t* experts = args.experts + t * desc.top_k;
      int64_t count = 0;
      if (desc.is_hashed) {
        std::copy_n(args.table + std::max(args.token_ids[t], 0) * desc.top_k, desc.top_k, experts);
      } else {
        kernels.route_scores(logits, args.bias, desc.num_experts, scores);
        if (!narrow(scores, args.bias, desc.num_experts, desc.top_k, near, count)) {
          ops::select_experts(logits, args.bias, nullptr, desc.num_experts, desc.top_k, experts);
        } else if (count == desc.top_k) {
          std::copy_n(near, count, experts);
        } else {
          ops::select_experts(logits, args.bias, near, count, desc.top_k, experts);
        }
      }
      ops::weigh_experts(desc, logits, experts, args.weights + t * desc.top_k);
    }
  });
}

}  // namespace tessera::backends::cpu_common
