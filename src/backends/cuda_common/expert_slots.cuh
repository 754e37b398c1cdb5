// SPDX-License-Identifier: Apache-2.0
#pragma once
// Grouping of slots by expert. A slot is a token and one of its experts. Slots are grouped by expert, tokens ascending;
// a slot's place then is its position, and each expert's positions begin at a multiple of 8. Whole numbers in a fixed
// order: nothing depends on which thread is first.
#include <cstdint>

#include "backends/cuda_common/workspace.h"
#include "device/queue.h"
#include "ops/moe/moe.h"

namespace tessera::backends::cuda_common {

constexpr int kPositionGroup = 8;

// Some slots of one expert, as many as a tile takes at most.
struct ExpertWork {
  const void* data[3];  // of w1, w3, w2
  float tensor_scales[3];
  int32_t first, count;  // positions
};

// Part of the workspace: what grouping makes.
struct SlotGroups {
  int32_t* counts;  // [segments, num_local] slots of an expert
  int32_t* slots;   // [positions]; -1: none
  int32_t* totals;  // {positions, entries of work}
  ExpertWork* work;
};

// What it makes it of.
struct SlotJob {
  const int32_t* experts;  // [slots]
  const ops::WeightView *w1, *w3, *w2;
  uint16_t* out;  // [slots, hidden]; null: outputs lie elsewhere, and there are none of other ranks' slots
  int64_t hidden, first_expert, num_local, num_slots;
  int32_t work_slots;                  // of an entry of work, at most
  int32_t work_step = kPositionGroup;  // of its tiles' products (entry_cut.h)
};

int64_t most_positions(const ops::MoeExperts::Desc& desc, int64_t num_slots);
int64_t most_work(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots);

void take_slot_groups(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, Workspace& workspace,
                      SlotGroups& groups);

// Groups the slots. Outputs of slots of other ranks' experts are zero, where `out` has them.
void group_slots(const SlotJob& job, const SlotGroups& groups, device::Queue& queue);

// What kernels that group share ----------------------------------------------------------------------------------

constexpr int kSlotWarp = 32;

__device__ inline int32_t round_up_to(int32_t count, int32_t step) {
  return (count + step - 1) / step * step;
}

// Calls take(slot, rank) for the expert's slots in ascending order, by the lanes of a warp; how many there are.
// `experts` are the slots' ids.
template <class Take>
__device__ int32_t for_each_slot(const int32_t* experts, int32_t num_slots, int32_t expert, const Take& take) {
  const int lane = static_cast<int>(threadIdx.x) % kSlotWarp;
  int32_t count = 0;
#pragma unroll 4
  for (int32_t first = 0; first < num_slots; first += kSlotWarp) {
    const int32_t slot = first + lane;
    const bool is_mine = slot < num_slots && experts[slot] == expert;
    const unsigned mine = __ballot_sync(~0u, is_mine);
    if (is_mine) take(slot, count + __popc(mine & ((1u << lane) - 1)));
    count += __popc(mine);
  }
  return count;
}

// By a warp.
__device__ inline void zero_if_foreign(const SlotJob& job, int64_t slot) {
  const int64_t expert = job.experts[slot] - job.first_expert;
  if (job.out == nullptr || (expert >= 0 && expert < job.num_local)) return;
  for (int64_t i = threadIdx.x % kSlotWarp; i < job.hidden; i += kSlotWarp) job.out[slot * job.hidden + i] = 0;
}

__device__ inline ExpertWork work_of(const SlotJob& job, int64_t expert, int32_t first, int32_t count) {
  ExpertWork work;
  const ops::WeightView* const views[3] = {job.w1 + expert, job.w3 + expert, job.w2 + expert};
#pragma unroll
  for (int i = 0; i < 3; ++i) work.data[i] = views[i]->data, work.tensor_scales[i] = views[i]->tensor_scale;
  work.first = first, work.count = count;
  return work;
}

}  // namespace tessera::backends::cuda_common
