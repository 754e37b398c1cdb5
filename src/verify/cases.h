// SPDX-License-Identifier: Apache-2.0
#pragma once
// The calls that are verified, op by op. Shapes named Flash are those of deepseek-ai/DeepSeek-V4-Flash (its
// config.json); what has many rows that are alike (vocabulary, experts) is cut, and the label says so.
#include <vector>

#include "ops/backend.h"
#include "verify/case.h"

namespace tessera::verify {

// For each op of ops::AllVariants: what to run (`is_quick`: small shapes only), and the call of a spec.
#define TESSERA_VERIFIED_OP(Op)                                    \
  std::vector<Spec<ops::Op>> specs_of(ops::Op tag, bool is_quick); \
  Case<ops::Op> make_case(Rng& rng, const Spec<ops::Op>& spec);

TESSERA_VERIFIED_OP(Linear)
TESSERA_VERIFIED_OP(MoeExperts)
TESSERA_VERIFIED_OP(SwiGlu)
TESSERA_VERIFIED_OP(MoeCombine)
TESSERA_VERIFIED_OP(Router)
TESSERA_VERIFIED_OP(Embedding)
TESSERA_VERIFIED_OP(RmsNorm)
TESSERA_VERIFIED_OP(Rope)
TESSERA_VERIFIED_OP(MhcPre)
TESSERA_VERIFIED_OP(MhcPost)
TESSERA_VERIFIED_OP(MhcHead)
TESSERA_VERIFIED_OP(StreamAdd)
TESSERA_VERIFIED_OP(Hadamard)
TESSERA_VERIFIED_OP(FiniteCheck)
TESSERA_VERIFIED_OP(Sample)
TESSERA_VERIFIED_OP(RandomFill)
TESSERA_VERIFIED_OP(QuantizeNvfp4)
TESSERA_VERIFIED_OP(CacheWrite)
TESSERA_VERIFIED_OP(CompressorPool)
TESSERA_VERIFIED_OP(IndexScores)
TESSERA_VERIFIED_OP(TopK)
TESSERA_VERIFIED_OP(Attention)

#undef TESSERA_VERIFIED_OP

// Shared by the files of cases ---------------------------------------------------------------------------------

constexpr int64_t kTokenCounts[] = {1, 3, 17};
constexpr Fill kFills[] = {Fill::kNormal, Fill::kMixed, Fill::kZero, Fill::kDenormal};

// `desc` at every small token count, and at 17 tokens with every fill.
template <class Op>
void add_small(std::vector<Spec<Op>>& specs, const typename Op::Desc& desc, int64_t context = 0) {
  for (const int64_t tokens : kTokenCounts) specs.push_back({desc, tokens, Fill::kMixed, context});
  for (const Fill fill : kFills) {
    if (fill != Fill::kMixed) specs.push_back({desc, 17, fill, context});
  }
}

// A published shape: heavy tails at most tokens, normal values at one.
template <class Op>
void add_published(std::vector<Spec<Op>>& specs, const typename Op::Desc& desc, const char* label, int64_t context = 0,
                   int64_t most_tokens = 17) {
  specs.push_back({desc, most_tokens, Fill::kMixed, context, label});
  specs.push_back({desc, 1, Fill::kNormal, context, label});
}

}  // namespace tessera::verify
