// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles, stages and choices of scaled_sums.cuh: plain numbers, for the kernels, their launches and predictions of their
// time (bench/plan).
#include <cstdint>

#include "backends/sm120/scaled_units.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"

namespace tessera::backends::sm120 {

struct FewPlan {
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kMostTiles = 4;  // of 8 tokens
  static constexpr int64_t kMostTokens = kMostTiles * InputUnit::kRows;
};

struct WidePlan {
  static constexpr int kRows = 128, kTokens = 128, kStages = 2;
  // A warpgroup's warps have as many registers each, so the one that copies has three idle ones beside it.
  static constexpr int kConsumers = 8, kThreads = (kConsumers + 4) * 32;
  static constexpr int kWeightUnits = kRows / WeightUnit::kRows, kInputUnits = kTokens / InputUnit::kRows;
  static constexpr int kWarpUnits = 4;  // of both operands: 64 rows by 32 tokens
  // 256 columns.
  static constexpr int kStageBytes = kWeightUnits * WeightUnit::kBytes + kInputUnits * InputUnit::kBytes;
};

// Tokens of a tile. Too few wide tiles leave multiprocessors idle; the others' weights come from L2 after the first
// time.
inline int64_t linear_tile_tokens(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  const int64_t wide_tiles =
      desc.groups * ceil_div<int64_t>(num_tokens, WidePlan::kTokens) * ceil_div<int64_t>(desc.out, WidePlan::kRows);
  if (num_tokens > FewPlan::kMostTokens && 2 * wide_tiles >= multiprocessors) return WidePlan::kTokens;
  return num_tokens <= InputUnit::kRows ? InputUnit::kRows : FewPlan::kMostTokens;
}

// Slots of a tile, by how many an expert has on average, here or on another rank.
inline int32_t expert_tile_slots(const ops::MoeExperts::Desc& desc, int64_t num_tokens) {
  constexpr int64_t kOneTile = 6, kSomeTiles = 24;
  const int64_t num_slots = num_tokens * desc.top_k;
  if (num_slots > kSomeTiles * desc.all_experts()) return WidePlan::kTokens;
  return (num_slots > kOneTile * desc.all_experts() ? FewPlan::kMostTiles : 1) * InputUnit::kRows;
}

}  // namespace tessera::backends::sm120
