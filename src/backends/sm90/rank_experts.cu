// SPDX-License-Identifier: Apache-2.0
// rank_experts with packed NVFP4 weights: tokens' rows are exchanged, then the kernels of moe_experts compute those of
// all ranks, of which the last stores each slot with the rank whose token it is, and that rank adds up what came back.
// What bounds it: the read of the weights for few tokens, the products for many, the link in neither (decision 0034).
#include <algorithm>

#include "backends/sm90/kernels.h"
#include "backends/sm90/moe_launch.cuh"
#include "backends/sm90/rank_job.cuh"

namespace tessera::backends::sm90 {

namespace {

constexpr int64_t kMostChoices = 32;  // a warp takes in a token's

template <class Shape>
class RankDownTiles : public DownTilesOf<Shape, RankMoeJob> {
 public:
  using DownTilesOf<Shape, RankMoeJob>::DownTilesOf;
};

// Fills `rows` where `base` is not null; behind them the experts' workspace begins.
int64_t layout_rows(const ops::RankExperts::Desc& desc, int64_t most_tokens, void* base, RankRows& rows) {
  cuda_common::Workspace workspace(base);
  const int64_t num_tokens = desc.world * most_tokens;
  rows.experts = workspace.take<int32_t>(num_tokens * desc.routed.top_k);
  rows.routing = workspace.take<float>(num_tokens * desc.routed.top_k);
  rows.x = workspace.take<uint64_t>(num_tokens * desc.routed.hidden / device::ExpertPeersShape::kValues);
  rows.returned = workspace.take<uint64_t*>(desc.world);
  return workspace.used();
}

template <class Shape>
void run_experts(const ops::RankExperts::Desc& desc, const ops::MoeExperts::Args& args, const RankRows& rows,
                 device::Queue& queue) {
  RankMoeJob job{};
  static_cast<MoeJob&>(job) = group<Shape>(desc.routed, args, queue);
  job.returned = rows.returned;
  job.rank_slots = cuda_common::FastDivisor(static_cast<uint32_t>(job.num_slots / desc.world));
  launch_maps<Shape, RankDownTiles>(desc.routed, job, queue);
}

}  // namespace

bool rank_experts_supports(const ops::RankExperts::Desc& desc, std::string& why_not) {
  const ops::MoeExperts::Desc& routed = desc.routed;
  if (!ops::rank_experts_shares_agree(desc, why_not) || !moe_experts_supports(routed, why_not)) return false;
  if (desc.world == 1) {
    why_not = "a rank by itself has moe_experts and moe_combine";
  } else if (routed.hidden % WidePlan::kWeightColumns != 0 || routed.inner % WidePlan::kInputColumns != 0) {
    why_not = "hidden is not a multiple of 512, or inner not one of 128";
  } else if (routed.top_k > kMostChoices) {
    why_not = "a token chooses more than 32 experts";
  } else {
    return true;
  }
  return false;
}

int64_t rank_experts_workspace(const ops::RankExperts::Desc& desc, int64_t max_tokens) {
  const int64_t num_slots = desc.world * max_tokens * desc.routed.top_k;
  RankRows rows{};
  return layout_rows(desc, max_tokens, nullptr, rows) +
         std::max(moe_scratch_bytes<Wide>(desc.routed, num_slots), moe_scratch_bytes<Few>(desc.routed, num_slots));
}

void rank_experts(const ops::RankExperts::Desc& desc, const ops::RankExperts::Args& args, device::Queue& queue) {
  using Part = ops::RankExpertsPart;
  const ops::MoeExperts::Desc& routed = desc.routed;
  const int64_t most_tokens = ops::checked_most_tokens(desc, args), num_rows = desc.world * most_tokens;
  RankRows rows{};
  const int64_t rows_bytes = layout_rows(desc, most_tokens, args.workspace, rows);
  if (args.does(Part::kDispatch) || args.does(Part::kExperts)) {
    exchange_rows({.peers = *args.peers,
                   .experts = args.routed.experts,
                   .routing = args.routed.routing,
                   .x = static_cast<const uint64_t*>(args.routed.x.data),
                   .num_tokens = args.num_tokens,
                   .most_tokens = most_tokens,
                   .num_local = routed.num_local,
                   .rows = rows,
                   .sends = args.does(Part::kDispatch),
                   .collects = args.does(Part::kExperts)},
                  queue);
  }
  if (args.does(Part::kExperts)) {
    ops::MoeExperts::Args all = args.routed;
    all.x = {rows.x, routed.activation, {num_rows, routed.hidden}};
    all.experts = rows.experts, all.routing = rows.routing, all.out = {};
    all.num_tokens = num_rows, all.workspace = static_cast<char*>(args.workspace) + rows_bytes;
    // By the most that there may be: few tokens of many take the kernel for many, with the same bits.
    has_many_slots(routed, num_rows) ? run_experts<Wide>(desc, all, rows, queue)
                                     : run_experts<Few>(desc, all, rows, queue);
  }
  if (args.does(Part::kCombine) && args.num_tokens > 0) {
    combine_returned(*args.peers, args.shared, args.out, args.num_tokens, queue);
  }
}

}  // namespace tessera::backends::sm90
