// SPDX-License-Identifier: Apache-2.0
#include "ops/rank_experts/rank_experts.h"

#include <fmt/format.h>

#include <limits>

#include "base/error.h"
#include "base/integer_math.h"

namespace tessera::ops {

namespace {

constexpr int64_t kAlignment = 64;

// Of the reference's workspace, in front of that of moe_experts: the slots.
int64_t slots_bytes(const MoeExperts::Desc& desc, int64_t num_tokens) {
  return round_up<int64_t>(num_tokens * desc.top_k * desc.hidden * dtype_bits(desc.activation) / 8, kAlignment);
}

}  // namespace

std::string RankExperts::Desc::to_string() const {
  return fmt::format("{}, a share of {}", routed.to_string(), world);
}

bool rank_experts_shares_agree(const RankExperts::Desc& desc, std::string& why_not) {
  const MoeExperts::Desc& routed = desc.routed;
  const int64_t all = routed.all_experts();
  if (desc.world < 1 || desc.world > device::kMaxPeers) {
    why_not = fmt::format("{} ranks, 1 to {} can", desc.world, device::kMaxPeers);
  } else if (all % desc.world != 0 || routed.num_local != all / desc.world) {
    why_not = fmt::format("{} of {} experts are no equal share of {} ranks", routed.num_local, all, desc.world);
  } else if (routed.num_local < 1 || routed.first_expert % routed.num_local != 0 || routed.first_expert < 0 ||
             routed.first_expert >= all) {
    why_not = fmt::format("no rank's {} experts begin with {}", routed.num_local, routed.first_expert);
  } else if (routed.top_k < 1 || routed.top_k > all) {
    why_not = fmt::format("a token can't choose {} of {} experts", routed.top_k, all);
  } else {
    return true;
  }
  return false;
}

int64_t checked_most_tokens(const RankExperts::Desc& desc, const RankExperts::Args& args) {
  const MoeExperts::Desc& routed = desc.routed;
  const auto refuse = [](const std::string& why) { fail(ErrorCode::kInvalidArgument, "rank_experts: " + why); };
  if (args.peers == nullptr) refuse("no memory of ranks is given (comm::make_expert_exchange)");
  const device::PeerView& view = args.peers->view;
  const device::ExpertPeersShape& shape = args.peers->shape;
  const int64_t most = args.most_tokens > 0 ? args.most_tokens : shape.max_tokens;
  if (view.world != desc.world || view.rank * routed.num_local != routed.first_expert) {
    refuse(fmt::format("rank {} of {} has not the experts from {} on, of which each rank has {}", view.rank, view.world,
                       routed.first_expert, routed.num_local));
  }
  if (shape.hidden != routed.hidden || shape.top_k != routed.top_k) {
    refuse(fmt::format("memory of ranks is for rows of {} and {} experts of each, not for {} and {}", shape.hidden,
                       shape.top_k, routed.hidden, routed.top_k));
  }
  if (args.num_tokens < 0) refuse(fmt::format("{} tokens of a rank", args.num_tokens));
  if (most > shape.max_tokens || args.num_tokens > most) {
    refuse(fmt::format("{} tokens of a rank, at most {}: memory of ranks has room for {}", args.num_tokens, most,
                       shape.max_tokens));
  }
  if (desc.world * most * routed.top_k > std::numeric_limits<int32_t>::max()) {
    refuse(fmt::format("{} tokens of each of {} ranks are more slots than numbers have room for", most, desc.world));
  }
  return most;
}

int64_t rank_experts_reference_workspace(const RankExperts::Desc& desc, int64_t max_tokens) {
  return slots_bytes(desc.routed, max_tokens) + moe_experts_reference_workspace(desc.routed, max_tokens);
}

bool rank_experts_reference_supports(const RankExperts::Desc& desc, std::string& why_not) {
  if (!rank_experts_shares_agree(desc, why_not)) return false;
  if (desc.world == 1) return moe_experts_reference_supports(desc.routed, why_not);
  why_not = "ranks that reach each other's memory are GPUs";
  return false;
}

void rank_experts_reference(const RankExperts::Desc& desc, const RankExperts::Args& args, device::Queue& queue) {
  const MoeExperts::Desc& routed = desc.routed;
  const int64_t n = args.num_tokens;
  const TensorView slots{args.workspace, routed.activation, {n, routed.top_k, routed.hidden}};
  if (args.does(RankExpertsPart::kExperts)) {
    MoeExperts::Args of = args.routed;
    of.out = slots, of.num_tokens = n;
    of.workspace = static_cast<char*>(args.workspace) + slots_bytes(routed, n);
    moe_experts_reference(routed, of, queue);
  }
  if (args.does(RankExpertsPart::kCombine)) {
    moe_combine_reference({.hidden = routed.hidden, .top_k = routed.top_k, .activation = routed.activation},
                          {.routed = slots, .shared = args.shared, .out = args.out, .num_tokens = n}, queue);
  }
}

}  // namespace tessera::ops
