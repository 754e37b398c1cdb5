// SPDX-License-Identifier: Apache-2.0
// Datacenter Blackwell: our kernels of one thread block a tile and of pairs (backends/sm100), and the form that reaches
// its products: pairs of thread blocks, 256 rows by 256 tokens, whose clusters share inputs.
#include <algorithm>
#include <cmath>

#include "backends/sm100/sums_plan.h"
#include "backends/sm100/tensor_plan.h"
#include "base/integer_math.h"
#include "bench/plan/families.h"

namespace tessera::bench {

namespace {

using namespace backends::sm100;  // NOLINT: the plans' names
using backends::cuda_common::Nvfp4Product, backends::cuda_common::ScaleAtom;

constexpr int kProductRows = PackedTile::kRows;  // of one multiprocessor
// Instructions of a thread for each sum it stores. Ours are counted in what is compiled (docs/kernels/
// nvfp4_blackwell_tcgen05.md); gate and up are two sums, of which h is made, rounded and quantised.
constexpr double kMapStoreInstructions = 9.3, kDownStoreInstructions = 13, kGatedStoreInstructions = 53.0 / 2;
constexpr double kPackedStoreInstructions = 4;  // of the ideal form: estimated
constexpr double kSumsPortBytes = 512;          // of tensor memory a cycle, not measured

// A stage of 256 columns of `matrices` times 128 rows by `tokens`, one thread block.
Kernel block_kernel(const std::string& name, int64_t matrices, int64_t tiles, int64_t width, int tokens,
                    int64_t ring_stages, double store_instructions) {
  const int padded = round_up<int>(tokens, InputTile::kGroup);
  const auto m = static_cast<double>(matrices);
  Kernel k;
  k.name = name;
  k.tiles = tiles, k.stages = PackedTile::tiles_of_row(width);
  k.product_cycles = m * PackedTile::kProducts * padded / 2.0;
  k.operand_bytes =
      PackedTile::kProducts * (m * (kProductRows + padded) * Nvfp4Product::kBytes + (m + 1) * ScaleAtom::kBytes);
  k.copied_bytes = m * PackedTile::kBytes + InputTile::stage_bytes(padded);
  k.requested_bytes = k.copied_bytes;
  k.ring_stages = ring_stages;
  k.store_cycles = m * padded * std::max(store_instructions, kProductRows * 4 / kSumsPortBytes);
  k.tile_flops = 2.0 * m * static_cast<double>(tiles * width) * kProductRows * padded;
  return k;
}

// Each of the pair has half of the rows of weights and half of the tokens' codes, and all their scales.
Kernel pair_kernel(const std::string& name, int64_t tiles, int64_t width, int tokens, const IdealForm& form) {
  const int padded = std::max(16, static_cast<int>(round_up<int64_t>(tokens, 16)));
  Kernel k;
  k.name = name, k.form = Form::kIdeal;
  k.tiles = tiles, k.stages = PackedTile::tiles_of_row(width);
  k.multiprocessors_of_tile = 2;
  k.product_cycles = PackedTile::kColumns / static_cast<double>(form.product_columns) * padded / 2.0;
  const double token_scales = ceil_div<int64_t>(padded, ScaleAtom::kRows) * ScaleAtom::kBytes * PackedTile::kProducts;
  const double weights = PackedTile::kBytes, codes = padded / 2.0 * PackedTile::kColumns / 2;
  k.operand_bytes = PackedTile::kProducts * (kProductRows + padded / 2.0) * Nvfp4Product::kBytes +
                    PackedTile::kProducts * ScaleAtom::kBytes + token_scales;
  k.copied_bytes = weights + codes + token_scales;
  // Scales of tokens once a pair; tokens once for the pairs of a cluster.
  k.requested_bytes = weights + (codes + token_scales / 2) / static_cast<double>(form.pairs);
  constexpr int64_t kRingBytes = 226 << 10;
  k.ring_stages = std::max<int64_t>(2, kRingBytes / static_cast<int64_t>(k.copied_bytes));
  k.has_whole_waves = true;
  k.store_cycles = padded * kPackedStoreInstructions;
  k.tile_flops = 2.0 * static_cast<double>(tiles * width) * 2 * kProductRows * padded;
  return k;
}

// Of a tile whose sums overlap the other set's, behind its last product: the product's end, the loads of what is
// shared, the pair's arrivals. Estimated of their latencies.
constexpr double kSharedSumsCycles = 600;

// Of gate and up, whose shared sums are stored as they come: all of them but the last load's before the other set
// begins.
constexpr double kSharedGatedCycles =
    kSharedSumsCycles + 2 * (TensorPlan<2, kMostTileTokens>::kSharedColumns - 16) * kGatedStoreInstructions;

// Ours, of one pair a tile or of two: sums are stored as one block's are.
Kernel our_pair_kernel(const std::string& name, int64_t pairs, int64_t tiles, int64_t width, int tokens, bool is_wide) {
  Kernel k = pair_kernel(name, tiles, width, tokens, {.pairs = pairs});
  k.form = Form::kOurs;
  k.multiprocessors_of_tile *= pairs, k.tile_flops *= static_cast<double>(pairs);
  k.ring_stages = is_wide ? SumsPlan<1, kWidePairTileTokens, 2>::kStages : SumsPlan<1, kPairTileTokens, 2>::kStages;
  if (is_wide) k.product_cycles += kSharedSumsCycles / static_cast<double>(k.stages);
  k.store_cycles =
      round_up<int>(tokens, 2 * InputTile::kGroup) * std::max(kMapStoreInstructions, kProductRows * 4 / kSumsPortBytes);
  return k;
}

// Few tokens: every multiprocessor streams an equal share of the weights, whatever rows and columns that is.
Kernel share_kernel(const std::string& name, double values, int tokens, const Target& target) {
  const double tiles = values / (PackedTile::kRows * PackedTile::kColumns);
  Kernel k = block_kernel(name, 1, target.multiprocessors, 1, tokens, SumsPlan<1, kFewTileTokens, 1>::kStages,
                          kMapStoreInstructions);
  k.form = Form::kIdeal;
  k.stages = static_cast<int64_t>(std::ceil(tiles / target.multiprocessors));
  k.memory_bytes = nvfp4_bytes(values);
  return k;
}

}  // namespace

namespace {

std::vector<Kernel> expert_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  const ops::MoeExperts::Desc& e = shape.experts;
  const int32_t slots = expert_tile_slots(e, tokens);
  const bool is_few = slots == kFewTileTokens;
  const ExpertLoad load = expert_load(shape, tokens, slots);
  const int64_t work = load.entries();
  const int tile_tokens = static_cast<int>(std::ceil(load.slots_of_tile));
  const double x_bytes = static_cast<double>(tokens * e.top_k * e.hidden);
  const double gate_up = 2.0 * static_cast<double>(e.hidden * e.inner) * load.touched;
  std::vector<Kernel> kernels = {pass_kernel("group and quantize_x", 2 * x_bytes, nvfp4_bytes(x_bytes), target)};
  kernels.push_back(
      block_kernel("gate_and_up_tcgen05", 2, work * ceil_div<int64_t>(e.inner, kProductRows), e.hidden, tile_tokens,
                   is_few ? SumsPlan<2, kFewTileTokens, 1>::kStages : SumsPlan<2, kMostTileTokens, 1>::kStages,
                   kGatedStoreInstructions));
  kernels.push_back(
      block_kernel("down_tcgen05", 1, work * ceil_div<int64_t>(e.hidden, kProductRows), e.inner, tile_tokens,
                   is_few ? SumsPlan<1, kFewTileTokens, 1>::kStages : SumsPlan<1, kMostTileTokens, 1>::kStages,
                   kDownStoreInstructions));
  if (!is_few) kernels[1].product_cycles += kSharedGatedCycles / static_cast<double>(kernels[1].stages);
  kernels[0].latencies = kGroupLoads;
  for (size_t i = 1; i < kernels.size(); ++i) {
    kernels[i].latencies = kExpertLoads;
    kernels[i].cold_bytes = (i == 1 ? 2.0 : 1.0) * PackedTile::kBytes;
  }
  kernels[1].memory_bytes = nvfp4_bytes(gate_up), kernels[2].memory_bytes = nvfp4_bytes(gate_up / 2);
  kernels[1].flops = shape_flops(shape, tokens) * 2 / 3, kernels[2].flops = shape_flops(shape, tokens) / 3;
  return kernels;
}

}  // namespace

