// SPDX-License-Identifier: Apache-2.0
// The portable GPU backend (compute capability 8.0 and later): every op, in every mode, in the reference's order of
// sums (what each faster kernel is held against on a GPU); and linear maps, experts, attention
// and the indexer's scores on tensor cores.
#include <fmt/format.h>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/packed_units.h"
#include "backends/cuda_common/rounded_linear.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.gpu->compute_major >= 8) return true;
  why_not = fmt::format("needs compute capability 8.0 or later, found {}.{}", machine.gpu->compute_major,
                        machine.gpu->compute_minor);
  return false;
}

template <class Desc>
bool supports_all(const Desc&, std::string&) {
  return true;
}

template <class Op>
constexpr Variant<Op> simple(void (*run)(const typename Op::Desc&, const typename Op::Args&, device::Queue&),
                             bool (*supports)(const typename Op::Desc&, std::string&) = supports_all<typename Op::Desc>,
                             int64_t (*workspace_bytes)(const typename Op::Desc&, int64_t) = nullptr) {
  return {"simple", supports, nullptr, workspace_bytes, run};
}

// Shapes that the reference declines, these decline too: nothing could be held against it.
constexpr Variant<Embedding> kEmbedding[] = {simple<Embedding>(cuda::embedding)};
constexpr Variant<RmsNorm> kRmsNorm[] = {simple<RmsNorm>(cuda::rms_norm, cuda::rms_norm_supports)};
constexpr Variant<Rope> kRope[] = {simple<Rope>(cuda::rope, rope_reference_supports)};
constexpr Variant<MhcPre> kMhcPre[] = {simple<MhcPre>(cuda::mhc_pre, mhc_reference_supports, cuda::mhc_workspace)};
constexpr Variant<MhcPost> kMhcPost[] = {simple<MhcPost>(cuda::mhc_post)};
constexpr Variant<MhcHead> kMhcHead[] = {simple<MhcHead>(cuda::mhc_head, mhc_reference_supports, cuda::mhc_workspace)};
template <class Desc>
const PackedLayout* packed_layout(const Desc& desc) {
  return cuda_common::packed_units(desc.format);
}
const PackedLayout* packed_layout_of_group(const LinearGroup::Desc& desc) {
  return desc.parts.empty() ? packed_layout(desc.maps.front()) : cuda_common::packed_units_of_each();
}
constexpr Variant<Linear> kPackedLinear = {"packed", cuda::linear_packed_supports, packed_layout<Linear::Desc>, nullptr,
                                           cuda::linear_packed};
constexpr Variant<Linear> kLinear[] = {kPackedLinear,
                                       cuda_common::RoundedLinear<kPackedLinear>::variant("rounded"),
                                       {"mma", cuda::linear_mma_supports, nullptr, nullptr, cuda::linear_mma},
                                       simple<Linear>(cuda::linear, linear_reference_supports, cuda::linear_workspace)};
constexpr Variant<MoeExperts> kMoeExperts[] = {
    {"packed", cuda::moe_experts_packed_supports, packed_layout<MoeExperts::Desc>, cuda::moe_experts_workspace,
     cuda::moe_experts_packed},
    {"mma", cuda::moe_experts_mma_supports, nullptr, cuda::moe_experts_workspace, cuda::moe_experts_mma},
    simple<MoeExperts>(cuda::moe_experts, moe_experts_reference_supports, cuda::moe_experts_workspace)};
constexpr Variant<SwiGlu> kSwiGlu[] = {simple<SwiGlu>(cuda::swiglu)};
constexpr Variant<MoeCombine> kMoeCombine[] = {simple<MoeCombine>(cuda::moe_combine)};
constexpr Variant<Router> kRouter[] = {simple<Router>(cuda::router)};
constexpr Variant<CacheWrite> kCacheWrite[] = {simple<CacheWrite>(cuda::cache_write, cache_write_reference_supports)};
constexpr Variant<Hadamard> kHadamard[] = {simple<Hadamard>(cuda::hadamard, hadamard_reference_supports)};
constexpr Variant<CompressorPool> kCompressorPool[] = {simple<CompressorPool>(cuda::compressor_pool)};
constexpr Variant<IndexScores> kIndexScores[] = {
    {"mma", cuda::index_scores_mma_supports, nullptr, nullptr, cuda::index_scores_mma},
    simple<IndexScores>(cuda::index_scores, index_scores_reference_supports)};
