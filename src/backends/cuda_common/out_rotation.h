// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inverse rotation of attention's output (attention_rope), which is done where a token's parts are merged.
#include <string>

#include "ops/attention_rope/attention_rope.h"

namespace tessera::backends::cuda_common {

struct OutRotation {
  const float* frequencies = nullptr;
  int dim = 0;  // the last channels of a head; 0: none are rotated
};

// Runs attention and what it has not rotated itself: `attend(desc, args, rotation, queue)` says whether it has, and
// `rope` is the op.
template <class Attend, class Rope>
void attend_and_rotate(const ops::AttentionRope::Desc& desc, const ops::AttentionRope::Args& args, device::Queue& queue,
                       const Attend& attend, const Rope& rope) {
  const OutRotation rotation{args.frequencies, static_cast<int>(desc.rope.rope_dim)};
  if (!attend(desc.attention, ops::attention_of(args), rotation, queue)) rope(desc.rope, ops::rope_of(args), queue);
}

// Four channels of a head are a thread's, as pairs.
inline bool rotates_by_fours(const ops::AttentionRope::Desc& desc, std::string& why_not) {
  if (!ops::attention_rope_reference_supports(desc, why_not)) return false;
  if (desc.rope.rope_dim % 4 == 0 && desc.rope.width % 4 == 0) return true;
  why_not = "rotates four channels at once";
  return false;
}

}  // namespace tessera::backends::cuda_common
