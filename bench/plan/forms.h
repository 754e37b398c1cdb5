// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kernels that a map or a layer's experts are computed by on a target: ours, with the tiles and stages that the
// backends' own plans have (backends/sm*/sum*_plan*.h), and an ideal form where ours is not written or is not the best.
#include <optional>
#include <string>
#include <vector>

#include "bench/plan/kernel.h"
#include "model/config.h"
#include "ops/linear/linear.h"
#include "ops/moe/moe.h"

namespace tessera::bench {

// An NVFP4 linear map, or routed experts of a layer, chosen evenly.
struct PlanShape {
  std::string name;
  bool is_experts = false;
  ops::Linear::Desc map{};
  ops::MoeExperts::Desc experts{};  // of one GPU
  // And the shared one, of this format, where are_launched_together() (families.h).
  std::optional<ops::WeightFormat> shared;
  bool is_square = false;  // a product that others measure, of inputs that are NVFP4 before
};
// Maps and experts of a model's layer; "square N": N outputs of N inputs.
std::vector<PlanShape> plan_shapes(const std::string& model, const model::Config& config);
PlanShape square_shape(int64_t size);

double shape_flops(const PlanShape& shape, int64_t tokens);
// Weights that are read: experts that tokens are expected to touch.
double shape_weight_bytes(const PlanShape& shape, int64_t tokens);

// Ours; empty where the target's backend leaves the op to the portable one.
std::vector<Kernel> our_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
// The portable backend's: any format, any tokens; by the rates that it has on an H200 (docs/performance/cuda.md).
std::vector<Kernel> portable_kernels(const PlanShape& shape, int64_t tokens, const Target& target);
// `pairs`: of a cluster, those that share inputs by multicast (datacenter Blackwell's form).
struct IdealForm {
  int64_t pairs = 2;
  int64_t product_columns = 64;  // K of a product: 64, on B300 also 96
};
std::vector<Kernel> ideal_kernels(const PlanShape& shape, int64_t tokens, const Target& target, const IdealForm& form);

}  // namespace tessera::bench
