// SPDX-License-Identifier: Apache-2.0
#pragma once
// Entries of a backend's tables for one set of panel kernels.
#include "backends/cpu_common/grouped_linear.h"
#include "backends/cpu_common/linear.h"
#include "backends/cpu_common/moe.h"
#include "backends/cpu_common/panel_layout.h"

namespace tessera::backends::cpu_common {

using RunsOn = bool (*)(const device::Machine&, std::string&);

template <const PanelKernels& kKernels>
constexpr ops::Variant<ops::Linear> linear_variant(const char* name, RunsOn runs_on = nullptr) {
  using Desc = ops::Linear::Desc;
  return {name,
          [](const Desc& desc, std::string& why_not) { return linear_supports(kKernels, desc, why_not); },
          [](const Desc&) { return panel_layout(); },
          [](const Desc& desc, int64_t max_tokens) { return linear_workspace(kKernels, desc, max_tokens); },
          [](const Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
            linear_run(kKernels, desc, args, queue);
          },
          runs_on};
}

template <const PanelKernels& kKernels>
constexpr ops::Variant<ops::GroupedLinear> grouped_linear_variant(const char* name, RunsOn runs_on = nullptr) {
  using Desc = ops::GroupedLinear::Desc;
  return {name,
          [](const Desc& desc, std::string& why_not) { return grouped_linear_supports(kKernels, desc, why_not); },
          [](const Desc&) { return panel_layout(); },
          [](const Desc& desc, int64_t max_rows) { return grouped_linear_workspace(kKernels, desc, max_rows); },
          [](const Desc& desc, const ops::GroupedLinear::Args& args, device::Queue& queue) {
            grouped_linear_run(kKernels, desc, args, queue);
          },
          runs_on};
}

template <const PanelKernels& kKernels>
constexpr ops::Variant<ops::MoeExperts> moe_variant(const char* name, RunsOn runs_on = nullptr) {
  using Desc = ops::MoeExperts::Desc;
  return {name,
          [](const Desc& desc, std::string& why_not) { return moe_supports(kKernels, desc, why_not); },
          [](const Desc&) { return panel_layout(); },
          [](const Desc& desc, int64_t max_tokens) { return moe_workspace(kKernels, desc, max_tokens); },
          [](const Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue) {
            moe_run(kKernels, desc, args, queue);
          },
          runs_on};
}

}  // namespace tessera::backends::cpu_common
