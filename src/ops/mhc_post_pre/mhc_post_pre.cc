// SPDX-License-Identifier: Apache-2.0
#include "ops/mhc_post_pre/mhc_post_pre.h"

#include <fmt/format.h>

namespace tessera::ops {

std::string MhcPostPre::Desc::to_string() const {
  return fmt::format("{}{}{}{}{}", mhc.to_string(), combine ? ", combine " + combine->to_string() : "",
                     sums_ranks ? ", sum over ranks" : "", has_post ? ", post" : "", norm ? ", pre and norm" : "");
}

bool mhc_post_pre_parts_agree(const MhcPostPre::Desc& desc, std::string& why_not) {
  if ((desc.combine && (!desc.has_post || desc.combine->hidden != desc.mhc.hidden)) ||
      (desc.norm && desc.norm->width != desc.mhc.hidden)) {
    why_not = "parts have one width, and experts are combined before a post";
    return false;
  }
  if (desc.sums_ranks && !desc.has_post) {
    why_not = "ranks add what post takes";
    return false;
  }
  return mhc_reference_supports(desc.mhc, why_not) && (!desc.norm || rms_norm_reference_supports(*desc.norm, why_not));
}

bool mhc_post_pre_reference_supports(const MhcPostPre::Desc& desc, std::string& why_not) {
  if (!desc.sums_ranks) return mhc_post_pre_parts_agree(desc, why_not);
  why_not = "reaches no other rank's memory";
  return false;
}

void mhc_post_pre_reference(const MhcPostPre::Desc& desc, const MhcPostPre::Args& args, device::Queue& queue) {
  MhcPostPre::Args parts = args;
  parts.combine.num_tokens = parts.post.num_tokens = parts.pre.num_tokens = args.num_tokens;
  if (desc.combine) moe_combine_reference(*desc.combine, parts.combine, queue);
  if (desc.has_post) mhc_post_reference(desc.mhc, parts.post, queue);
  if (!desc.norm) return;
  mhc_pre_reference(desc.mhc, parts.pre, queue);
  rms_norm_reference(*desc.norm,
                     {.x = args.pre.y, .weight = args.weight, .out = args.pre.y, .num_rows = args.num_tokens}, queue);
}

}  // namespace tessera::ops
