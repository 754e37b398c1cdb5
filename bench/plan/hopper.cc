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

constexpr double kCyclesPerUs = 1'830;
// Loads that depend on each other: of inputs and what is written of them; of a tile's weights, then of its inputs.
constexpr int64_t kMapLoads = 2;

// Cycles of a multiprocessor for a wgmma m64nNk16, measured (bench/results/2026-11-22-h200-hopper.json, prototypes).
double product_cycles(int tokens) {
  return std::max(13.2, 0.502 * tokens);
}
// FP8 is taken to be the official checkpoints', with UE8M0 scales, which fold unless they are extreme; Base releases'
// do not, and take longer.
constexpr bool kScalesFold = true;
// A stage of 128 columns, us. Of NVFP4 where neither copies nor products bound it: what tiles of 32 tokens take at
// most. Of BF16 all of it, copies too: a line through wo_b's rows
// (bench/results/2026-11-23-h200-many-tokens.json); of FP8 through a prototype's
// (bench/results/2026-11-28-h200-x2-folded-scales.json, "tiles_of_few").
double stage_us(ops::WeightFormat format, int product_tokens) {
  if (format == ops::WeightFormat::kFp8Block) return 0.27 + 0.0037 * product_tokens;
  if (format == ops::WeightFormat::kBf16) return 0.39 + 0.0034 * product_tokens;
  return 0.35;
}
// What NVFP4's weights cost a copy more than their bytes: eight of 1,152 a stage. Set by Flash's wq_b and wo_b.
constexpr double kWeightCopies = 1.35;
// Cycles of a scheduler for a warp's 16 rows by 512 columns in few_experts: set by Flash's experts at 4 and 16 tokens
// (bench/results/2026-11-26-h200-few-experts.json). Its pipes one after another, by their instructions as compiled, are
// 1,030: 250 of logic, shifts and permutes and 74 IMAD at two cycles each, 144 HMUL2 at one, 32 products at 6.2
// (measured: 650 of 989 TFLOP/s), 25 loads at two. And for a tile: what stands behind its last chunk.
constexpr double kFewCycles = 940, kFewGatedEnd = 600, kFewDownEnd = 360;
// Chunks' time, 2 us, from an expert's last tile of gate and up to its first of down. Set by half and quarter experts
// of 3 to 10 tokens (2026-11-26-h200-few-tiles.json).
constexpr int64_t kFewWait = 1;
// Cycles of a scheduler for a unit in unit_ring.cuh, whose warps copy nothing: of tiles of one token, whose sums of a
// chunk are 16, and of up to eight; and for each token, as in a stream. Set by Flash's experts at one token
// (bench/results/2026-11-24-h200-one-token.json), and by whole ones at two tokens, halves at two and quarters at four
// (2026-11-26-h200-few-tiles.json: 62.7, 38.8 and 40.6 us).
constexpr double kRingCycles = 930, kRingCyclesOfEight = 1'250, kRingCyclesOfToken = 64;
// The same of FP8, whose codes decode in few instructions; and of maps what experts' units have in them: barriers, sums
// of rounds, the wait for inputs. Set by maps of one token (bench/results/2026-11-29-h200-targets.json, in a chain:
// shared w1, wq_b and wo_b) and by what ring_maps adds to a step (2026-11-29-h200-two-formats.json).
constexpr double kRingFp8Cycles = 300, kRingMapEnd = 1'280;
// Weights of `down` that gate and up bring into the L2 cache (prefetch_down in sm90/ring_experts.cu).
constexpr double kMostPrefetched = 24 << 20;
// Of a tile: its first stages' way and its end, and for each token of its products stores of 128 rows. Set by Flash's
// wq_b and wo_b.
constexpr double kTileCycles = 2'450, kEndCyclesOfToken = 7.3;

