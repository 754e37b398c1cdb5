// SPDX-License-Identifier: Apache-2.0
#pragma once
// What backend.cc lists: each op as its contract states it, on a GPU. Sums have the reference's order, and products and
// sums are rounded one by one, so results are the reference's bits but for exp, log1p, sine and cosine, which are FP64
// rounded once. Those named mma, on tensor cores, have an order of their own.
#include <string>

#include "backends/cuda_common/out_rotation.h"
#include "ops/backend.h"

namespace tessera::backends::cuda {

void embedding(const ops::Embedding::Desc& desc, const ops::Embedding::Args& args, device::Queue& queue);
bool rms_norm_supports(const ops::RmsNorm::Desc& desc, std::string& why_not);
void rms_norm(const ops::RmsNorm::Desc& desc, const ops::RmsNorm::Args& args, device::Queue& queue);
void rope(const ops::Rope::Desc& desc, const ops::Rope::Args& args, device::Queue& queue);
int64_t mhc_workspace(const ops::MhcDesc& desc, int64_t max_tokens);
void mhc_pre(const ops::MhcDesc& desc, const ops::MhcPre::Args& args, device::Queue& queue);
void mhc_post(const ops::MhcDesc& desc, const ops::MhcPost::Args& args, device::Queue& queue);
void mhc_head(const ops::MhcDesc& desc, const ops::MhcHead::Args& args, device::Queue& queue);
int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens);
void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue);
bool linear_mma_supports(const ops::Linear::Desc& desc, std::string& why_not);
void linear_mma(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue);
bool linear_packed_supports(const ops::Linear::Desc& desc, std::string& why_not);
void linear_packed(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue);
int64_t moe_experts_workspace(const ops::MoeExperts::Desc& desc, int64_t max_tokens);
void moe_experts(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);
bool moe_experts_mma_supports(const ops::MoeExperts::Desc& desc, std::string& why_not);
void moe_experts_mma(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);
bool moe_experts_packed_supports(const ops::MoeExperts::Desc& desc, std::string& why_not);
void moe_experts_packed(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);
int64_t grouped_linear_workspace(const ops::GroupedLinear::Desc& desc, int64_t max_rows);
void grouped_linear(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args, device::Queue& queue);
bool grouped_linear_mma_supports(const ops::GroupedLinear::Desc& desc, std::string& why_not);
void grouped_linear_mma(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args,
                        device::Queue& queue);
bool grouped_linear_packed_supports(const ops::GroupedLinear::Desc& desc, std::string& why_not);
void grouped_linear_packed(const ops::GroupedLinear::Desc& desc, const ops::GroupedLinear::Args& args,
                           device::Queue& queue);
void swiglu(const ops::SwiGlu::Desc& desc, const ops::SwiGlu::Args& args, device::Queue& queue);
void moe_combine(const ops::MoeCombine::Desc& desc, const ops::MoeCombine::Args& args, device::Queue& queue);
void router(const ops::Router::Desc& desc, const ops::Router::Args& args, device::Queue& queue);
void cache_write(const ops::CacheWrite::Desc& desc, const ops::CacheWrite::Args& args, device::Queue& queue);
void hadamard(const ops::Hadamard::Desc& desc, const ops::Hadamard::Args& args, device::Queue& queue);
void compressor_pool(const ops::CompressorPool::Desc& desc, const ops::CompressorPool::Args& args,
                     device::Queue& queue);
void index_scores(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue);
bool index_scores_mma_supports(const ops::IndexScores::Desc& desc, std::string& why_not);
void index_scores_mma(const ops::IndexScores::Desc& desc, const ops::IndexScores::Args& args, device::Queue& queue);
int64_t top_k_workspace(const ops::TopK::Desc& desc, int64_t max_tokens);
void top_k(const ops::TopK::Desc& desc, const ops::TopK::Args& args, device::Queue& queue);
void attention(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue);
bool attention_mma_supports(const ops::Attention::Desc& desc, std::string& why_not);
int64_t attention_mma_workspace(const ops::Attention::Desc& desc, int64_t max_tokens);
void attention_mma(const ops::Attention::Desc& desc, const ops::Attention::Args& args, device::Queue& queue);
// The same; whether it has rotated `out`, where that is asked for.
bool run_attention_mma(const ops::Attention::Desc& desc, const ops::Attention::Args& args,
                       const cuda_common::OutRotation& rotation, device::Queue& queue);
void stream_add(const ops::StreamAdd::Desc& desc, const ops::StreamAdd::Args& args, device::Queue& queue);
void finite_check(const ops::FiniteCheck::Desc& desc, const ops::FiniteCheck::Args& args, device::Queue& queue);
int64_t sample_workspace(const ops::Sample::Desc& desc, int64_t max_tokens);
void sample(const ops::Sample::Desc& desc, const ops::Sample::Args& args, device::Queue& queue);
void random_fill(const ops::RandomFill::Desc& desc, const ops::RandomFill::Args& args, device::Queue& queue);
void quantize_nvfp4(const ops::QuantizeNvfp4::Desc& desc, const ops::QuantizeNvfp4::Args& args, device::Queue& queue);

// Fused ops.
bool norm_rope_supports(const ops::NormRope::Desc& desc, std::string& why_not);
void norm_rope(const ops::NormRope::Desc& desc, const ops::NormRope::Args& args, device::Queue& queue);
bool pool_norm_supports(const ops::PoolNorm::Desc& desc, std::string& why_not);
void pool_norm(const ops::PoolNorm::Desc& desc, const ops::PoolNorm::Args& args, device::Queue& queue);
bool attention_rope_mma_supports(const ops::AttentionRope::Desc& desc, std::string& why_not);
int64_t attention_rope_mma_workspace(const ops::AttentionRope::Desc& desc, int64_t max_tokens);
void attention_rope_mma(const ops::AttentionRope::Desc& desc, const ops::AttentionRope::Args& args,
                        device::Queue& queue);
bool mhc_post_pre_supports(const ops::MhcPostPre::Desc& desc, std::string& why_not);
int64_t mhc_post_pre_workspace(const ops::MhcPostPre::Desc& desc, int64_t max_tokens);
void mhc_post_pre(const ops::MhcPostPre::Desc& desc, const ops::MhcPostPre::Args& args, device::Queue& queue);
bool linear_group_packed_supports(const ops::LinearGroup::Desc& desc, std::string& why_not);
// Few tokens (cuda_common/stream_limit.h), in one launch. False, and nothing done: more, or not on this GPU.
bool linear_group_stream(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue);
void linear_group_packed(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue);

}  // namespace tessera::backends::cuda
