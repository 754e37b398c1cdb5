// SPDX-License-Identifier: Apache-2.0
// The reference: every op as its contract states it, on any machine, in every mode. What all else is held against.
#include "ops/backend.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine&, std::string&) {
  return true;
}

template <class Desc>
bool supports_all(const Desc&, std::string&) {
  return true;
}

template <class Op>
constexpr Variant<Op> plain(void (*run)(const typename Op::Desc&, const typename Op::Args&, device::Queue&),
                            bool (*supports)(const typename Op::Desc&, std::string&) = supports_all<typename Op::Desc>,
                            int64_t (*workspace_bytes)(const typename Op::Desc&, int64_t) = nullptr) {
  return {"scalar", supports, nullptr, workspace_bytes, run};
}

constexpr Variant<Embedding> kEmbedding[] = {plain<Embedding>(embedding_reference)};
constexpr Variant<RmsNorm> kRmsNorm[] = {plain<RmsNorm>(rms_norm_reference, rms_norm_reference_supports)};
constexpr Variant<Rope> kRope[] = {plain<Rope>(rope_reference, rope_reference_supports)};
constexpr Variant<MhcPre> kMhcPre[] = {plain<MhcPre>(mhc_pre_reference, mhc_reference_supports)};
constexpr Variant<MhcPost> kMhcPost[] = {plain<MhcPost>(mhc_post_reference)};
constexpr Variant<MhcHead> kMhcHead[] = {plain<MhcHead>(mhc_head_reference, mhc_reference_supports)};
constexpr Variant<Linear> kLinear[] = {
    plain<Linear>(linear_reference, linear_reference_supports, linear_reference_workspace)};
constexpr Variant<MoeExperts> kMoeExperts[] = {
    plain<MoeExperts>(moe_experts_reference, moe_experts_reference_supports, moe_experts_reference_workspace)};
constexpr Variant<SwiGlu> kSwiGlu[] = {plain<SwiGlu>(swiglu_reference)};
constexpr Variant<MoeCombine> kMoeCombine[] = {plain<MoeCombine>(moe_combine_reference)};
constexpr Variant<Router> kRouter[] = {plain<Router>(router_reference)};
constexpr Variant<CacheWrite> kCacheWrite[] = {
    plain<CacheWrite>(cache_write_reference, cache_write_reference_supports)};
constexpr Variant<Hadamard> kHadamard[] = {plain<Hadamard>(hadamard_reference, hadamard_reference_supports)};
constexpr Variant<CompressorPool> kCompressorPool[] = {plain<CompressorPool>(compressor_pool_reference)};
constexpr Variant<IndexScores> kIndexScores[] = {
    plain<IndexScores>(index_scores_reference, index_scores_reference_supports)};
constexpr Variant<TopK> kTopK[] = {plain<TopK>(top_k_reference)};
constexpr Variant<Attention> kAttention[] = {plain<Attention>(attention_reference, attention_reference_supports)};
constexpr Variant<FiniteCheck> kFiniteCheck[] = {plain<FiniteCheck>(finite_check_reference)};
constexpr Variant<StreamAdd> kStreamAdd[] = {plain<StreamAdd>(stream_add_reference)};
constexpr Variant<Sample> kSample[] = {
    plain<Sample>(sample_reference, supports_all<Sample::Desc>, sample_reference_workspace)};
constexpr Variant<RandomFill> kRandomFill[] = {
    plain<RandomFill>(random_fill_reference, random_fill_reference_supports)};
constexpr Variant<QuantizeNvfp4> kQuantizeNvfp4[] = {
    plain<QuantizeNvfp4>(quantize_nvfp4_reference, quantize_nvfp4_reference_supports)};
constexpr Variant<NormRope> kNormRope[] = {plain<NormRope>(norm_rope_reference, norm_rope_reference_supports)};
constexpr Variant<PoolNorm> kPoolNorm[] = {plain<PoolNorm>(pool_norm_reference, pool_norm_reference_supports)};
constexpr Variant<AttentionRope> kAttentionRope[] = {
    plain<AttentionRope>(attention_rope_reference, attention_rope_reference_supports)};
constexpr Variant<MhcPostPre> kMhcPostPre[] = {
    plain<MhcPostPre>(mhc_post_pre_reference, mhc_post_pre_reference_supports)};
constexpr Variant<LinearGroup> kLinearGroup[] = {
    plain<LinearGroup>(linear_group_reference, linear_group_reference_supports, linear_group_reference_workspace)};
constexpr Variant<AllExperts> kAllExperts[] = {
    plain<AllExperts>(all_experts_reference, all_experts_reference_supports, all_experts_reference_workspace)};
constexpr Variant<GroupedLinear> kGroupedLinear[] = {plain<GroupedLinear>(
    grouped_linear_reference, grouped_linear_reference_supports, grouped_linear_reference_workspace)};
constexpr Variant<RankExperts> kRankExperts[] = {
    plain<RankExperts>(rank_experts_reference, rank_experts_reference_supports, rank_experts_reference_workspace)};

}  // namespace

extern constinit const Backend ref_backend = {
    "ref",
    available,
    Verification::kRunOnHardware,
    {{kEmbedding,   kRmsNorm,        kRope,        kMhcPre,        kMhcPost,       kMhcHead,
      kLinear,      kMoeExperts,     kSwiGlu,      kMoeCombine,    kRouter,        kCacheWrite,
      kHadamard,    kCompressorPool, kIndexScores, kTopK,          kAttention,     kStreamAdd,
      kFiniteCheck, kSample,         kRandomFill,  kQuantizeNvfp4, kNormRope,      kMhcPostPre,
      kLinearGroup, kAllExperts,     kPoolNorm,    kAttentionRope, kGroupedLinear, kRankExperts}},
};

}  // namespace tessera::backends
