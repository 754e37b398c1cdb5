// SPDX-License-Identifier: Apache-2.0
#pragma once
// All experts of a layer but for their sum: moe_experts, then the shared expert of the same input, which is a
// linear_group of gate and up with their activation, and a linear map down. Fused (decision 0023): every result has the
// bits that those ops give one after the other, with their rounding points.
// Source: those ops' contracts; DeepSeek-V4 inference/model.py, MoE.
#include <cstdint>
#include <string>

#include "ops/linear/linear.h"
#include "ops/linear_group/linear_group.h"
#include "ops/moe/moe.h"

namespace tessera::ops {

struct AllExperts {
  static constexpr const char* kName = "all_experts";
  static constexpr bool kIsFused = true;
  struct Desc {
    MoeExperts::Desc routed;
    LinearGroup::Desc gated;  // the shared expert's gate and up, with swiglu
    Linear::Desc down;        // its third matrix
    std::string to_string() const;
  };
  // The parts' numbers of tokens and workspaces are those below. On a GPU x is not what the kernel right before this
  // call writes: it is read while that runs (the router's comes between in a layer).
  struct Args {
    MoeExperts::Args routed;
    LinearGroup::Args gated;  // x: routed.x
    Linear::Args down;        // x: gated.y[0], scratch
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

// Whether the parts fit each other.
bool all_experts_parts_agree(const AllExperts::Desc& desc, std::string& why_not);
// The same call with the numbers of tokens and workspaces of the parts filled in.
AllExperts::Args with_parts_filled_in(const AllExperts::Args& args);

int64_t all_experts_reference_workspace(const AllExperts::Desc& desc, int64_t max_tokens);
bool all_experts_reference_supports(const AllExperts::Desc& desc, std::string& why_not);
void all_experts_reference(const AllExperts::Desc& desc, const AllExperts::Args& args, device::Queue& queue);

}  // namespace tessera::ops
