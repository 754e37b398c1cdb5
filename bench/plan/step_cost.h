// SPDX-License-Identifier: Apache-2.0
#pragma once
// Predicted time of a step of a whole model on one of the ranks that share it: kernels as they are written
// (bench/plan/forms.h), one after the other, and sums over ranks. What is not a map or an expert has the rate that it
// was measured with on an H200 (step_layer.h); docs/performance/several_gpus.md says how far off the whole is.
#include <cstdint>
#include <string>
#include <vector>

#include "bench/plan/target.h"
#include "model/parallel_plan.h"
#include "ops/precision.h"

namespace tessera::bench {

struct StepLoad {
  int64_t sequences = 1;
  int64_t tokens = 1;    // of each: 1 to decode, a chunk's to prefill
  int64_t position = 0;  // of the first of them, in each sequence
  // Of maps and experts. Blackwell's own kernels take kA4's alone; Hopper's have the times of kA16's here.
  ops::InputMode input = ops::InputMode::kA16;
  int64_t rows() const { return sequences * tokens; }
};

// What of a layer follows one purpose.
struct CostPart {
  std::string name;
  double us = 0;
  double limit_us = 0;  // bytes or products alone, at the GPU's rates; of sums over ranks, the link
  double bytes = 0;     // weights and caches that are read
  double flops = 0;
  double received_bytes = 0;  // from other ranks
  std::string bound;          // of the part's longest kernel: a resource of bench/plan/kernel.h, "collectives", "link"
};

struct LayerCost {
  std::string kind;  // "window", "ratio 4", "ratio 128", "embedding, head, drawing"
  int64_t count = 0;
  std::vector<CostPart> parts;
  double us() const;
  double limit_us() const;
};

struct StepCost {
  std::vector<LayerCost> layers;  // one of each kind
  double us() const;
  double limit_us() const;
  // Every part over all layers.
  std::vector<CostPart> parts() const;
};

// The name of the part that sums over ranks are.
constexpr const char* kSumsPart = "sums over ranks";
// And of the gathering of logits, where the head is cut.
constexpr const char* kLogitsPart = "logits of ranks";
// Of the shared expert where it is in the launches of the routed ones: what it adds to their time, beside the limit of
// all that it reads and multiplies.
constexpr const char* kSharedPart = "shared expert, added";

StepCost step_cost(const model::StoredModel& model, const model::ParallelPlan& plan, const Target& target,
                   const StepLoad& load);

// A layer of the kind of number `layer` alone.
LayerCost layer_cost(const model::StoredModel& model, const model::ParallelPlan& plan, const Target& target,
                     const StepLoad& load, int64_t layer);

}  // namespace tessera::bench
