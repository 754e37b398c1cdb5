// SPDX-License-Identifier: Apache-2.0
#pragma once
// The op `linear` over panels: threads, inputs and outputs around a panel kernel.
#include "backends/cpu_common/input_rows.h"
#include "ops/linear/linear.h"

namespace tessera::backends::cpu_common {

bool linear_supports(const PanelKernels& kernels, const ops::Linear::Desc& desc, std::string& why_not);
int64_t linear_workspace(const PanelKernels& kernels, const ops::Linear::Desc& desc, int64_t max_tokens);
// args.weight in panel_layout().
void linear_run(const PanelKernels& kernels, const ops::Linear::Desc& desc, const ops::Linear::Args& args,
                device::Queue& queue);

}  // namespace tessera::backends::cpu_common
