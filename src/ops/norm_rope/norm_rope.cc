// SPDX-License-Identifier: Apache-2.0
#include "ops/norm_rope/norm_rope.h"

#include <fmt/format.h>

namespace tessera::ops {

std::string NormRope::Desc::to_string() const {
  std::string text;
  for (const SetDesc& set : sets) {
    text += fmt::format("{}{}{}{}{}", text.empty() ? "" : "; ", set.norm ? "norm " : "", set.rope.to_string(),
                        set.hadamard ? " hadamard " + set.hadamard->to_string() : "",
                        set.write ? " to " + set.write->to_string() : "");
  }
  return text;
}

bool norm_rope_reference_supports(const NormRope::Desc& desc, std::string& why_not) {
  if (desc.sets.empty() || desc.sets.size() > NormRope::kMostSets) {
    why_not = fmt::format("one to {} sets of vectors, not {}", NormRope::kMostSets, desc.sets.size());
    return false;
  }
  for (const NormRope::SetDesc& set : desc.sets) {
    const int64_t width = set.rope.width;
    if ((set.norm && set.norm->width != width) || (set.hadamard && set.hadamard->width != width) ||
        (set.write && (set.write->layout.width != width || set.rope.vectors != 1))) {
      why_not = "parts of a set have one width, and rows that are stored one vector";
      return false;
    }
    if (!rope_reference_supports(set.rope, why_not) || (set.norm && !rms_norm_reference_supports(*set.norm, why_not)) ||
        (set.hadamard && !hadamard_reference_supports(*set.hadamard, why_not)) ||
        (set.write && !cache_write_reference_supports(*set.write, why_not))) {
      return false;
    }
  }
  return true;
}

void norm_rope_reference(const NormRope::Desc& desc, const NormRope::Args& args, device::Queue& queue) {
  for (size_t i = 0; i < desc.sets.size(); ++i) {
    const NormRope::SetDesc& set = desc.sets[i];
    const NormRope::Set& of = args.sets[i];
    const int64_t num_vectors = of.num_rows * set.rope.vectors;
    if (set.norm) {
      rms_norm_reference(*set.norm, {.x = of.x, .weight = of.weight, .out = of.x, .num_rows = num_vectors}, queue);
    }
    rope_reference(set.rope,
                   {.x = of.x, .positions = of.positions, .frequencies = of.frequencies, .num_tokens = of.num_rows},
                   queue);
    if (set.hadamard) hadamard_reference(*set.hadamard, {.x = of.x, .num_rows = num_vectors}, queue);
    if (set.write) {
      cache_write_reference(*set.write, {.rows = of.x, .slots = of.slots, .cache = of.cache, .num_rows = of.num_rows},
                            queue);
    }
  }
}

}  // namespace tessera::ops
