// SPDX-License-Identifier: Apache-2.0
#pragma once
// Kernels of the three families of targets, and what they share. Used by forms.cc alone.
#include "bench/plan/forms.h"

namespace tessera::bench {

// Experts of tokens that choose evenly, expected: those touched, tiles of at most so many slots, slots of a tile.
struct ExpertLoad {
  double touched = 0, tiles = 0, slots_of_tile = 0;
};
ExpertLoad expert_load(const PlanShape& shape, int64_t tokens, int64_t tile_slots);

double nvfp4_bytes(double values);
double weight_bytes(ops::WeightFormat format, double values);

// A kernel that only moves bytes: quantising, arranging.
Kernel pass_kernel(const std::string& name, double read_bytes, double written_bytes, const Target& target);

// The portable kernel of up to 8 tokens: `values` weights that all warps share evenly.
constexpr int64_t kMostStreamTokens = 8;
Kernel stream_kernel(const std::string& name, ops::WeightFormat format, double values, const Target& target);

std::vector<Kernel> hopper_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
std::vector<Kernel> tensor_memory_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
std::vector<Kernel> warp_product_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
std::vector<Kernel> ideal_tensor_memory_kernels(const PlanShape& shape, int64_t tokens, const Target& target,
                                                const IdealForm& form);

}  // namespace tessera::bench
