// SPDX-License-Identifier: Apache-2.0
#pragma once
// The routed experts of a group of ranks of which each has its own tokens and an equal share of the experts by id, and
// the sum over experts: moe_experts, then moe_combine. Fused (decisions 0023, 0034): a rank's output has the bits that
// those ops give where one rank has all experts, however tokens and choices are spread over ranks.
//
// In three steps:
//   once    weights are packed as the variant asks, and comm::make_expert_exchange() makes the ranks' memory
//   before  a step's activations lie in arrays of this rank's own; nothing is copied into shared ones
//   call    each rank calls with its tokens, one without any too, in the same order of calls: what a rank waits for is
//           another's call. May be recorded
// Source: ops/moe/moe.h; DeepSeek-V4 inference/model.py, MoE; the shape of the call: DeepGEMM's fp8_fp4_mega_moe.
#include <cstdint>
#include <string>

#include "device/expert_peers.h"
#include "ops/moe/moe.h"

namespace tessera::ops {

// What of a call is done, in ascending order and with the same Args. In parts a rank can do something else while rows
// are on their way, such as the shared expert; and ranks whose kernels run one after another, on one GPU, are
// possible: each waits in kExperts for what all others did in kDispatch, in kCombine for their kExperts.
enum class RankExpertsPart { kAll, kDispatch, kExperts, kCombine };

struct RankExperts {
  static constexpr const char* kName = "rank_experts";
  static constexpr bool kIsFused = true;
  struct Desc {
    MoeExperts::Desc routed;  // this rank's share: first_expert is rank x num_local, num_experts is world x num_local
    int world = 1;
    std::string to_string() const;
  };
  struct Args {
    // Of this rank's tokens, their ids being those of all ranks' experts (one that is none of theirs, such as -1 of
    // padding, gives zeros); and of this rank's experts. No `out`; the number of tokens and the workspace are those
    // below.
    MoeExperts::Args routed;
    TensorView shared;       // [tokens, hidden] activation, read by kCombine; data null: none
    TensorView out;          // [tokens, hidden] activation
    int64_t num_tokens = 0;  // of this rank; 0 takes part too
    // No rank has more in this call; the fewer, the less is grouped. 0: as many as `peers` has room for.
    int64_t most_tokens = 0;
    const device::ExpertPeers* peers = nullptr;  // of the reference, which is one rank's: null
    RankExpertsPart part = RankExpertsPart::kAll;
    void* workspace = nullptr;  // for most_tokens; the parts of a call have one
    bool does(RankExpertsPart wanted) const { return part == RankExpertsPart::kAll || part == wanted; }
  };
};

// Whether `world` shares of experts like this one are all experts, and this is one of them.
bool rank_experts_shares_agree(const RankExperts::Desc& desc, std::string& why_not);
// The call's most_tokens, for which there is room. Throws kInvalidArgument where the call does not fit its peers: more
// tokens than they have room for, or peers of another shape or rank.
int64_t checked_most_tokens(const RankExperts::Desc& desc, const RankExperts::Args& args);

// Of one rank only: another's tokens can't be reached from it.
int64_t rank_experts_reference_workspace(const RankExperts::Desc& desc, int64_t max_tokens);
bool rank_experts_reference_supports(const RankExperts::Desc& desc, std::string& why_not);
void rank_experts_reference(const RankExperts::Desc& desc, const RankExperts::Args& args, device::Queue& queue);

}  // namespace tessera::ops
