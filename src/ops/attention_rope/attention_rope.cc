// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_rope/attention_rope.h"

namespace tessera::ops {

std::string AttentionRope::Desc::to_string() const {
  return attention.to_string() + "; " + rope.to_string();
}

Attention::Args attention_of(const AttentionRope::Args& args) {
  Attention::Args part = args.attention;
  part.num_tokens = args.num_tokens, part.workspace = args.workspace;
  return part;
}

Rope::Args rope_of(const AttentionRope::Args& args) {
  return {.x = args.attention.out,
          .positions = args.attention.positions,
          .frequencies = args.frequencies,
          .num_tokens = args.num_tokens};
}

bool attention_rope_parts_agree(const AttentionRope::Desc& desc, std::string& why_not) {
  const Attention::Desc& attention = desc.attention;
  const Rope::Desc& rope = desc.rope;
  if (rope.vectors == attention.heads && rope.width == attention.head_dim && rope.is_inverse &&
      rope.activation == attention.activation) {
    return true;
  }
  why_not = "the rotation is inverse and of attention's heads";
  return false;
}

bool attention_rope_reference_supports(const AttentionRope::Desc& desc, std::string& why_not) {
  return attention_rope_parts_agree(desc, why_not) && attention_reference_supports(desc.attention, why_not) &&
         rope_reference_supports(desc.rope, why_not);
}

void attention_rope_reference(const AttentionRope::Desc& desc, const AttentionRope::Args& args, device::Queue& queue) {
  attention_reference(desc.attention, attention_of(args), queue);
  rope_reference(desc.rope, rope_of(args), queue);
}

}  // namespace tessera::ops
