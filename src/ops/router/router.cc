// SPDX-License-Identifier: Apache-2.0
#include "ops/router/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::ops {

std::string Router::Desc::to_string() const {
  return fmt::format("{} of {} experts, {}", top_k, num_experts, is_hashed ? "by table" : "by score");
}

float sqrt_softplus(float x) {
  return std::sqrt(std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))));
}

// By insertion: top_k is small. NaN counts as the smallest.
void select_experts(const float* logits, const float* bias, const int32_t* among, int64_t count, int64_t top_k,
                    int32_t* selected) {
  const auto score = [&](int32_t e) { return sqrt_softplus(logits[e]) + bias[e]; };
  int64_t taken = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t e = among == nullptr ? static_cast<int32_t>(i) : among[i];
    const float s = score(e);
    int64_t at = taken;
    // An equal score keeps its place before us: it has the lower id.
    while (at > 0) {
      const float other = score(selected[at - 1]);
      if (!(s > other || (std::isnan(other) && !std::isnan(s)))) break;
      --at;
    }
    if (at >= top_k) continue;
    taken = std::min(taken + 1, top_k);
    for (int64_t j = taken - 1; j > at; --j) selected[j] = selected[j - 1];
    selected[at] = e;
  }
}

void weigh_experts(const Router::Desc& desc, const float* logits, int32_t* experts, float* weights) {
  std::sort(experts, experts + desc.top_k);
  float sum = 0;
  for (int64_t i = 0; i < desc.top_k; ++i) {
    weights[i] = sqrt_softplus(logits[experts[i]]);
    sum += weights[i];
  }
  for (int64_t i = 0; i < desc.top_k; ++i) {
    if (desc.is_normalized) weights[i] /= sum + 1e-20f;
    weights[i] *= desc.scaling;
  }
}

void router_reference(const Router::Desc& desc, const Router::Args& args, device::Queue& queue) {
  queue.parallel_for(args.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = args.logits + t * desc.num_experts;
      int32_t* experts = args.experts + t * desc.top_k;
      if (desc.is_hashed) {
        std::copy_n(args.table + std::max(args.token_ids[t], 0) * desc.top_k, desc.top_k, experts);
      } else {
        select_experts(logits, args.bias, nullptr, desc.num_experts, desc.top_k, experts);
      }
      weigh_experts(desc, logits, experts, args.weights + t * desc.top_k);
    }
  });
}

}  // namespace tessera::ops
