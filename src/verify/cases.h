// SPDX-License-Identifier: Apache-2.0
#pragma once
// The calls that are verified, op by op. Shapes named Flash are those of deepseek-ai/DeepSeek-V4-Flash (its
// config.json); what has many rows that are alike (vocabulary, experts) is cut, and the label says so.
#include <cmath>
#include <vector>

#include "ops/backend.h"
#include "verify/case.h"
#include "verify/fills.h"

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
TESSERA_VERIFIED_OP(NormRope)
TESSERA_VERIFIED_OP(MhcPostPre)
TESSERA_VERIFIED_OP(LinearGroup)
TESSERA_VERIFIED_OP(AllExperts)
TESSERA_VERIFIED_OP(GroupedLinear)
TESSERA_VERIFIED_OP(RankExperts)
TESSERA_VERIFIED_OP(PoolNorm)
TESSERA_VERIFIED_OP(AttentionRope)

#undef TESSERA_VERIFIED_OP

// All of a call of experts but its output.
ops::MoeExperts::Args expert_inputs(Rng& rng, const Spec<ops::MoeExperts>& spec, Arrays& arrays);

// All of a call: of fused ops, these are parts.
ops::CompressorPool::Args pool_arrays(Rng& rng, const Spec<ops::CompressorPool>& spec, Arrays& arrays);
ops::Attention::Args attention_arrays(Rng& rng, const Spec<ops::Attention>& spec, Arrays& arrays);
// `context` of attention: the position of the first token, and how many entries a cache holds; either each token has a
// list of some, or all are visible.
int64_t attention_context(int64_t position, int64_t num_entries, bool is_selected);

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

// The mixing weights of `count` coefficients: their products with a stream of RMS 1 are near 1.
template <class Args>
void add_mixing(Args& args, Arrays& arrays, Rng& rng, int64_t hidden, int64_t count, int64_t num_scales) {
  const int64_t wide = ops::kHcStreams * hidden;
  args.fn = arrays.array(normal_values(rng, count, wide, 1 / std::sqrt(static_cast<float>(wide))));
  args.base = arrays.array(normal_values(rng, 1, count));
  args.scale = arrays.array(normal_values(rng, 1, num_scales, 0.5f));
}

// Which entry of a cache each of `rows` rows is written to; of more than two one to none.
std::vector<int64_t> random_slots(Rng& rng, int64_t rows);

}  // namespace tessera::verify
