// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels of the three families of targets, and what they share. Used by forms.cc alone.
#include <span>

#include "bench/plan/forms.h"

namespace tessera::bench {

// Experts of tokens that choose evenly, expected: those touched, tiles of at most so many slots, slots of a tile.
struct ExpertLoad {
  double touched = 0, tiles = 0, slots_of_tile = 0;
  // Tiles in whole numbers; of a rank's share less than one may be expected.
  int64_t entries() const { return std::max<int64_t>(1, std::lround(tiles)); }
};
ExpertLoad expert_load(const PlanShape& shape, int64_t tokens, int64_t tile_slots);

// Loads that depend on each other: of a tile's expert before its copies; of grouping: ids, counts, tokens.
constexpr int64_t kExpertLoads = 2, kGroupLoads = 3;

double nvfp4_bytes(double values);
double weight_bytes(ops::WeightFormat format, double values);

// A kernel that only moves bytes: quantising, arranging.
Kernel pass_kernel(const std::string& name, double read_bytes, double written_bytes, const Target& target);

// The portable kernel of up to 8 tokens (cuda_common/weight_stream.cuh): tiles of 16 rows by `width` columns, of as
// many matrices as it has passes, dealt out as stream_plan.h says.
constexpr int64_t kMostStreamTokens = 8;
struct StreamWork {
  ops::WeightFormat format{};
  int64_t tiles = 0, width = 0;
  int passes = 1;
  double tokens = 1;  // of a tile
};
Kernel stream_kernel(const std::string& name, const StreamWork& work, const Target& target);
StreamWork stream_of(const ops::Linear::Desc& desc, int64_t tokens);
// Maps of one input in two formats, of which BF16 is one, whose kernels become one launch where theirs is
// (cuda/linear_group.cu).
void join_formats(std::span<const StreamWork> works, int64_t tokens, const Target& target,
                  std::vector<Kernel>& kernels);

// One launch of maps of one input, of at most kMostStreamTokens tokens: Hopper's ring of units where it has one
// (sm90/unit_ring.cuh), else the stream of `work`, which is all of theirs.
Kernel few_tokens_kernel(std::span<const ops::Linear::Desc> maps, const StreamWork& work, int64_t tokens,
                         const Target& target);
// Whether a layer's shared expert, of NVFP4 and as wide, is in the launches of the routed ones.
bool are_launched_together(const PlanShape& experts, int64_t tokens, const Target& target);

std::vector<Kernel> hopper_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
std::vector<Kernel> tensor_memory_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
std::vector<Kernel> warp_product_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
std::vector<Kernel> ideal_tensor_memory_kernels(const PlanShape& shape, int64_t tokens, const Target& target,
                                                const IdealForm& form);

}  // namespace tessera::bench
