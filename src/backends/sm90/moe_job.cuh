// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernels of moe_experts share. A slot is a token and one of its experts. Slots are grouped by expert, tokens
// ascending; a slot's place then is its position, and each expert's positions begin at a multiple of 8.
#include <cstdint>

#include "backends/cuda_common/fast_division.cuh"
#include "device/queue.h"
#include "ops/moe/moe.h"

namespace tessera::backends::sm90 {

constexpr int kPositionGroup = 8;

// Some slots of one expert, as many as a tile takes at most.
struct ExpertWork {
  const void* data[3];  // of w1, w3, w2
  float tensor_scales[3];
  int32_t first, count;  // positions
};

// The workspace.
struct MoeScratch {
  char *x, *h;      // arranged (arranged_inputs.cuh): [positions, hidden], [positions, inner]
  int32_t* counts;  // [num_local] slots of an expert
  int32_t* slots;   // [positions]; -1: none
  int32_t* totals;  // {positions, entries of work}
  ExpertWork* work;
};

struct MoeJob {
  MoeScratch scratch;
  const int32_t* experts;  // [slots]
  const float* routing;    // [slots]
  const ops::WeightView *w1, *w3, *w2;
  const uint16_t* x;  // [tokens, hidden]
  uint16_t* out;      // [slots, hidden]
  int64_t hidden, inner, first_expert, num_local, num_slots;
  int32_t work_slots;  // of an entry of work, at most
  float limit;
  cuda_common::FastDivisor token_of;  // of a slot
};

// Bytes of the workspace for num_slots slots; fills `scratch` where `base` is not null. Entries of work are for tiles
// of `work_slots` slots.
int64_t layout_moe_scratch(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots, char* base,
                           MoeScratch& scratch);
int64_t most_positions(const ops::MoeExperts::Desc& desc, int64_t num_slots);
int64_t most_work(const ops::MoeExperts::Desc& desc, int64_t num_slots, int32_t work_slots);

// Group the slots and arrange their inputs, for tiles of wide_sums.cuh; and for those of few_sums.cuh, in one kernel,
// for at most kMostFewSlots. Slots of experts of other ranks are zero.
void group_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue);
constexpr int64_t kMostFewSlots = 1024;
void group_few_slots(const ops::MoeExperts::Desc& desc, const MoeJob& job, device::Queue& queue);

}  // namespace tessera::backends::sm90