// A tile of `width` columns by so many tokens, with what pads them to eights.
template <ops::WeightFormat kFormat>
Kernel wide_kernel(const std::string& name, int64_t tiles, int64_t width, double tokens) {
  using WidePlan = WidePlanOf<kFormat, kFormat == ops::WeightFormat::kFp8Block && kScalesFold>;
  const int product_tokens = WidePlan::product_tokens(static_cast<int>(std::ceil(tokens)));
  constexpr int kProducts = WidePlan::kInputColumns / 16, kGroups = WidePlan::kTileRows / 64;
  Kernel k;
  k.name = name;
  k.tiles = tiles, k.stages = width / WidePlan::kInputColumns;
  k.product_cycles = kProducts * kGroups * product_cycles(product_tokens);
  k.issue_cycles = stage_us(kFormat, product_tokens) * kCyclesPerUs;
  const double weights = weight_bytes(kFormat, WidePlan::kTileRows * WidePlan::kInputColumns);
  k.operand_bytes = kGroups * product_tokens * WidePlan::kInputColumns * 2.0 + weights;  // B for each warpgroup
  k.copied_bytes = tokens * WidePlan::kInputColumns * 2.0 + weights;
  if (kFormat == ops::WeightFormat::kNvfp4) k.requested_bytes = k.copied_bytes + (kWeightCopies - 1) * weights;
  k.ring_stages = WidePlan::kInputStages;
  k.has_whole_waves = true;
  k.end_cycles = kTileCycles + product_tokens * kEndCyclesOfToken;
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

// Tiles of both maps, up to 8 slots by 64 rows, a team each; copies of the inputs of slots that are there. Teams take
// tiles as they come, so what counts are chunks of 512 columns, whichever tile's.
Kernel few_kernel(const ops::MoeExperts::Desc& e, const ExpertLoad& load, const Target& target) {
  constexpr double kInputBytes = PackedNvfp4::kColumns * 2.0;
  const int64_t entries = load.entries();
  const int64_t gated = entries * ceil_div<int64_t>(e.inner, FewPlan::kTileRows / 2);
  const int64_t down = entries * ceil_div<int64_t>(e.hidden, FewPlan::kTileRows);
  Kernel k;
  k.name = "few_experts";
  // Chunks. Short ones count as whole: they gave six tenths of what counting their blocks had predicted
  // (docs/performance/several_gpus.md, "A row's last unit").
  k.tiles = (gated * e.hidden + down * padded_inner(e)) / PackedNvfp4::kColumns;
  k.tiles_at_once = FewPlan::kTeams;
  // Down of the last experts waits for the last round of gate and up, however few tiles that has, and then for h. How
  // many experts there are is chance: the mean of one less, of those expected and of one more.
  const int64_t teams = FewPlan::kTeams * target.multiprocessors;
  double rounds = 0;
  for (const int64_t more : {-1, 0, 1}) {
    rounds += static_cast<double>(ceil_div((entries + more) * gated / entries, teams)) / 3;
  }
  const double least = rounds * static_cast<double>(ring_chunks(e.hidden)) +
                       static_cast<double>(ring_chunks(padded_inner(e)) + kFewWait);
  const double ends = static_cast<double>(gated) * kFewGatedEnd + static_cast<double>(down) * kFewDownEnd;
  k.issue_cycles = kFewCycles + ends / static_cast<double>(std::max<int64_t>(k.tiles, 1));
  k.copied_bytes = FewPlan::kSlots * PackedNvfp4::kBytes + load.slots_of_tile * kInputBytes;
  k.operand_bytes = FewPlan::kSlots * (PackedNvfp4::kBytes + FewPlan::kTokens * kInputBytes);
  // As many chunks as would take as long, with the bytes of those that there are.
  const auto chunks = static_cast<double>(k.tiles);
  k.tiles = std::max({k.tiles, static_cast<int64_t>(least) * teams, int64_t{1}});
  k.requested_bytes = k.copied_bytes * chunks / static_cast<double>(k.tiles);
  k.ring_stages = FewPlan::kStages;
  k.drain_cycles = FewPlan::kTeams * kFewCycles;
  k.latencies = kExpertLoads;
  k.is_bulk = false;  // more than copies alone were measured with: 98 % of what reads reach
  return k;
}

// A launch of unit_ring.cuh. Blocks have neighbouring tiles, of which the fullest has one more than others may have;
// their units go to 16 warps by turns. Multiplying begins when each warp has its first unit. early_tiles of the tiles
// are dealt out for themselves and worked out while the kernel before runs.
Kernel ring_kernel(ops::WeightFormat format, const std::string& name, int64_t row_tiles, int64_t early_tiles,
                   int64_t width, int passes, double tokens, int64_t latencies, const Target& target) {
  constexpr int64_t kSchedulers = 4, kWarps = RingPlan<1>::kWarps;
  const int64_t tile_units = ring_chunks(width) * passes;
  const int64_t blocks = std::clamp<int64_t>(row_tiles, 1, target.multiprocessors);
  const int64_t block_units = ceil_div(row_tiles - early_tiles, blocks) * tile_units;
  int64_t units = 0;  // of the fullest scheduler
  for (int64_t warp = 0; warp < kWarps; warp += kSchedulers) {
    units += ceil_div(std::max<int64_t>(block_units - warp, 0), kWarps);
  }
  const double of_eight = tokens > 1 ? kRingCyclesOfEight - kRingCycles : 0;
  const double cycles = (format == ops::WeightFormat::kFp8Block ? kRingFp8Cycles : kRingCycles) + of_eight +
                        kRingCyclesOfToken * std::ceil(tokens);
  Kernel k;
  k.name = name;
  k.tiles = target.multiprocessors;
  k.issue_cycles = static_cast<double>(units) * cycles;
  k.memory_bytes = weight_bytes(format, static_cast<double>(row_tiles * PackedNvfp4::kRows * width * passes));
  k.first_bytes = weight_bytes(
      format, static_cast<double>(blocks * std::min(block_units, kWarps) * PackedNvfp4::kRows * PackedNvfp4::kColumns));
  k.drain_cycles = static_cast<double>(kWarps / kSchedulers) * cycles;
  k.latencies = latencies;
  k.requested_bytes = k.memory_bytes / target.multiprocessors;
  return k;
}

std::vector<Kernel> ring_expert_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  const ops::MoeExperts::Desc& e = shape.experts;
  const ExpertLoad load = expert_load(shape, tokens, tokens == 1 ? 1 : FewPlan::kTokens);
  const int64_t entries = load.entries() + (shape.shared ? 1 : 0);
  const double slots = tokens == 1 ? 1 : std::max(load.slots_of_tile, 1 + 1e-3);  // tiles of eight
  const auto kernel = [&](const char* name, int64_t rows, int64_t width, int passes) {
    const int64_t row_tiles = ceil_div<int64_t>(rows, PackedNvfp4::kRows);
    const int64_t early_tiles = shape.shared && passes > 1 ? row_tiles : 0;  // gate and up of the shared expert
    Kernel k =
        ring_kernel(e.format, name, entries * row_tiles, early_tiles, width, passes, slots, kExpertLoads, target);
    // The shared expert's may be FP8: as many units, which take as long.
    const auto values = static_cast<double>(rows * width * passes);
    const double more_bytes = shape.shared ? weight_bytes(*shape.shared, values) - weight_bytes(e.format, values) : 0;
    k.memory_bytes += more_bytes, k.first_bytes += more_bytes;  // it comes first
    k.requested_bytes += more_bytes / target.multiprocessors;
    return k;
  };
  std::vector<Kernel> kernels = {
      kernel(shape.shared ? "all_gate_and_up_ring" : "gate_and_up_ring", e.inner, e.hidden, 2),
      kernel(shape.shared ? "all_down_ring" : "down_ring", e.hidden, e.inner, 1)};
  const double flops =
      shape_flops(shape, tokens) + (shape.shared ? 6.0 * static_cast<double>(tokens * e.hidden * e.inner) : 0);
  kernels[0].flops = flops * 2 / 3, kernels[1].flops = flops / 3;
  // Down lists its experts before it waits, and finds their weights in L2: it adds 7.1 to 7.7 us to a step of a rank,
  // where two latencies more would make it 8.6 to 9.6 (2026-11-29-h200-two-formats.json).
  if (load.touched * nvfp4_bytes(static_cast<double>(e.hidden * e.inner)) <= kMostPrefetched) kernels[1].latencies = 0;
  return kernels;
}

