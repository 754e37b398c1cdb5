// SPDX-License-Identifier: Apache-2.0
// The portable GPU backend's maps and experts (backends/cuda): few tokens stream weights, more have tiles of products.
#include <algorithm>
#include <cmath>

#include "backends/cuda/expert_plan.h"
#include "backends/cuda_common/packed_units.h"
#include "base/integer_math.h"
#include "bench/plan/families.h"

namespace tessera::bench {

namespace {

using backends::cuda_common::PackedNvfp4;

// Instructions of a warp for 16 rows by 128 columns by 8 tokens, counted (docs/performance/cuda.md).
double stream_instructions(ops::WeightFormat format) {
  return format == ops::WeightFormat::kNvfp4 ? 191 : format == ops::WeightFormat::kFp8Block ? 226 : 99;
}

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

Kernel stream_kernel(const std::string& name, ops::WeightFormat format, double values, const Target& target) {
  const double blocks = values / (PackedNvfp4::kRows * 128.0), warps = 4.0 * target.multiprocessors;
  Kernel k;
  k.name = name;
  k.tiles = target.multiprocessors;
  k.issue_cycles = blocks / warps * stream_instructions(format);
  k.memory_bytes = weight_bytes(format, values);
  k.requested_bytes = k.memory_bytes / target.multiprocessors;
  k.is_bulk = false;
  return k;
}

std::vector<Kernel> portable_kernels(const PlanShape& shape, int64_t tokens, const Target& target) {
  const double flops = shape_flops(shape, tokens);
  if (!shape.is_experts) {
    const ops::Linear::Desc& d = shape.map;
    const auto values = static_cast<double>(d.groups * d.out * d.in);
    if (tokens <= kMostStreamTokens) return {stream_kernel("cuda linear_stream", d.format, values, target)};
    const double padded = static_cast<double>(round_up(tokens, kTileTokens)) / static_cast<double>(tokens);
    return {tile_kernel("cuda linear_mma", weight_bytes(d.format, values), flops * padded, target)};
  }
  const ops::MoeExperts::Desc& e = shape.experts;
  const double touched = expert_load(shape, tokens, 1).touched;
  const double gate_up = 2.0 * static_cast<double>(e.hidden * e.inner) * touched;
  std::vector<Kernel> kernels = {stream_kernel("cuda gate_and_up", e.format, gate_up, target),
                                 stream_kernel("cuda down", e.format, gate_up / 2, target)};
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
