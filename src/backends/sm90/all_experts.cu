// SPDX-License-Identifier: Apache-2.0
// all_experts with packed weights, of the routed experts NVFP4, of the shared one that or FP8: where the routed experts
// take ring_experts.cu the shared one is in their two launches; elsewhere its maps have launches of their own, and the
// bits are the same.
#include <algorithm>

#include "backends/cuda_common/launch.cuh"
#include "backends/sm90/kernels.h"
#include "backends/sm90/ring_maps.h"
#include "backends/sm90/sum_plans.h"

namespace tessera::backends::sm90 {

bool all_experts_supports(const ops::AllExperts::Desc& desc, std::string& why_not) {
  if (!ops::all_experts_parts_agree(desc, why_not) || !moe_experts_supports(desc.routed, why_not) ||
      !linear_group_supports(desc.gated, why_not) || !linear_supports(desc.down, why_not)) {
    return false;
  }
  const auto is_taken = [&](const ops::Linear::Desc& map) {
    return map.format == desc.down.format && map.input == ops::InputMode::kA16;
  };
  if (desc.down.format != ops::WeightFormat::kNvfp4 && desc.down.format != ops::WeightFormat::kFp8Block) {
    why_not = "the shared expert's weights are neither NVFP4 nor FP8";
  } else if (!std::ranges::all_of(desc.gated.maps, is_taken) || !is_taken(desc.down) ||
             desc.routed.input != ops::InputMode::kA16) {
    why_not = "the shared expert's weights are not of one format, or inputs are rounded";
  } else if (desc.down.in != desc.routed.inner) {
    why_not = "the shared expert is not as wide as the routed ones";
  } else {
    return true;
  }
  return false;
}

int64_t all_experts_workspace(const ops::AllExperts::Desc& desc, int64_t max_tokens) {
  return std::max({moe_experts_workspace(desc.routed, max_tokens), linear_group_workspace(desc.gated, max_tokens),
                   linear_workspace(desc.down, max_tokens)});
}

void all_experts(const ops::AllExperts::Desc& desc, const ops::AllExperts::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const bool shared_folds =
      args.gated.weights[0].scales_fold && args.gated.weights[1].scales_fold && args.down.weight.scales_fold;
  if (uses_ring(desc, shared_folds, args.num_tokens, cuda_common::multiprocessors())) {
    return all_experts_ring(desc, args, queue);
  }
  const ops::AllExperts::Args parts = ops::with_parts_filled_in(args);
  moe_experts(desc.routed, parts.routed, queue);
  linear_group(desc.gated, parts.gated, queue);
  linear(desc.down, parts.down, queue);
}

}  // namespace tessera::backends::sm90
