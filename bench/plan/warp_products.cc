// SPDX-License-Identifier: Apache-2.0
// RTX PRO 6000, GB10 (backends/sm120), as a cost of stages.
#include <algorithm>
#include <cmath>

#include "backends/sm120/sum_plans.h"
#include "bench/plan/families.h"

namespace tessera::bench {

namespace {

using namespace backends::sm120;  // NOLINT: the plans' names

constexpr double kProductCycles = 4;       // of a multiprocessor: 16,384 FLOP at 4,096 a cycle
constexpr double kStoreInstructions = 12;  // for each sum of a lane, estimated

Kernel wide_kernel(const std::string& name, int64_t tiles, int64_t width, double tokens) {
  const int padded = static_cast<int>(round_up<int64_t>(static_cast<int64_t>(std::ceil(tokens)), InputUnit::kRows));
  constexpr int kQuarterTokens = WidePlan::kWarpUnits * InputUnit::kRows;
  const int64_t quarters =
      std::min<int64_t>(WidePlan::kTokens / kQuarterTokens, ceil_div<int64_t>(padded, kQuarterTokens));
  const int64_t warps = quarters * (WidePlan::kRows / (WidePlan::kWarpUnits * WeightUnit::kRows));
  Kernel k;
  k.name = name;
  k.tiles = tiles, k.stages = units_of_row(width);
  k.product_cycles = static_cast<double>(warps) * WidePlan::kWarpUnits * WidePlan::kWarpUnits * kSteps * kProductCycles;
  k.operand_bytes = static_cast<double>(warps) * WidePlan::kWarpUnits * (WeightUnit::kBytes + InputUnit::kBytes);
  k.copied_bytes = WidePlan::kWeightUnits * WeightUnit::kBytes + padded / InputUnit::kRows * InputUnit::kBytes;
  k.requested_bytes = k.copied_bytes;
  k.ring_stages = WidePlan::kStages;
  constexpr int kWarpsOfScheduler = WidePlan::kConsumers / 4;
  k.end_cycles = WidePlan::kWarpUnits * WidePlan::kWarpUnits * 4 * kStoreInstructions * kWarpsOfScheduler;
  k.tile_flops =
      2.0 * static_cast<double>(tiles * width) * WidePlan::kRows * static_cast<double>(quarters * kQuarterTokens);
  return k;
}

// Warps take units by turns, one ahead, into registers; two blocks a multiprocessor.
Kernel few_kernel(const std::string& name, int64_t matrices, int64_t work, int64_t rows, int64_t width) {
  Kernel k;
  k.name = name;
  k.tiles = work * ceil_div<int64_t>(rows, WeightUnit::kRows);
  k.tiles_at_once = 2;
  k.stages = ceil_div<int64_t>(units_of_row(width), FewPlan::kWarps);
  k.copied_bytes = static_cast<double>(matrices) * FewPlan::kWarps * WeightUnit::kBytes;
  k.requested_bytes = k.copied_bytes + FewPlan::kWarps * InputUnit::kBytes;
  k.ring_stages = 1;
  k.is_bulk = false;
  return k;
}

}  // namespace

std::vector<Kernel> warp_product_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  const double flops = shape_flops(shape, tokens);
  if (!shape.is_experts) {
    const ops::Linear::Desc& d = shape.map;
    const auto inputs = static_cast<double>(tokens * d.groups * d.in);
    const int64_t tile_tokens = linear_tile_tokens(d, tokens, target.multiprocessors);
    const int64_t work = d.groups * ceil_div<int64_t>(tokens, tile_tokens);
    std::vector<Kernel> kernels = {pass_kernel("arrange_inputs", 2 * inputs, nvfp4_bytes(inputs), target)};
    kernels.push_back(tile_tokens == WidePlan::kTokens
                          ? wide_kernel("linear_wide", work * ceil_div<int64_t>(d.out, WidePlan::kRows), d.in,
                                        static_cast<double>(std::min<int64_t>(tokens, tile_tokens)))
                          : few_kernel("linear_few", 1, work, d.out, d.in));
    kernels.back().memory_bytes = shape_weight_bytes(shape, tokens), kernels.back().flops = flops;
    return kernels;
  }
  const ops::MoeExperts::Desc& e = shape.experts;
  const int32_t tile_slots = expert_tile_slots(e, tokens);
  const ExpertLoad load = expert_load(shape, tokens, tile_slots);
  const int64_t work = load.entries();
  const auto slots = static_cast<double>(tokens * e.top_k);
  const double x = slots * static_cast<double>(e.hidden), h = slots * static_cast<double>(e.inner);
  const bool is_wide = tile_slots == WidePlan::kTokens;
  std::vector<Kernel> kernels = {pass_kernel("group slots", 0, 0, target),
                                 pass_kernel("arrange_inputs", 2 * x, nvfp4_bytes(x), target)};
  kernels.push_back(is_wide ? wide_kernel("gate_and_up", work * ceil_div<int64_t>(e.inner, WidePlan::kRows / 2),
                                          e.hidden, load.slots_of_tile)
                            : few_kernel("gate_and_up", 2, work, e.inner, e.hidden));
  kernels.push_back(pass_kernel("arrange_h", 2 * h, nvfp4_bytes(h), target));
  kernels.push_back(
      is_wide ? wide_kernel("down", work * ceil_div<int64_t>(e.hidden, WidePlan::kRows), e.inner, load.slots_of_tile)
              : few_kernel("down", 1, work, e.hidden, e.inner));
  kernels[0].latencies = kGroupLoads, kernels[2].latencies = kernels[4].latencies = kExpertLoads;
  const double bytes = shape_weight_bytes(shape, tokens);
  kernels[2].memory_bytes = bytes * 2 / 3, kernels[4].memory_bytes = bytes / 3;
  kernels[2].flops = flops * 2 / 3, kernels[4].flops = flops / 3;
  return kernels;
}

}  // namespace tessera::bench
