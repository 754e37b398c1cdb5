// SPDX-License-Identifier: Apache-2.0
#pragma once
// What happens to the residual streams between two sublayers: moe_combine, mhc_post, then mhc_pre and the rms_norm of
// what it reads, in this order, as far as they are wanted. Fused (decision 0023): every value has the bits that those
// ops give one after the other, with their rounding points.
// Source: those ops' contracts.
#include <cstdint>
#include <optional>
#include <string>

#include "device/peer_view.h"
#include "ops/mhc/mhc.h"
#include "ops/moe/moe.h"
#include "ops/rms_norm/rms_norm.h"

namespace tessera::ops {

struct MhcPostPre {
  static constexpr const char* kName = "mhc_post_pre";
  static constexpr bool kIsFused = true;
  // All parts are of one hidden size and activation.
  struct Desc {
    MhcDesc mhc;
    std::optional<MoeCombine::Desc> combine = {};  // with has_post only
    bool has_post = false;
    std::optional<RmsNorm::Desc> norm = {};  // mhc_pre, and the norm of its y in place; none: neither
    // Post takes a sum over ranks, in ascending order in FP32, rounded once, of what combine gives here, rounded, and
    // without combine of post.o, which is F32 then. With post; kernels for GPUs that reach each other's memory only.
    bool sums_ranks = false;
    std::string to_string() const;
  };
  // Parts that are wanted are filled in; their numbers of tokens and workspace are those below.
  struct Args {
    MoeCombine::Args combine;  // out: post.o, scratch
    MhcPost::Args post;        // out: pre.x where that is wanted, and then another array than x
    MhcPre::Args pre;
    TensorView weight;                        // [hidden] BF16 or F32, of the norm
    const device::PeerView* peers = nullptr;  // sums_ranks: has room for this many tokens' summands
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

// Whether the parts fit each other, and each is one that the reference computes.
bool mhc_post_pre_parts_agree(const MhcPostPre::Desc& desc, std::string& why_not);
bool mhc_post_pre_reference_supports(const MhcPostPre::Desc& desc, std::string& why_not);
void mhc_post_pre_reference(const MhcPostPre::Desc& desc, const MhcPostPre::Args& args, device::Queue& queue);

}  // namespace tessera::ops
