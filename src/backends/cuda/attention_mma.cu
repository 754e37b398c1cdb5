// SPDX-License-Identifier: Apache-2.0
// attention on tensor cores, a thread block to 16 heads of a token (attention_few.cuh).
#include "backends/cuda/attention_few.cuh"
#include "backends/cuda/kernels.h"

namespace tessera::backends::cuda {

using namespace attention_few;

namespace {

// Tokens that are spread, blocks over which one is, and parts of all of them that the workspace holds: a million
// tokens, 128 to an entry, are 65.
constexpr int kSplitTokens = 8, kSplits = 16, kSlots = 72;

}  // namespace

bool attention_mma_supports(const ops::Attention::Desc& desc, std::string& why_not) {
  const ops::EntryLayout& layout = desc.layout;
  if (desc.activation != DType::kBF16 ||
      (layout.format != ops::EntryFormat::kBf16 && layout.format != ops::EntryFormat::kKvFp8Bf16)) {
    why_not = "needs BF16 queries and keys in FP8 or BF16";
  } else if (desc.head_dim > kMaxWidth || desc.head_dim % kGroup != 0 || layout.rope_dim % kGroup != 0) {
    why_not = "needs a head dimension of at most 512 and a rotary part that are multiples of 64";
  } else {
    return true;
  }
  return false;
}

int64_t attention_mma_workspace(const ops::Attention::Desc& desc, int64_t) {
  return attention_parts_workspace(desc, kSlots);
}

bool run_attention_mma(const ops::Attention::Desc& desc, const ops::Attention::Args& args,
                       const cuda_common::OutRotation& rotation, device::Queue& queue) {
  if (args.num_tokens == 0) return true;
  return run<1, kSlots>(desc, args, args.num_tokens <= kSplitTokens ? kSplits : 1, rotation, queue);
}

void attention_mma(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue) {
  run_attention_mma(desc, args, {}, queue);
}

bool attention_rope_mma_supports(const ops::AttentionRope::Desc& desc, std::string& why_not) {
  return cuda_common::rotates_by_fours(desc, why_not) && attention_mma_supports(desc.attention, why_not);
}

int64_t attention_rope_mma_workspace(const ops::AttentionRope::Desc& desc, int64_t max_tokens) {
  return attention_mma_workspace(desc.attention, max_tokens);
}

void attention_rope_mma(const ops::AttentionRope::Desc& desc, const ops::AttentionRope::Args& args,
                        device::Queue& queue) {
  cuda_common::attend_and_rotate(desc, args, queue, run_attention_mma, rope);
}

}  // namespace tessera::backends::cuda