std::vector<Kernel> map_kernels(const ops::Linear::Desc& desc, int64_t tokens, const Target& target) {
  const LinearChoice choice = linear_choice(desc, tokens, target.multiprocessors, kScalesFold);
  if (choice.kernels == LinearKernels::kChunks) return {};  // not described
  const int32_t tile_tokens = choice.tile_tokens;
  const auto values = static_cast<double>(desc.groups * desc.out * desc.in);
  std::vector<Kernel> kernels;
  if (tile_tokens == 0) {
    if (tokens > kMostStreamTokens) return {};  // the portable kernel of more, which this model does not describe
    kernels.push_back(few_tokens_kernel({&desc, 1}, stream_of(desc, tokens), tokens, target));
  } else {
    const double bytes = 2.0 * static_cast<double>(tokens * desc.groups * desc.in);
    kernels.push_back(pass_kernel("arrange_inputs", bytes, bytes, target));
    const int64_t token_tiles = ceil_div<int64_t>(tokens, tile_tokens);
    const int64_t tiles = desc.groups * ceil_div<int64_t>(desc.out, WidePlan::kTileRows) * token_tiles;
    // Tiles are full but for the last; one wave waits for a full one.
    const bool is_one_wave = tiles <= target.multiprocessors;
    const int64_t most = std::min<int64_t>(tokens, tile_tokens);
    const auto padded = static_cast<double>(round_up<int64_t>(is_one_wave ? most : ceil_div(tokens, token_tiles), 8));
    kernels.push_back(wide_kernel(desc.format, "linear_wide", tiles, desc.in, padded));
    kernels.back().memory_bytes = weight_bytes(desc.format, values);
    for (Kernel& kernel : kernels) kernel.latencies = kMapLoads;
  }
  return kernels;
}

