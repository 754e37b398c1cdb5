// SPDX-License-Identifier: Apache-2.0
// linear_group with packed weights: few tokens by the portable backend's one launch, which reads the same layout
// and has the same sums; more tokens the maps one by one, by this backend's linear.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/sm90/kernels.h"

namespace tessera::backends::sm90 {

bool linear_group_supports(const ops::LinearGroup::Desc& desc, std::string& why_not) {
  if (!cuda::linear_group_packed_supports(desc, why_not)) return false;
  return std::all_of(desc.maps.begin(), desc.maps.end(),
                     [&](const ops::Linear::Desc& map) { return linear_supports(map, why_not); });
}

int64_t linear_group_workspace(const ops::LinearGroup::Desc& desc, int64_t max_tokens) {
  int64_t most = 0;
  for (const ops::Linear::Desc& map : desc.maps) most = std::max(most, linear_workspace(map, max_tokens));
  return most;
}

void linear_group(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (!cuda::linear_group_stream(desc, args, queue)) ops::run_parts(desc, args, queue, linear, cuda::swiglu);
}

}  // namespace tessera::backends::sm90