constexpr Variant<TopK> kTopK[] = {simple<TopK>(cuda::top_k, supports_all<TopK::Desc>, cuda::top_k_workspace)};
constexpr Variant<Attention> kAttention[] = {
    {"mma", cuda::attention_mma_supports, nullptr, cuda::attention_mma_workspace, cuda::attention_mma},
    simple<Attention>(cuda::attention, attention_reference_supports)};
constexpr Variant<FiniteCheck> kFiniteCheck[] = {simple<FiniteCheck>(cuda::finite_check)};
constexpr Variant<StreamAdd> kStreamAdd[] = {simple<StreamAdd>(cuda::stream_add)};
constexpr Variant<Sample> kSample[] = {
    simple<Sample>(cuda::sample, supports_all<Sample::Desc>, cuda::sample_workspace)};
constexpr Variant<RandomFill> kRandomFill[] = {simple<RandomFill>(cuda::random_fill, random_fill_reference_supports)};
constexpr Variant<QuantizeNvfp4> kQuantizeNvfp4[] = {
    simple<QuantizeNvfp4>(cuda::quantize_nvfp4, quantize_nvfp4_reference_supports)};
constexpr Variant<NormRope> kNormRope[] = {simple<NormRope>(cuda::norm_rope, cuda::norm_rope_supports)};
constexpr Variant<MhcPostPre> kMhcPostPre[] = {
    simple<MhcPostPre>(cuda::mhc_post_pre, cuda::mhc_post_pre_supports, cuda::mhc_post_pre_workspace)};
constexpr Variant<PoolNorm> kPoolNorm[] = {simple<PoolNorm>(cuda::pool_norm, cuda::pool_norm_supports)};
constexpr Variant<AttentionRope> kAttentionRope[] = {
    {"mma", cuda::attention_rope_mma_supports, nullptr, cuda::attention_rope_mma_workspace, cuda::attention_rope_mma}};
constexpr Variant<LinearGroup> kLinearGroup[] = {
    {"packed", cuda::linear_group_packed_supports, packed_layout_of_group, nullptr, cuda::linear_group_packed}};
constexpr Variant<GroupedLinear> kGroupedLinear[] = {
    {"packed", cuda::grouped_linear_packed_supports, packed_layout<GroupedLinear::Desc>, cuda::grouped_linear_workspace,
     cuda::grouped_linear_packed},
    {"mma", cuda::grouped_linear_mma_supports, nullptr, cuda::grouped_linear_workspace, cuda::grouped_linear_mma},
    simple<GroupedLinear>(cuda::grouped_linear, grouped_linear_reference_supports, cuda::grouped_linear_workspace)};

}  // namespace

extern constinit const Backend cuda_backend = {
    .name = "cuda",
    .available = available,
    .verification = Verification::kRunOnHardware,
    .variants = make_variants(kEmbedding, kRmsNorm, kRope, kMhcPre, kMhcPost, kMhcHead, kLinear, kMoeExperts, kSwiGlu,
                              kMoeCombine, kRouter, kCacheWrite, kHadamard, kCompressorPool, kIndexScores, kTopK,
                              kAttention, kStreamAdd, kFiniteCheck, kSample, kRandomFill, kQuantizeNvfp4, kNormRope,
                              kMhcPostPre, kLinearGroup, kGroupedLinear, kPoolNorm, kAttentionRope),
    .is_on_gpu = true,
};

}  // namespace tessera::backends
