// SPDX-License-Identifier: Apache-2.0
#pragma once
// attention, and the inverse rope of what it gives, in place. Fused (decision 0023): every value has the bits that
// those ops give one after the other, with their rounding points.
// Source: those ops' contracts.
#include <cstdint>
#include <string>

#include "ops/attention/attention.h"
#include "ops/rope/rope.h"

namespace tessera::ops {

struct AttentionRope {
  static constexpr const char* kName = "attention_rope";
  static constexpr bool kIsFused = true;
  struct Desc {
    Attention::Desc attention;
    Rope::Desc rope;  // of attention's heads; inverse
    std::string to_string() const;
  };
  struct Args {
    Attention::Args attention;           // num_tokens and workspace are those below
    const float* frequencies = nullptr;  // [rope_dim / 2]
    int64_t num_tokens = 0;
    void* workspace = nullptr;
  };
};

// The parts' own arguments.
Attention::Args attention_of(const AttentionRope::Args& args);
Rope::Args rope_of(const AttentionRope::Args& args);

// Whether the parts are of the same heads.
bool attention_rope_parts_agree(const AttentionRope::Desc& desc, std::string& why_not);
bool attention_rope_reference_supports(const AttentionRope::Desc& desc, std::string& why_not);
void attention_rope_reference(const AttentionRope::Desc& desc, const AttentionRope::Args& args, device::Queue& queue);

}  // namespace tessera::ops
