// SPDX-License-Identifier: Apache-2.0
#pragma once
// The op `grouped_linear` over panels: `linear` of each group that has rows, one after another, each by all threads.
#include "backends/cpu_common/input_rows.h"
#include "ops/grouped_linear/grouped_linear.h"

namespace tessera::backends::cpu_common {

bool grouped_linear_supports(const PanelKernels& kernels, const ops::GroupedLinear::Desc& desc, std::string& why_not);
int64_t grouped_linear_workspace(const PanelKernels& kernels, const ops::GroupedLinear::Desc& desc, int64_t max_rows);
// args.weights in panel_layout().
void grouped_linear_run(const PanelKernels& kernels, const ops::GroupedLinear::Desc& desc,
                        const ops::GroupedLinear::Args& args, device::Queue& queue);

}  // namespace tessera::backends::cpu_common
