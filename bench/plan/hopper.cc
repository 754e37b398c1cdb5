// SPDX-License-Identifier: Apache-2.0
// Hopper's kernels (backends/sm90, and the portable one's of few tokens), as a cost of stages.
#include <algorithm>
#include <cmath>

#include "backends/sm90/sum_plans.h"
#include "bench/plan/families.h"

namespace tessera::bench {

namespace {

using namespace backends::sm90;  // NOLINT: the plans' names
using backends::cuda_common::PackedNvfp4;

// Cycles of a multiprocessor for a wgmma m64nNk16, measured (bench/results/2026-11-22-h200-hopper.json, prototypes).
double product_cycles(int tokens) {
  return std::max(13.2, 0.502 * tokens);
}
// A consumer's chain of 32 columns (decode, products, wait), whatever the tokens: a quarter of what 128 columns take at
// 32 tokens, at the H200's clock (sum_plans.h; docs/performance/hopper.md).
double step_cycles(ops::WeightFormat format) {
  constexpr double kCyclesPerUs = 1830;
  return wide_tiles(format).front().block_us / 4 * kCyclesPerUs;
}
// Instructions of a warp for 16 rows by 128 columns by 8 tokens (docs/performance/hopper.md).
constexpr double kFewInstructions = 130;
// About 20 for each pair of sums that a lane stores.
constexpr double kStoreInstructions = 20;

// A tile of `width` columns by tile_tokens, of which `tokens` are there.
template <ops::WeightFormat kFormat>
Kernel wide_kernel(const std::string& name, int64_t tiles, int64_t width, double tokens) {
  using WidePlan = WidePlanOf<kFormat>;
  const int padded = static_cast<int>(ceil_div<int64_t>(static_cast<int64_t>(std::ceil(tokens)), 8) * 8);
  const int product_tokens = WidePlan::product_tokens(padded);
  constexpr int kProducts = WidePlan::kInputColumns / 16, kGroups = WidePlan::kTileRows / 64;
  Kernel k;
  k.name = name;
  k.tiles = tiles, k.stages = width / WidePlan::kInputColumns;
  k.product_cycles = kProducts * kGroups * product_cycles(product_tokens);
  k.issue_cycles = WidePlan::kInputColumns / 32 * step_cycles(kFormat);
  const double weights = weight_bytes(kFormat, WidePlan::kTileRows * WidePlan::kInputColumns);
  k.operand_bytes = kGroups * product_tokens * WidePlan::kInputColumns * 2.0 + weights;  // B for each warpgroup
  k.copied_bytes = padded * WidePlan::kInputColumns * 2.0 + weights;
  k.requested_bytes = k.copied_bytes;
  k.ring_stages = WidePlan::kInputStages;
  constexpr int kWarpsOfScheduler = WidePlan::kConsumerWarps / 4;
  k.end_cycles = product_tokens / 4.0 * kStoreInstructions * kWarpsOfScheduler + 4 * step_cycles(kFormat);
  k.tile_flops = 2.0 * static_cast<double>(tiles * width) * WidePlan::kTileRows * product_tokens;
  return k;
}

Kernel wide_kernel(ops::WeightFormat format, const std::string& name, int64_t tiles, int64_t width, double tokens) {
  switch (format) {
    case ops::WeightFormat::kFp8Block:
      return wide_kernel<ops::WeightFormat::kFp8Block>(name, tiles, width, tokens);
    case ops::WeightFormat::kBf16:
      return wide_kernel<ops::WeightFormat::kBf16>(name, tiles, width, tokens);
    case ops::WeightFormat::kNvfp4:
    case ops::WeightFormat::kF32:  // has none
      break;
  }
  return wide_kernel<ops::WeightFormat::kNvfp4>(name, tiles, width, tokens);
}

// Tiles of 8 slots by 64 rows, a team each.
Kernel few_kernel(const std::string& name, double work, int64_t rows, int64_t tile_rows, int64_t width) {
  Kernel k;
  k.name = name;
  k.tiles = static_cast<int64_t>(std::lround(work)) * ceil_div<int64_t>(rows, tile_rows);
  k.tiles_at_once = FewPlan::kTeams;
  k.stages = width / PackedNvfp4::kColumns;
  k.issue_cycles = PackedNvfp4::kBlocks * kFewInstructions;
  k.copied_bytes = FewPlan::kSlots * PackedNvfp4::kBytes + FewPlan::kTokens * PackedNvfp4::kColumns * 2.0;
  k.operand_bytes = k.copied_bytes + (FewPlan::kSlots - 1) * FewPlan::kTokens * PackedNvfp4::kColumns * 2.0;
  k.requested_bytes = k.copied_bytes;
  k.ring_stages = FewPlan::kStages;
  return k;
}

std::vector<Kernel> map_kernels(const ops::Linear::Desc& desc, int64_t tokens, const Target& target) {
  const LinearChoice choice = linear_choice(desc, tokens, target.multiprocessors);
  if (choice.kernels == LinearKernels::kChunks) return {};  // not described
  const int32_t tile_tokens = choice.tile_tokens;
  const auto values = static_cast<double>(desc.groups * desc.out * desc.in);
  std::vector<Kernel> kernels;
  if (tile_tokens == 0) {
    if (tokens > kMostStreamTokens) return {};  // the portable kernel of more, which this model does not describe
    kernels.push_back(stream_kernel("cuda linear_stream", desc.format, values, target));
  } else {
    const double bytes = 2.0 * static_cast<double>(tokens * desc.groups * desc.in);
    kernels.push_back(pass_kernel("arrange_inputs", bytes, bytes, target));
    const int64_t token_tiles = ceil_div<int64_t>(tokens, tile_tokens);
    const int64_t tiles = desc.groups * ceil_div<int64_t>(desc.out, WidePlan::kTileRows) * token_tiles;
    kernels.push_back(wide_kernel(desc.format, "linear_wide", tiles, desc.in,
                                  static_cast<double>(tokens) / static_cast<double>(token_tiles)));
    kernels.back().memory_bytes = weight_bytes(desc.format, values);
  }
  return kernels;
}

std::vector<Kernel> expert_kernel_list(const PlanShape& shape, int64_t tokens, const Target& target) {
  const ops::MoeExperts::Desc& e = shape.experts;
  const double touched = expert_load(shape, tokens, 1).touched;
  const double gate_up = 2.0 * static_cast<double>(e.hidden * e.inner), down = gate_up / 2;
  const double slot_bytes = 2.0 * static_cast<double>(tokens * e.top_k * e.hidden);
  std::vector<Kernel> kernels;
  switch (expert_kernels(e, tokens, target.multiprocessors)) {
    case ExpertKernels::kPortable:
      return portable_kernels(shape, tokens, target);
    case ExpertKernels::kFew: {
      const double work = expert_load(shape, tokens, FewPlan::kTokens).tiles;
      kernels = {pass_kernel("group_few_slots", slot_bytes, slot_bytes, target),
                 few_kernel("gate_and_up", work, e.inner, FewPlan::kTileRows / 2, e.hidden),
                 few_kernel("down", work, e.hidden, FewPlan::kTileRows, e.inner)};
      break;
    }
    case ExpertKernels::kWide: {
      const ExpertLoad load = expert_load(shape, tokens, WidePlan::kTokens);
      const auto work = static_cast<int64_t>(std::lround(load.tiles));
      kernels = {pass_kernel("group_many_slots", slot_bytes, slot_bytes, target),
                 wide_kernel(e.format, "gate_and_up", work * ceil_div<int64_t>(e.inner, WidePlan::kTileRows / 2),
                             e.hidden, load.slots_of_tile),
                 wide_kernel(e.format, "down", work * ceil_div<int64_t>(e.hidden, WidePlan::kTileRows), e.inner,
                             load.slots_of_tile)};
      break;
    }
  }
  kernels[1].memory_bytes = nvfp4_bytes(gate_up * touched), kernels[2].memory_bytes = nvfp4_bytes(down * touched);
  const double flops = shape_flops(shape, tokens);
  kernels[1].flops = flops * 2 / 3, kernels[2].flops = flops / 3;
  return kernels;
}

}  // namespace

std::vector<Kernel> hopper_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  if (shape.is_experts) return expert_kernel_list(shape, tokens, target);
  std::vector<Kernel> kernels = map_kernels(shape.map, tokens, target);
  if (!kernels.empty()) kernels.back().flops = shape_flops(shape, tokens);
  return kernels;
}

}  // namespace tessera::bench
