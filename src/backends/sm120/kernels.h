// SPDX-License-Identifier: Apache-2.0
#pragma once
// What backend.cc lists: linear maps, groups of them and experts with NVFP4 weights and NVFP4 inputs (a4), multiplied
// as they are by block-scaled products. Sums: scaled_sums.cuh.
#include <string>

#include "ops/backend.h"

namespace tessera::backends::sm120 {

bool linear_supports(const ops::Linear::Desc& desc, std::string& why_not);
int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens);
void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue);
bool linear_group_supports(const ops::LinearGroup::Desc& desc, std::string& why_not);
int64_t linear_group_workspace(const ops::LinearGroup::Desc& desc, int64_t max_tokens);
void linear_group(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue);
bool moe_experts_supports(const ops::MoeExperts::Desc& desc, std::string& why_not);
int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens);
void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);

}  // namespace tessera::backends::sm120
