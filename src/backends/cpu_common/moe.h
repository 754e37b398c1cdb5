// SPDX-License-Identifier: Apache-2.0
#pragma once
// The op `moe_experts` over panels: tokens are grouped by expert, then two passes (gate and up, down) share pieces of
// all experts at once; nothing waits per expert.
#include "backends/cpu_common/input_rows.h"
#include "ops/moe/moe.h"

namespace tessera::backends::cpu_common {

bool moe_supports(const PanelKernels& kernels, const ops::MoeExperts::Desc& desc, std::string& why_not);
int64_t moe_workspace(const PanelKernels& kernels, const ops::MoeExperts::Desc& desc, int64_t max_tokens);
// Weights in panel_layout().
void moe_run(const PanelKernels& kernels, const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args,
             device::Queue& queue);

}  // namespace tessera::backends::cpu_common