std::vector<Kernel> tensor_memory_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  if (shape.is_experts) return expert_kernels(shape, tokens, target);
  const ops::Linear::Desc& desc = shape.map;
  const int32_t tile_tokens = linear_tile_tokens(desc, tokens, target.multiprocessors);
  const auto values = static_cast<double>(desc.groups * desc.out * desc.in);
  const auto inputs = static_cast<double>(tokens * desc.groups * desc.in);
  const int64_t tiles = linear_tiles(desc, tokens, tile_tokens);
  const int most = static_cast<int>(std::min<int64_t>(tokens, tile_tokens));
  std::vector<Kernel> kernels = {pass_kernel("quantize_inputs", 2 * inputs, nvfp4_bytes(inputs), target)};
  const bool is_wide = tile_tokens == kWidePairTileTokens;
  const auto clusters = static_cast<int64_t>(target.clustered.low) / 4;
  if (is_wide && takes_two_pairs(desc, tokens, target.multiprocessors, clusters)) {
    kernels.push_back(
        our_pair_kernel("linear_tcgen05_two_pairs", 2, two_pair_tiles(desc, tokens), desc.in, most, is_wide));
  } else if (tile_tokens > kMostTileTokens) {
    kernels.push_back(our_pair_kernel("linear_tcgen05_pair", 1, tiles, desc.in, most, is_wide));
  } else {
    kernels.push_back(block_kernel("linear_tcgen05", 1, tiles, desc.in, most,
                                   tile_tokens == kFewTileTokens ? SumsPlan<1, kFewTileTokens, 1>::kStages
                                                                 : SumsPlan<1, kMostTileTokens, 1>::kStages,
                                   kMapStoreInstructions));
  }
  kernels.back().memory_bytes = nvfp4_bytes(values);
  kernels.back().flops = shape_flops(shape, tokens);
  return kernels;
}

