// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/grouped_linear.h"

#include "backends/cpu_common/linear.h"

namespace tessera::backends::cpu_common {

namespace {

using ops::GroupedLinear;
using ops::Linear;
using ops::RowRange;

Linear::Desc linear_of(const GroupedLinear::Desc& desc) {
  return {.in = desc.in, .out = desc.out, .format = desc.format, .input = desc.input, .output = desc.output};
}

// The workspace: each group's rows, then the maps' own.
int64_t range_bytes(const GroupedLinear::Desc& desc) {
  return (desc.num_groups * static_cast<int64_t>(sizeof(RowRange)) + 63) / 64 * 64;
}

}  // namespace

bool grouped_linear_supports(const PanelKernels& kernels, const GroupedLinear::Desc& desc, std::string& why_not) {
  return ops::grouped_linear_reference_supports(desc, why_not) && linear_supports(kernels, linear_of(desc), why_not);
}

int64_t grouped_linear_workspace(const PanelKernels& kernels, const GroupedLinear::Desc& desc, int64_t max_rows) {
  return range_bytes(desc) + linear_workspace(kernels, linear_of(desc), max_rows);
}

void grouped_linear_run(const PanelKernels& kernels, const GroupedLinear::Desc& desc, const GroupedLinear::Args& args,
                        device::Queue& queue) {
  if (args.num_rows == 0) return;
  auto* ranges = static_cast<RowRange*>(args.workspace);
  ops::row_ranges(desc, args, ranges);
  const Linear::Desc linear = linear_of(desc);
  const int64_t x_bytes = desc.in * 2, out_bytes = desc.out * (dtype_bits(desc.output) / 8);
  for (int64_t e = 0; e < desc.num_groups; ++e) {
    const RowRange rows = ranges[e];
    if (rows.count == 0) continue;
    linear_run(kernels, linear,
               {.x = {args.x.as<char>() + rows.begin * x_bytes, DType::kBF16, {rows.count, desc.in}},
                .weight = args.weights[e],
                .y = {args.out.as<char>() + rows.begin * out_bytes, desc.output, {rows.count, desc.out}},
                .num_tokens = rows.count,
                .workspace = static_cast<char*>(args.workspace) + range_bytes(desc)},
               queue);
  }
}

}  // namespace tessera::backends::cpu_common
