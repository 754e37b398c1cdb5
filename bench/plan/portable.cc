// SPDX-License-Identifier: Apache-2.0
// The portable GPU backend's maps and experts (backends/cuda): few tokens stream weights, more have tiles of products.
#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cuda/expert_plan.h"
#include "backends/cuda_common/packed_units.h"
#include "backends/cuda_common/stream_plan.h"
#include "backends/sm90/sum_plans.h"
#include "base/integer_math.h"
#include "bench/plan/families.h"

namespace tessera::bench {

namespace {

using namespace backends::cuda_common;  // NOLINT: the plans' names

// Cycles of a scheduler for a warp's 16 rows by 512 columns: the pipes' times one after another, since four warps do
// not overlap them (docs/performance/prediction.md). Set by wo_b at one token in each format. A token more is a
// wavefront more of each of 16 loads of inputs, which the four schedulers share.
double stream_cycles(ops::WeightFormat format, double tokens) {
  constexpr double kOfToken = 64;
  const double weights = format == ops::WeightFormat::kNvfp4      ? 1'240
                         : format == ops::WeightFormat::kFp8Block ? 1'200
                                                                  : 500;
  return weights + kOfToken * std::ceil(tokens);
}

// Stages of a warp's ring (cuda_common/packed_ring.cuh), units of some 4 KiB, and of one whose block has a
// multiprocessor for itself.
constexpr int64_t kStages = 2, kManyStages = 4;
constexpr double kUnitBytes = 4096;

// FLOP a cycle of a multiprocessor of maps of many tokens in any format: 75 TFLOP/s on an H200 (cuda.md, 64 tokens).
constexpr double kTileRate = 310;
constexpr int64_t kTileTokens = 8;  // what products are rounded up to

Kernel tile_kernel(const std::string& name, double bytes, double flops, const Target& target) {
  Kernel k;
  k.name = name;
  k.tiles = target.multiprocessors;
  k.issue_cycles = flops / kTileRate / target.multiprocessors;
  k.memory_bytes = bytes;
  k.requested_bytes = bytes / target.multiprocessors;
  k.is_bulk = false;
  return k;
}

}  // namespace

StreamWork stream_of(const ops::Linear::Desc& d, int64_t tokens) {
  return {.format = d.format,
          .tiles = d.groups * ceil_div<int64_t>(d.out, PackedNvfp4::kRows),
          .width = d.in,
          .tokens = static_cast<double>(tokens)};
}

namespace {

Kernel planned_stream(const std::string& name, const StreamWork& work, const StreamPlan& plan, int64_t stages,
                      const Target& target) {
  constexpr int64_t kSchedulers = 4, kChunk = PackedNvfp4::kColumns;
  const int64_t chunks = ceil_div(work.width, kChunk);
  const int64_t blocks = stream_blocks(plan, work.tiles, target.multiprocessors);
  const int64_t rounds = ceil_div<int64_t>(work.tiles, blocks * plan.block_tiles);
  const int64_t turns = rounds * ceil_div<int64_t>(chunks, plan.tile_warps) * work.passes;  // of a warp
  // Of a scheduler, which has every fourth warp, on the fullest multiprocessor.
  std::array<int64_t, kSchedulers> chunks_of{}, warps_of{};
  for (int64_t warp = 0; warp < int64_t{plan.block_tiles} * plan.tile_warps; ++warp) {
    chunks_of[static_cast<size_t>(warp % kSchedulers)] +=
        ceil_div(chunks - warp % plan.tile_warps, int64_t{plan.tile_warps});
    ++warps_of[static_cast<size_t>(warp % kSchedulers)];
  }
  const int64_t at_once = ceil_div<int64_t>(blocks, target.multiprocessors);
  const auto units =
      static_cast<double>(rounds * at_once * work.passes * *std::max_element(chunks_of.begin(), chunks_of.end()));
  const auto warps = static_cast<double>(at_once * *std::max_element(warps_of.begin(), warps_of.end()));
  const double cycles = stream_cycles(work.format, work.tokens);
  Kernel k;
  k.name = name;
  k.tiles = target.multiprocessors;
  k.issue_cycles = units * cycles;
  k.memory_bytes =
      weight_bytes(work.format, static_cast<double>(work.tiles * work.passes * PackedNvfp4::kRows * work.width));
  k.first_bytes = k.memory_bytes / static_cast<double>(turns);
  k.drain_cycles = warps * cycles;
  k.early_bytes =
      std::min(k.memory_bytes, kUnitBytes * static_cast<double>(stages * blocks * plan.block_tiles * plan.tile_warps));
  k.input_bytes =
      2 * static_cast<double>(work.tiles * work.width) * std::ceil(work.tokens) / static_cast<double>(turns);
  k.latencies = 0;
  k.requested_bytes = k.memory_bytes / target.multiprocessors;
  k.is_bulk = false;
  return k;
}

}  // namespace

Kernel stream_kernel(const std::string& name, const StreamWork& work, const Target& target) {
  const int64_t chunks = ceil_div<int64_t>(work.width, PackedNvfp4::kColumns);
  const StreamPlan plan = stream_plan(chunks, work.tiles, work.passes, target.multiprocessors);
  const bool has_many = stream_blocks(plan, work.tiles, target.multiprocessors) <= target.multiprocessors;
  return planned_stream(name, work, plan, has_many ? kManyStages : kStages, target);
}

void join_formats(std::span<const StreamWork> works, int64_t tokens, const Target& target,
                  std::vector<Kernel>& kernels) {
  if (works.size() != 2 || works[0].width != works[1].width) return;
  const auto count_of = [&](ops::WeightFormat format) {
    return std::ranges::count(works, format, &StreamWork::format);
  };
  std::array<ops::Linear::Desc, 2> maps;
  for (size_t i = 0; i < maps.size(); ++i) {
    maps[i] = {.in = works[i].width, .out = works[i].tiles * PackedNvfp4::kRows, .format = works[i].format};
  }
  const bool has_kernel = count_of(ops::WeightFormat::kBf16) == 1 && count_of(ops::WeightFormat::kF32) == 0;
  if (!has_kernel || tokens > kMostStreamTokens) return;
  if (target.family == Family::kHopper && !backends::sm90::streams_formats(maps, tokens, target.multiprocessors))
    return;
  const int64_t chunks = ceil_div<int64_t>(works[0].width, PackedNvfp4::kColumns);
  const StreamPlan plan = stream_plan(chunks, works[0].tiles + works[1].tiles, 1, target.multiprocessors);
  int64_t blocks = 0;
  for (const StreamWork& work : works) blocks += ceil_div<int64_t>(work.tiles, plan.block_tiles);
  if (blocks > kStreamBlocksAtOnce * target.multiprocessors) return;
  Kernel both = planned_stream("cuda linear_stream", works[0], plan, kStages, target);
  const Kernel other = planned_stream("cuda linear_stream", works[1], plan, kStages, target);
  both.issue_cycles += other.issue_cycles, both.memory_bytes += other.memory_bytes;
  both.first_bytes += other.first_bytes, both.requested_bytes += other.requested_bytes;
  both.early_bytes += other.early_bytes, both.input_bytes += other.input_bytes;
  both.drain_cycles = std::max(both.drain_cycles, other.drain_cycles);
  kernels = {both};
}

std::vector<Kernel> portable_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  const double flops = shape_flops(shape, tokens);
  if (!shape.is_experts) {
    const ops::Linear::Desc& d = shape.map;
    const auto values = static_cast<double>(d.groups * d.out * d.in);
    if (tokens <= kMostStreamTokens) return {stream_kernel("cuda linear_stream", stream_of(d, tokens), target)};
    const double padded = static_cast<double>(round_up(tokens, kTileTokens)) / static_cast<double>(tokens);
    return {tile_kernel("cuda linear_mma", weight_bytes(d.format, values), flops * padded, target)};
  }
  const ops::MoeExperts::Desc& e = shape.experts;
  const double touched = expert_load(shape, tokens, 1).touched;
  const ExpertLoad load = expert_load(shape, tokens, kTileTokens);
  const int64_t entries = load.entries();
  const auto row_tiles = [&](int64_t rows) { return entries * ceil_div<int64_t>(rows, PackedNvfp4::kRows); };
  std::vector<Kernel> kernels = {
      stream_kernel("cuda gate_and_up", {e.format, row_tiles(e.inner), e.hidden, 2, load.slots_of_tile}, target),
      stream_kernel("cuda down", {e.format, row_tiles(e.hidden), e.inner, 1, load.slots_of_tile}, target)};
  const double gate_up = 2.0 * static_cast<double>(e.hidden * e.inner) * touched;
  kernels[0].memory_bytes = weight_bytes(e.format, gate_up),
  kernels[1].memory_bytes = weight_bytes(e.format, gate_up / 2);
  for (Kernel& kernel : kernels) kernel.latencies = kExpertLoads;
  for (size_t i = 0; i < kernels.size(); ++i) {
    const Kernel tiles = tile_kernel("", 0, flops * (i == 0 ? 2.0 : 1.0) / 3, target);
    kernels[i].issue_cycles = std::max(kernels[i].issue_cycles, tiles.issue_cycles);
    kernels[i].flops = flops * (i == 0 ? 2.0 : 1.0) / 3;
  }
  if (tokens * e.top_k > backends::cuda::kFewExpertSlots) {
    kernels.insert(kernels.begin(), pass_kernel("group slots", 0, 0, target));
  }
  return kernels;
}

}  // namespace tessera::bench
