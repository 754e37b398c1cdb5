// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tiles, stages and choices of Hopper's kernels for packed weights: plain numbers that wide_sums.cuh, few_sums.cuh and
// their launches are made of, and that predictions of their time (bench/plan) are worked out from.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>

#include "backends/cuda/expert_plan.h"
#include "backends/cuda_common/input_rows.h"
#include "backends/cuda_common/packed_units.h"
#include "backends/cuda_common/stream_limit.h"
#include "backends/cuda_common/stream_plan.h"
#include "ops/all_experts/all_experts.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/linear/linear.h"
#include "ops/linear_group/linear_group.h"
#include "ops/moe/moe.h"

namespace tessera::backends::sm90 {

// kFolds: of FP8 whose scales fold (cuda_common/packed_units.h).
template <ops::WeightFormat kFormat, bool kFolds = false>
struct WidePlanOf {
  using Unit = cuda_common::PackedUnit<kFormat>;
  static constexpr bool kIsNvfp4 = Unit::kIsNvfp4;
  // FP8 whose scales do not fold has a fourth set of sums: of 128 columns, before their scale.
  static constexpr int kTokens = kFormat == ops::WeightFormat::kFp8Block && !kFolds ? 96 : 128;
  static constexpr int kSlots = 8;  // a slot is a unit of 16 rows
  static constexpr int kTileRows = kSlots * Unit::kRows;
  static constexpr int kConsumerWarps = kSlots, kThreads = (kConsumerWarps + 4) * 32;
  // A stage of inputs is 128 columns, one of weights a unit's. Every bulk copy costs its issuer some 100 cycles, so
  // there are few: one for a stage of inputs, eight for weights, which two warps issue where units have few columns.
  static constexpr int kInputColumns = 128, kWeightColumns = Unit::kColumns;
  static constexpr int kInputStages = cuda_common::PackedNvfp4::kColumns / kInputColumns;
  static constexpr int kWeightStages = kIsNvfp4 ? 2 : 3, kWeightProducers = kIsNvfp4 ? 1 : 2;
  // Tokens of the products of a tile of so many: whole steps.
  static constexpr int kTokenStep = 32;
  TESSERA_HOST_DEVICE static constexpr int product_tokens(int tokens) {
    return tokens > 96 ? kTokens : tokens > 64 ? 96 : tokens > 32 ? 64 : 32;
  }
};
using WidePlan = WidePlanOf<ops::WeightFormat::kNvfp4>;

struct FewPlan {
  static constexpr int kTokens = 8, kTokenStep = 8, kSlots = 4, kTeams = 4, kStages = 2;
  static constexpr int kTileRows = kSlots * cuda_common::PackedNvfp4::kRows;
  static constexpr int kTeamThreads = kSlots * 32, kThreads = kTeams * (kTeamThreads + 32);
};

// unit_ring.cuh, for tiles of up to kTokens tokens, whose units are 16 rows by 512 columns: a stage, but in a ring of
// NVFP4 FP8's take two. A block has a multiprocessor's shared memory: what sums do not take of it are stages.
template <int kTokens, ops::WeightFormat kFormat = ops::WeightFormat::kNvfp4>
struct RingPlan {
  static constexpr int kWarps = 16, kCopyingWarps = 4, kThreads = (kWarps + kCopyingWarps) * 32;
  static constexpr int kStages = kFormat == ops::WeightFormat::kFp8Block ? 24 : kTokens == 1 ? 44 : 40;
  static constexpr int kRoundUnits = kTokens == 1 ? 128 : 32;
};

inline int64_t ring_chunks(int64_t in) {
  return ceil_div<int64_t>(in, cuda_common::PackedNvfp4::kColumns);
}

// Whether such tiles, of `passes` maps, are so many units or more, and a round has room for one tile.
template <int kTokens>
bool fills_ring(int64_t in, int64_t row_tiles, int passes, int64_t fewest_units) {
  const int64_t tile_units = ring_chunks(in) * passes;
  return tile_units <= RingPlan<kTokens>::kRoundUnits && row_tiles * tile_units >= fewest_units;
}

// To a multiprocessor: of NVFP4 as many as it has warps to work on them, as measured on an H200; of FP8 less than any
// map that was measured and gained (docs/performance/hopper.md, "FP8 in the ring, and parts of chunks").
constexpr int64_t kFewestRingUnits = RingPlan<1>::kWarps, kFewestFp8RingUnits = 5;

// Maps of one input: of NVFP4 of one token, with more the portable kernels are as fast; of FP8 where all scales fold.
inline bool uses_ring(std::span<const ops::Linear::Desc> maps, int passes, bool fold, int64_t num_tokens,
                      int64_t multiprocessors) {
  const ops::Linear::Desc& first = maps.front();
  const bool is_fp8 = first.format == ops::WeightFormat::kFp8Block;
  if (!(is_fp8 && fold) && first.format != ops::WeightFormat::kNvfp4) return false;
  if (num_tokens > (is_fp8 ? FewPlan::kTokens : 1) || first.in % cuda_common::PackedNvfp4::kColumns != 0) return false;
  int64_t row_tiles = 0;
  for (const ops::Linear::Desc& map : maps) {
    if (map.format != first.format || map.out % cuda_common::PackedNvfp4::kRows != 0) return false;
    row_tiles += map.groups * map.out / cuda_common::PackedNvfp4::kRows;
  }
  const int64_t fewest = (is_fp8 ? kFewestFp8RingUnits : kFewestRingUnits) * multiprocessors;
  return num_tokens == 1 ? fills_ring<1>(first.in, row_tiles / passes, passes, fewest)
                         : fills_ring<FewPlan::kTokens>(first.in, row_tiles / passes, passes, fewest);
}
inline bool uses_ring(const ops::LinearGroup::Desc& desc, bool fold, int64_t num_tokens, int64_t multiprocessors) {
  return uses_ring(desc.maps, desc.swiglu ? 2 : 1, fold, num_tokens, multiprocessors);
}
// Maps of two formats, whether they are one launch of the portable kernels (cuda/linear_group.cu) of few tokens: where
// no ring loses as many units as NVFP4 wants of it, nor more tiles than the launch has blocks. FP8's maps of a layer's
// input are fewer and have the ring by themselves; together with BF16's they are faster without. Others were not timed
// (docs/performance/hopper.md, "Maps of two formats in one launch").
inline bool streams_formats(std::span<const ops::Linear::Desc> maps, int64_t num_tokens, int64_t multiprocessors) {
  int64_t tiles = 0, units = 0;
  for (const ops::Linear::Desc& map : maps) {
    const bool is_nvfp4 = map.format == ops::WeightFormat::kNvfp4;
    if (map.format == ops::WeightFormat::kBf16 || (is_nvfp4 && num_tokens > 1)) continue;  // they have no ring
    const int64_t of_map = ceil_div<int64_t>(map.out, cuda_common::PackedNvfp4::kRows);
    tiles += of_map, units += of_map * ring_chunks(map.in);
  }
  return num_tokens <= FewPlan::kTokens && units < kFewestRingUnits * multiprocessors &&
         tiles <= cuda_common::kStreamBlocksAtOnce * multiprocessors;
}
// Experts whose portable kernels would list the slots themselves.
inline bool uses_ring(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  constexpr int64_t kRows = cuda_common::PackedNvfp4::kRows;
  const int64_t num_slots = num_tokens * desc.top_k, fewest = kFewestRingUnits * multiprocessors;
  return desc.format == ops::WeightFormat::kNvfp4 && num_slots <= cuda::kFewExpertSlots &&
         num_tokens <= FewPlan::kTokens && desc.hidden % cuda_common::PackedNvfp4::kColumns == 0 &&
         desc.inner % WidePlan::kInputColumns == 0 &&
         fills_ring<FewPlan::kTokens>(desc.hidden, num_slots * desc.inner / kRows, 2, fewest) &&
         fills_ring<FewPlan::kTokens>(desc.inner, num_slots * desc.hidden / kRows, 1, fewest);
}

// Up to here the portable kernels are as fast.
constexpr int64_t kFewMapTokens = 16;

// Tokens of a tile, and its time for 128 columns where every multiprocessor has one.
struct WideTile {
  int32_t tokens;
  double block_us;
};
inline std::array<WideTile, 3> wide_tiles(ops::WeightFormat format, bool folds) {
  switch (format) {
    case ops::WeightFormat::kFp8Block:
      if (folds) return {{{32, 0.54}, {64, 0.57}, {128, 0.77}}};
      return {{{32, 0.70}, {64, 0.80}, {96, 1.1}}};
    case ops::WeightFormat::kBf16:
      return {{{32, 0.70}, {64, 0.75}, {128, 0.98}}};
    case ops::WeightFormat::kNvfp4:
    case ops::WeightFormat::kF32:  // declined
      break;
  }
  return {{{32, 0.50}, {64, 0.52}, {128, 0.75}}};
}

// What takes the least time, by what was measured on an H200. Times are of launches behind each other, in us.
enum class LinearKernels { kPortable, kWide, kChunks };
struct LinearChoice {
  LinearKernels kernels = LinearKernels::kPortable;
  int32_t tile_tokens = 0;  // of the others
  double us = 0;
};

constexpr double kWideBeginUs = 6;  // inputs arranged, and the first tile of a multiprocessor

// Chunks' sums stay in L2.
constexpr int64_t kMostChunkTokens = 256, kMostChunkSums = int64_t{4} << 20;

// Floats of the sums of these maps' chunks.
inline int64_t chunk_sums_of(std::span<const ops::Linear::Desc> maps, int64_t num_tokens) {
  int64_t rows = 0;
  for (const ops::Linear::Desc& map : maps) rows += map.out;
  return maps.front().in / cuda_common::PackedNvfp4::kColumns * num_tokens * rows;
}

// The most tokens, of `max_tokens`, whose sums fit; 0: no such maps.
inline int64_t most_chunk_tokens(std::span<const ops::Linear::Desc> maps, int64_t max_tokens) {
  using cuda_common::PackedNvfp4;
  for (const ops::Linear::Desc& map : maps) {
    if (map.groups != 1 || map.in % PackedNvfp4::kColumns != 0 || map.out % PackedNvfp4::kRows != 0) return 0;
  }
  return std::min({max_tokens, kMostChunkTokens, kMostChunkSums / chunk_sums_of(maps, 1)});
}

inline LinearChoice chunk_choice(std::span<const ops::Linear::Desc> maps, int64_t num_tokens, int64_t multiprocessors,
                                 bool folds) {
  constexpr double kAddUs = 4, kSumsPerUs = 0.6e6;  // the second kernel; sums written and read
  LinearChoice best{.us = std::numeric_limits<double>::infinity()};
  if (num_tokens > most_chunk_tokens(maps, num_tokens)) return best;
  for (const WideTile& tile : wide_tiles(maps.front().format, folds)) {
    int64_t tiles = 0;
    for (const ops::Linear::Desc& map : maps) {
      tiles += ceil_div<int64_t>(map.out, WidePlan::kTileRows) * ceil_div<int64_t>(num_tokens, tile.tokens) *
               (map.in / cuda_common::PackedNvfp4::kColumns);
    }
    const double us = kWideBeginUs +
                      static_cast<double>(ceil_div(tiles, multiprocessors) * WidePlan::kInputStages) * tile.block_us +
                      kAddUs + static_cast<double>(chunk_sums_of(maps, num_tokens)) / kSumsPerUs;
    if (us < best.us) best = {LinearKernels::kChunks, tile.tokens, us};
  }
  return best;
}

// Of the portable kernels' launch of all maps; infinite where they have none (cuda_common/stream_limit.h).
inline double stream_us(std::span<const ops::Linear::Desc> maps, int64_t num_tokens, int64_t multiprocessors) {
  const ops::Linear::Desc& first = maps.front();
  const double units_per_us = first.format == ops::WeightFormat::kNvfp4 ? 4.4 : 2.9;  // of a multiprocessor
  constexpr double kBegin = 1.5;
  int64_t row_tiles = 0;
  for (const ops::Linear::Desc& map : maps) row_tiles += map.groups * ceil_div<int64_t>(map.out, 16);
  if (!cuda_common::streams_tokens(first.format, std::ssize(maps), row_tiles, first.in, num_tokens)) {
    return std::numeric_limits<double>::infinity();
  }
  const int64_t units = row_tiles * ceil_div<int64_t>(first.in, cuda_common::PackedNvfp4::kColumns) *
                        ceil_div<int64_t>(num_tokens, FewPlan::kTokens);
  return kBegin + static_cast<double>(units) / (units_per_us * static_cast<double>(multiprocessors));
}

// Of the portable kernel of more tokens, for one map.
inline double portable_us(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  const double least = desc.format == ops::WeightFormat::kBf16 ? 13 : 8;
  // Of a multiprocessor. FP8's groups: wo_a of 32 tokens took 45 to 56 us in six layers (docs/performance/hopper.md).
  const bool has_fp8_groups = desc.format == ops::WeightFormat::kFp8Block && desc.groups > 1;
  const double flops_per_us = has_fp8_groups ? 0.45e6 : 0.8e6;
  const double flops = 2.0 * static_cast<double>(desc.groups * desc.out * desc.in * num_tokens);
  return least + flops / (flops_per_us * static_cast<double>(multiprocessors));
}

// Of a map by itself, whose scales fold or not (ops::WeightView). What multiplies it does not change a bit.
inline LinearChoice linear_choice(const ops::Linear::Desc& desc, int64_t num_tokens, int64_t multiprocessors,
                                  bool folds) {
  using cuda_common::PackedNvfp4;
  const std::span<const ops::Linear::Desc> map(&desc, 1);
  if (num_tokens <= FewPlan::kTokens) return {};
  LinearChoice best{
      .us = std::min(stream_us(map, num_tokens, multiprocessors), portable_us(desc, num_tokens, multiprocessors))};
  const auto consider = [&](const LinearChoice& other) {
    if (other.us < best.us) best = other;
  };
  if (num_tokens > kFewMapTokens && desc.in % PackedNvfp4::kColumns == 0 && desc.out % PackedNvfp4::kRows == 0) {
    for (const WideTile& tile : wide_tiles(desc.format, folds)) {
      const int64_t tiles =
          desc.groups * ceil_div<int64_t>(desc.out, WidePlan::kTileRows) * ceil_div<int64_t>(num_tokens, tile.tokens);
      const int64_t rounds = ceil_div<int64_t>(tiles, multiprocessors);
      consider({LinearKernels::kWide, tile.tokens,
                kWideBeginUs + static_cast<double>(rounds * (desc.in / WidePlan::kInputColumns)) * tile.block_us});
    }
  }
  consider(chunk_choice(map, num_tokens, multiprocessors, folds));
  return best;
}

// Of maps of one input: kPortable is their one launch, kWide each by itself. One launch for chunks has weights whose
// scales all fold, or none of whose do: of a mixture, maps that would take it go one by one, weighed as if none folded.
inline LinearChoice group_choice(std::span<const ops::Linear::Desc> maps, int64_t num_tokens, int64_t multiprocessors,
                                 bool all_fold, bool any_folds) {
  if (num_tokens <= FewPlan::kTokens) return {};
  LinearChoice best{.kernels = LinearKernels::kWide};
  for (const ops::Linear::Desc& map : maps) best.us += linear_choice(map, num_tokens, multiprocessors, all_fold).us;
  const double streamed = stream_us(maps, num_tokens, multiprocessors);
  if (streamed < best.us) best = {.us = streamed};
  if (any_folds && !all_fold) return best;
  const LinearChoice chunks = chunk_choice(maps, num_tokens, multiprocessors, all_fold);
  return chunks.us < best.us ? chunks : best;
}

enum class ExpertKernels { kPortable, kFew, kWide };

// That group_few takes, which counts slots in one thread block.
constexpr int64_t kMostFewSlots = 1024;

// Columns of h as `down` reads it: of whole units of w2, whose columns beyond are zero.
inline int64_t padded_inner(const ops::MoeExperts::Desc& desc) {
  return round_up<int64_t>(desc.inner, WidePlan::kWeightColumns);
}

// Whether an expert has so many slots that tiles of many tokens are faster: of Flash 6 to each took 1.04 ms in tiles of
// few and 1.26 in tiles of many, 8 as long in both, of Pro 8 5.4 and 5.1, when each map of few was a kernel of its own.
inline bool has_many_slots(const ops::MoeExperts::Desc& desc, int64_t num_tokens) {
  constexpr int64_t kManySlots = 8;  // to an expert
  return num_tokens * desc.top_k >= kManySlots * desc.all_experts();
}

// By what this rank computes: its share of all slots, with its part of their width. From nine tiles to ten teams on
// few_experts is faster than the ring, but for one token's slots, and than the portable kernels of more slots
// (docs/performance/hopper.md, "Fewer tiles than teams"). Rounded inputs have two launches of few_sums instead.
inline ExpertKernels expert_kernels(const ops::MoeExperts::Desc& desc, int64_t num_tokens, int64_t multiprocessors) {
  const int64_t tenths_of_teams = cuda_common::needs_input_rows(desc.input) ? 20 : 9;
  const int64_t num_slots = num_tokens * desc.top_k;
  if (desc.hidden % WidePlan::kWeightColumns != 0 || desc.inner % WidePlan::kInputColumns != 0)
    return ExpertKernels::kPortable;
  if (has_many_slots(desc, num_tokens)) return ExpertKernels::kWide;
  // A tile of gate and up has half its rows of each.
  const int64_t tiles =
      num_slots * desc.num_local / desc.all_experts() * ceil_div<int64_t>(desc.inner, FewPlan::kTileRows / 2);
  const int64_t teams = int64_t{FewPlan::kTeams} * multiprocessors;
  return num_tokens > 1 && 10 * tiles >= tenths_of_teams * teams ? ExpertKernels::kFew : ExpertKernels::kPortable;
}

// Whether the shared expert, of the routed ones' width, is in their launches: where those take the ring. FP8's where
// all scales fold and, of a block, as many units as the ring can tell from the others behind them: a warp's first one
// of those lies in one of the first two rounds (copy_units() in unit_ring.cuh).
inline bool uses_ring(const ops::AllExperts::Desc& desc, bool shared_folds, int64_t num_tokens,
                      int64_t multiprocessors) {
  const ops::MoeExperts::Desc& routed = desc.routed;
  const int64_t stages = num_tokens == 1 ? RingPlan<1>::kStages : RingPlan<FewPlan::kTokens>::kStages;
  const auto has_room = [&](int64_t in, int64_t out, int64_t passes) {
    const int64_t tiles = ceil_div<int64_t>(out / cuda_common::PackedNvfp4::kRows, multiprocessors);  // of a block
    return 2 * tiles * ring_chunks(in) * passes + RingPlan<1>::kWarps <= 2 * stages;
  };
  if (expert_kernels(routed, num_tokens, multiprocessors) != ExpertKernels::kPortable ||
      !uses_ring(routed, num_tokens, multiprocessors)) {
    return false;
  }
  return desc.down.format == ops::WeightFormat::kNvfp4 ||
         (shared_folds && has_room(routed.hidden, routed.inner, 2) && has_room(routed.inner, routed.hidden, 1));
}

// Whether a group's matrix is whole units: what few_sums.cuh and wide_sums.cuh take of grouped_linear.
inline bool has_wide_tiles(const ops::GroupedLinear::Desc& desc) {
  return desc.in % cuda_common::PackedNvfp4::kColumns == 0 && desc.out % cuda_common::PackedNvfp4::kRows == 0;
}

// By the rows that are expected, of at most num_rows. Limits are those that experts had; of groups they were not timed.
inline ExpertKernels grouped_kernels(const ops::GroupedLinear::Desc& desc, int64_t num_rows, int64_t expected_rows,
                                     int64_t multiprocessors) {
  constexpr int64_t kManyRows = 6, kFewestTeams = 2;  // of a group; tiles to a team
  if (!has_wide_tiles(desc)) return ExpertKernels::kPortable;
  const int64_t rows = expected_rows > 0 ? std::min(num_rows, expected_rows * desc.num_groups) : num_rows;
  if (rows >= kManyRows * desc.num_groups) return ExpertKernels::kWide;
  const int64_t teams = int64_t{FewPlan::kTeams} * multiprocessors;
  const int64_t tiles = rows * ceil_div<int64_t>(desc.out, FewPlan::kTileRows);
  return tiles >= kFewestTeams * teams ? ExpertKernels::kFew : ExpertKernels::kPortable;
}

}  // namespace tessera::backends::sm90
