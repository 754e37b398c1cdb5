// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels of moe_experts share; slots are grouped as cuda_common/expert_slots.cuh says.
#include <cstdint>

#include "backends/cuda_common/expert_slots.cuh"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/sm90/sum_plans.h"

namespace tessera::backends::sm90 {

using cuda_common::ExpertWork, cuda_common::kPositionGroup, cuda_common::most_work;

// Where the progress of entries of work begins, behind the claims, which all teams add to: in another line of L2.
constexpr int kFirstProgress = 32;

// The workspace.
struct MoeScratch : cuda_common::SlotGroups {
  char *x, *h;                   // arranged (arranged_inputs.cuh): [positions, hidden], [positions, padded inner]
  uint16_t* rounded_x;           // [tokens, hidden], where the mode rounds inputs
  float *x_factors, *h_factors;  // [tokens], [positions]; null: 1
  float* weights;                // [positions] of routing; 0: no slot
  uint32_t* progress;            // [kFirstProgress + entries of work] of few_experts.cuh, 0 behind grouping
};

struct MoeJob : cuda_common::SlotJob {
  MoeScratch scratch;
  const float* routing;  // [slots]
  const uint16_t* x;     // [tokens, hidden]
  int64_t inner, padded_inner;
  float limit;
  cuda_common::FastDivisor token_of;  // of a slot

  __device__ float weight_of(int32_t slot) const { return slot < 0 ? 0 : routing[slot]; }
  // Two columns of a slot's output, and the two 8 behind them; negative: no slot. By all lanes of a warp, four
  // neighbouring ones a slot's 16 columns.
  __device__ void store_columns(int32_t slot, int column, uint32_t low, uint32_t high) const {
    if (slot < 0) return;
    uint16_t* to = out + slot * hidden + column;
    *reinterpret_cast<uint32_t*>(to) = low, *reinterpret_cast<uint32_t*>(to + 8) = high;
  }
};

// Bytes of the workspace for num_slots slots; fills `scratch` where `base` is not null. Entries of work are for tiles
// of `work_slots` slots.
int64_t layout_moe_scratch(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, char* base,
                           MoeScratch& scratch);

template <class Shape>
int64_t moe_scratch_bytes(const ops::MoeExperts::Desc& desc, int64_t num_slots) {
  MoeScratch scratch{};
  return layout_moe_scratch(desc, num_slots, Shape::kTokens, nullptr, scratch);
}

// Slots grouped and their inputs arranged for the kernels of Shape (Wide or Few); what both maps are of.
template <class Shape>
MoeJob group(const ops::MoeExperts::Desc& desc, const ops::MoeExperts::Args& args, device::Queue& queue);
// Gate and up, and what they give rounded where the mode wants it: what the last map multiplies.
template <class Shape>
void compute_h(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue);

// Group the slots and arrange their inputs: any number; and at most kMostFewSlots for tiles of few, in one kernel.
// Slots of experts of other ranks are zero.
template <class Layout>
void group_many_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue);
void group_few_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue);

// Rounds h in its arrangement, and fills h_factors, in `a4` and `a8`.
template <class Layout>
void round_h(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue);

}  // namespace tessera::backends::sm90