std::vector<Kernel> ideal_tensor_memory_kernels(const PlanShape& shape, int64_t tokens, const Target& target,
                                                const IdealForm& form) {
  constexpr int64_t kFew = 64, kPairRows = 2 * kProductRows, kMostTokens = 256;
  const double flops = shape_flops(shape, tokens);
  if (!shape.is_experts) {
    const ops::Linear::Desc& d = shape.map;
    const auto values = static_cast<double>(d.groups * d.out * d.in),
               inputs = static_cast<double>(tokens * d.in * d.groups);
    std::vector<Kernel> kernels = {pass_kernel("quantize", 2 * inputs, nvfp4_bytes(inputs), target)};
    if (tokens <= kFew) {
      kernels.push_back(share_kernel("shares", values, static_cast<int>(tokens), target));
    } else {
      const int64_t tile_tokens = std::min(tokens, kMostTokens);
      const int64_t tiles = d.groups * ceil_div<int64_t>(d.out, kPairRows) * ceil_div<int64_t>(tokens, tile_tokens);
      kernels.push_back(pair_kernel("pairs 256 x 256", tiles, d.in, static_cast<int>(tile_tokens), form));
    }
    kernels.back().memory_bytes = nvfp4_bytes(values), kernels.back().flops = flops;
    return kernels;
  }
  const ops::MoeExperts::Desc& e = shape.experts;
  const double touched = expert_load(shape, tokens, 1).touched;
  const double gate_up = 2.0 * static_cast<double>(e.hidden * e.inner) * touched;
  const auto slots = static_cast<double>(tokens * e.top_k);
  const double x_bytes = slots * static_cast<double>(e.hidden);
  std::vector<Kernel> kernels = {pass_kernel("group and quantize", 2 * x_bytes, nvfp4_bytes(x_bytes), target)};
  const ExpertLoad load = expert_load(shape, tokens, kMostTokens);
  if (load.slots_of_tile <= kFew / 2.0) {
    const int padded = static_cast<int>(std::ceil(load.slots_of_tile));
    kernels.push_back(share_kernel("gate and up, shares", gate_up, padded, target));
    kernels.push_back(share_kernel("down, shares", gate_up / 2, padded, target));
  } else {
    const int64_t work = load.entries();
    const int tile_tokens = static_cast<int>(std::ceil(load.slots_of_tile));
    kernels.push_back(pair_kernel("gate and up, pairs", work * ceil_div<int64_t>(2 * e.inner, kPairRows), e.hidden,
                                  tile_tokens, form));
    kernels.push_back(
        pair_kernel("down, pairs", work * ceil_div<int64_t>(e.hidden, kPairRows), e.inner, tile_tokens, form));
  }
  kernels[1].memory_bytes = nvfp4_bytes(gate_up), kernels[2].memory_bytes = nvfp4_bytes(gate_up / 2);
  kernels[1].flops = flops * 2 / 3, kernels[2].flops = flops / 3;
  return kernels;
}

}  // namespace tessera::bench