std::vector<Kernel> expert_kernel_list(const PlanShape& shape, int64_t tokens, const Target& target) {
  const ops::MoeExperts::Desc& e = shape.experts;
  const double touched = expert_load(shape, tokens, 1).touched;
  const double gate_up = 2.0 * static_cast<double>(e.hidden * e.inner);
  // A row's last unit has the columns that are there, and scales for all of its own.
  const auto down_bytes = static_cast<double>(ceil_div<int64_t>(e.hidden, PackedNvfp4::kRows)) *
                          static_cast<double>(PackedNvfp4::row_bytes(e.inner)) * touched;
  const double slot_bytes = 2.0 * static_cast<double>(tokens * e.top_k * e.hidden);
  std::vector<Kernel> kernels;
  switch (expert_kernels(e, tokens, target.multiprocessors)) {
    case ExpertKernels::kPortable:
      if (uses_ring(e, tokens, target.multiprocessors)) return ring_expert_kernels(shape, tokens, target);
      return portable_kernels(shape, tokens, target);
    case ExpertKernels::kFew: {
      const ExpertLoad load = expert_load(shape, tokens, FewPlan::kTokens);
      kernels = {pass_kernel("group_few_slots", slot_bytes, slot_bytes, target), few_kernel(e, load, target)};
      kernels[0].latencies = kGroupLoads;
      kernels[1].memory_bytes = nvfp4_bytes(gate_up * touched) + down_bytes;
      kernels[1].flops = shape_flops(shape, tokens);
      return kernels;
    }
    case ExpertKernels::kWide: {
      constexpr double kMeanPadding = 3.5;  // to a multiple of eight
      const ExpertLoad load = expert_load(shape, tokens, WidePlan::kTokens);
      const int64_t work = load.entries();
      const double padded = load.slots_of_tile + kMeanPadding;
      kernels = {pass_kernel("group_many_slots", slot_bytes, slot_bytes, target),
                 wide_kernel(e.format, "gate_and_up", work * ceil_div<int64_t>(e.inner, WidePlan::kTileRows / 2),
                             e.hidden, padded),
                 wide_kernel(e.format, "down", work * ceil_div<int64_t>(e.hidden, WidePlan::kTileRows), padded_inner(e),
                             padded)};
      for (size_t i = 1; i < kernels.size(); ++i) {
        kernels[i].cold_bytes = weight_bytes(e.format, WidePlan::kTileRows * WidePlan::kInputColumns);
        kernels[i].latencies = kExpertLoads;
      }
      break;
    }
  }
  kernels[1].memory_bytes = nvfp4_bytes(gate_up * touched), kernels[2].memory_bytes = down_bytes;
  const double flops = shape_flops(shape, tokens);
  kernels[1].flops = flops * 2 / 3, kernels[2].flops = flops / 3;
  return kernels;
}

}  // namespace

Kernel few_tokens_kernel(std::span<const ops::Linear::Desc> maps, const StreamWork& work, int64_t tokens,
                         const Target& target) {
  if (target.family == Family::kHopper && uses_ring(maps, 1, kScalesFold, tokens, target.multiprocessors)) {
    Kernel k =
        ring_kernel(work.format, "linear_ring", work.tiles, 0, work.width, 1, static_cast<double>(tokens), 0, target);
    k.end_cycles = kRingMapEnd;
    return k;
  }
  return stream_kernel("cuda linear_stream", work, target);
}

bool are_launched_together(const PlanShape& experts, int64_t tokens, const Target& target) {
  const ops::MoeExperts::Desc& e = experts.experts;
  const bool is_taken = experts.shared == ops::WeightFormat::kNvfp4 || experts.shared == ops::WeightFormat::kFp8Block;
  if (target.family != Family::kHopper || e.format != ops::WeightFormat::kNvfp4 || !is_taken) return false;
  const ops::AllExperts::Desc all{.routed = e, .down = {.format = *experts.shared}};
  return uses_ring(all, kScalesFold, tokens, target.multiprocessors);
}

std::vector<Kernel> hopper_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  if (shape.is_experts) return expert_kernel_list(shape, tokens, target);
  std::vector<Kernel> kernels = map_kernels(shape.map, tokens, target);
  if (!kernels.empty()) kernels.back().flops = shape_flops(shape, tokens);
  return kernels;
}

}  // namespace tessera::bench
