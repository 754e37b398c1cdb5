// SPDX-License-Identifier: Apache-2.0
// linear_group with packed weights: few tokens in one launch, ring_maps.cu's or the portable backend's, which reads
// the same layout and has the same sums; more tokens by one launch for all chunks, or the maps one by one, whose
// input is then arranged once. Of two formats those that are not few are two calls.
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/sm90/kernels.h"
#include "backends/sm90/linear_chunks.h"
#include "backends/sm90/linear_wide.h"
#include "backends/sm90/ring_maps.h"
#include "backends/sm90/sum_plans.h"

namespace tessera::backends::sm90 {

namespace {

// One by one; maps whose tiles have as many tokens arrange their input once. (So many tokens take no ring.)
void run_maps(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, int64_t multiprocessors,
              device::Queue& queue) {
  int32_t arranged_tokens = 0;  // of the tiles for which the workspace has the inputs; 0: it has others
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    const ops::Linear::Args map = ops::linear_of_group(args, i);
    const LinearChoice choice = linear_choice(desc.maps[i], args.num_tokens, multiprocessors, map.weight.scales_fold);
    if (choice.kernels != LinearKernels::kWide) {
      linear(desc.maps[i], map, queue);
      arranged_tokens = 0;
      continue;
    }
    linear_wide(desc.maps[i], map, choice.tile_tokens, choice.tile_tokens == arranged_tokens, queue);
    arranged_tokens = choice.tile_tokens;
  }
}

}  // namespace

bool linear_group_supports(const ops::LinearGroup::Desc& desc, std::string& why_not) {
  if (!cuda::linear_group_packed_supports(desc, why_not)) return false;
  return std::all_of(desc.maps.begin(), desc.maps.end(),
                     [&](const ops::Linear::Desc& map) { return linear_supports(map, why_not); });
}

int64_t linear_group_workspace(const ops::LinearGroup::Desc& desc, int64_t max_tokens) {
  int64_t most = desc.parts.empty() ? linear_chunks_workspace(desc.maps, max_tokens) : 0;
  for (const ops::LinearGroup::Part& part : desc.parts) {
    most = std::max(most, linear_chunks_workspace(part.desc.maps, max_tokens));
  }
  for (const ops::Linear::Desc& map : desc.maps) most = std::max(most, linear_workspace(map, max_tokens));
  return most;
}

void linear_group(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t multiprocessors = cuda_common::multiprocessors();
  if (!desc.parts.empty()) {
    if (streams_formats(desc.maps, args.num_tokens, multiprocessors) && cuda::linear_group_stream(desc, args, queue))
      return;
    for (const ops::LinearGroup::Part& part : desc.parts) linear_group(part.desc, part.args_of(args), queue);
    return;
  }
  const std::span<const ops::WeightView> weights(args.weights.data(), desc.maps.size());
  const auto num_folded = std::ranges::count_if(weights, &ops::WeightView::scales_fold);
  const bool all_fold = num_folded == std::ssize(weights);
  if (uses_ring(desc, all_fold, args.num_tokens, multiprocessors)) return linear_group_ring(desc, args, queue);
  const LinearChoice choice = group_choice(desc.maps, args.num_tokens, multiprocessors, all_fold, num_folded > 0);
  if (choice.kernels == LinearKernels::kPortable && cuda::linear_group_stream(desc, args, queue)) return;
  if (choice.kernels == LinearKernels::kChunks) {
    return linear_chunks({desc.maps, args.x, args.weights.data(), args.y.data(), args.num_tokens, args.workspace,
                          desc.swiglu ? &*desc.swiglu : nullptr},
                         choice.tile_tokens, queue);
  }
  run_maps(desc, args, multiprocessors, queue);
  if (desc.swiglu) cuda::swiglu(*desc.swiglu, ops::swiglu_of_group(args), queue);
}

}  // namespace tessera::backends::sm90
