// SPDX-License-Identifier: Apache-2.0
#include "ops/all_experts/all_experts.h"

#include <algorithm>

namespace tessera::ops {

std::string AllExperts::Desc::to_string() const {
  return routed.to_string() + "; shared " + gated.to_string() + "; " + down.to_string();
}

bool all_experts_parts_agree(const AllExperts::Desc& desc, std::string& why_not) {
  const MoeExperts::Desc& routed = desc.routed;
  if (desc.gated.maps.size() != 2 || !desc.gated.swiglu || desc.gated.norm) {
    why_not = "the shared expert's maps are gate and up, with swiglu and without a norm";
    return false;
  }
  const Linear::Desc& gate = desc.gated.maps.front();
  if (gate.in != routed.hidden || desc.down.out != routed.hidden || desc.down.in != gate.out || desc.down.groups != 1 ||
      gate.activation != routed.activation || desc.down.activation != routed.activation ||
      desc.down.output != routed.activation) {
    why_not = "experts of one input, from hidden to hidden";
    return false;
  }
  return true;
}

AllExperts::Args with_parts_filled_in(const AllExperts::Args& args) {
  AllExperts::Args filled = args;
  filled.routed.num_tokens = filled.gated.num_tokens = filled.down.num_tokens = args.num_tokens;
  filled.routed.workspace = filled.gated.workspace = filled.down.workspace = args.workspace;
  return filled;
}

int64_t all_experts_reference_workspace(const AllExperts::Desc& desc, int64_t max_tokens) {
  return std::max({moe_experts_reference_workspace(desc.routed, max_tokens),
                   linear_group_reference_workspace(desc.gated, max_tokens),
                   linear_reference_workspace(desc.down, max_tokens)});
}

bool all_experts_reference_supports(const AllExperts::Desc& desc, std::string& why_not) {
  return all_experts_parts_agree(desc, why_not) && moe_experts_reference_supports(desc.routed, why_not) &&
         linear_group_reference_supports(desc.gated, why_not) && linear_reference_supports(desc.down, why_not);
}

void all_experts_reference(const AllExperts::Desc& desc, const AllExperts::Args& args, device::Queue& queue) {
  const AllExperts::Args parts = with_parts_filled_in(args);
  moe_experts_reference(desc.routed, parts.routed, queue);
  linear_group_reference(desc.gated, parts.gated, queue);
  linear_reference(desc.down, parts.down, queue);
}

}  // namespace tessera::ops
