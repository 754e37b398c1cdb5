// SPDX-License-Identifier: Apache-2.0
#pragma once
// What backend.cc lists: linear maps with packed weights and experts with NVFP4's on Hopper, by kernels for one
// token, few, chunks and many (sum_plans.h), or the portable backend's, which all give the same bits (wide_sums.cuh);
// attention and the indexer's scores.
#include <string>

#include "backends/cuda_common/out_rotation.h"
#include "ops/backend.h"

namespace tessera::backends::sm90 {

bool linear_supports(const ops::Linear::Desc& desc, std::string& why_not);
int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens);
void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue);
bool moe_experts_supports(const ops::MoeExperts::Desc& desc, std::string& why_not);
int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens);
void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);
bool grouped_linear_supports(const ops::GroupedLinear::Desc& desc, std::string& why_not);
int64_t grouped_linear_workspace(const ops::GroupedLinear::Desc& desc, int64_t max_rows);
void grouped_linear(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, device::Queue& queue);
bool linear_group_supports(const ops::LinearGroup::Desc& desc, std::string& why_not);
int64_t linear_group_workspace(const ops::LinearGroup::Desc& desc, int64_t max_tokens);
void linear_group(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue);
// Of the kernels above, but for a few slots.
bool all_experts_supports(const ops::AllExperts::Desc& desc, std::string& why_not);
int64_t all_experts_workspace(const ops::AllExperts::Desc& desc, int64_t max_tokens);
void all_experts(const ops::AllExperts::Desc& desc, const ops::AllExperts::Args& args, device::Queue& queue);
// Of ranks that reach each other's memory: wgmma for many tokens, else the kernel of few.
bool rank_experts_supports(const ops::RankExperts::Desc& desc, std::string& why_not);
int64_t rank_experts_workspace(const ops::RankExperts::Desc& desc, int64_t max_tokens);
void rank_experts(const ops::RankExperts::Desc& desc, const ops::RankExperts::Args& args, device::Queue& queue);
bool attention_supports(const ops::Attention::Desc& desc, std::string& why_not);
int64_t attention_workspace(const ops::Attention::Desc& desc, int64_t max_tokens);
void attention(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue);
// A handful of tokens, whose parts are dealt out to so many clusters, 1 where each has one part; the same bits. Whether
// it has rotated `out`, where that is asked for.
bool attention_few(const ops::Attention::Desc& desc, const ops::Attention::Args& args, int64_t splits,
                   const cuda_common::OutRotation& rotation, device::Queue& queue);
bool attention_rope_supports(const ops::AttentionRope::Desc& desc, std::string& why_not);
int64_t attention_rope_workspace(const ops::AttentionRope::Desc& desc, int64_t max_tokens);
void attention_rope(const ops::AttentionRope::Desc& desc, const ops::AttentionRope::Args& args, device::Queue& queue);

// Of Flash's and Pro's indexer.
bool index_scores_supports(const ops::IndexScores::Desc& desc, std::string& why_not);
void index_scores(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue);

}  // namespace tessera::backends::sm90
