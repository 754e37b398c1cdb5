// SPDX-License-Identifier: Apache-2.0
// Hopper (compute capability 9.0): what wgmma and the copy engine make faster, and fused ops of that. All else is the
// portable backend's.
#include "backends/sm90/kernels.h"

#include <fmt/format.h>

#include "backends/cuda_common/packed_units.h"
#include "backends/cuda_common/rounded_linear.h"

namespace tessera::backends {

extern const ops::Backend cuda_backend;

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.gpu->compute_major == 9) return true;
  why_not = fmt::format("needs compute capability 9.0 (Hopper), found {}.{}", machine.gpu->compute_major,
                        machine.gpu->compute_minor);
  return false;
}

template <class Desc>
const PackedLayout* packed_layout(const Desc& desc) {
  return cuda_common::packed_units(desc.format);
}
const PackedLayout* packed_layout_of_group(const LinearGroup::Desc& desc) {
  return desc.parts.empty() ? packed_layout(desc.maps.front()) : cuda_common::packed_units_of_each();
}
const PackedLayout* packed_layout_of_experts(const RankExperts::Desc& desc) {
  return packed_layout(desc.routed);
}
const PackedLayout* packed_layout_of_all_experts(const AllExperts::Desc&) {
  return cuda_common::packed_units_of_each();
}

constexpr Variant<Linear> kWgmmaLinear = {"wgmma", sm90::linear_supports, packed_layout<Linear::Desc>,
                                          sm90::linear_workspace, sm90::linear};
constexpr Variant<Linear> kLinear[] = {kWgmmaLinear, cuda_common::RoundedLinear<kWgmmaLinear>::variant("rounded")};
constexpr Variant<MoeExperts> kMoeExperts[] = {{"wgmma", sm90::moe_experts_supports, packed_layout<MoeExperts::Desc>,
                                                sm90::moe_experts_workspace, sm90::moe_experts}};
constexpr Variant<GroupedLinear> kGroupedLinear[] = {{"wgmma", sm90::grouped_linear_supports,
                                                      packed_layout<GroupedLinear::Desc>,
                                                      sm90::grouped_linear_workspace, sm90::grouped_linear}};
constexpr Variant<LinearGroup> kLinearGroup[] = {
    {"wgmma", sm90::linear_group_supports, packed_layout_of_group, sm90::linear_group_workspace, sm90::linear_group}};
constexpr Variant<AllExperts> kAllExperts[] = {{"wgmma", sm90::all_experts_supports, packed_layout_of_all_experts,
                                                sm90::all_experts_workspace, sm90::all_experts}};
constexpr Variant<RankExperts> kRankExperts[] = {
    {"wgmma", sm90::rank_experts_supports, packed_layout_of_experts, sm90::rank_experts_workspace, sm90::rank_experts}};
constexpr Variant<Attention> kAttention[] = {
    {"wgmma", sm90::attention_supports, nullptr, sm90::attention_workspace, sm90::attention}};
constexpr Variant<AttentionRope> kAttentionRope[] = {
    {"wgmma", sm90::attention_rope_supports, nullptr, sm90::attention_rope_workspace, sm90::attention_rope}};
constexpr Variant<IndexScores> kIndexScores[] = {
    {"wgmma", sm90::index_scores_supports, nullptr, nullptr, sm90::index_scores}};

}  // namespace

extern constinit const Backend sm90_backend = {
    .name = "sm90",
    .available = available,
    .verification = Verification::kRunOnHardware,
    .variants = make_variants(kLinear, kMoeExperts, kGroupedLinear, kLinearGroup, kAllExperts, kAttention, kIndexScores,
                              kRankExperts, kAttentionRope),
    .is_on_gpu = true,
    .extends = &cuda_backend,
};

}  // namespace tessera::backends
