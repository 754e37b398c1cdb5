// SPDX-License-Identifier: Apache-2.0
#pragma once
// Maps and experts of few tokens by unit_ring.cuh, where uses_ring() (sum_plans.h) says so.
#include <cstdint>

#include "device/queue.h"
#include "ops/all_experts/all_experts.h"
#include "ops/linear/linear.h"
#include "ops/linear_group/linear_group.h"
#include "ops/moe/moe.h"

namespace tessera::backends::sm90 {

void linear_ring(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue);
void linear_group_ring(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue);
void moe_experts_ring(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);
void all_experts_ring(const ops::AllExperts::Desc& desc, const ops::AllExperts::Args& args, device::Queue& queue);

}  // namespace tessera::backends::sm90
