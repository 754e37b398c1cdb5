// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a run_targets(): they add rows.
#include "bench/ops/op_bench.h"
#include "bench/targets/targets.h"

namespace tessera::bench {

// Takes finished rows.
using TakeTargetRow = std::function<void(TargetRow)>;

// Experts, linear maps, attention, indexer. The ceilings are measured here.
void add_op_targets(const TargetOptions& options, Ceilings& ceilings, const TakeTargetRow& take);
// gate, router, experts, shared expert (FP8) and combine, as a layer calls them.
void sublayer_rows(OpBench& bench, const std::string& name, const model::Config& config, const TokenCounts& tokens);
// Layers of each kind: decode steps by kernel, and a prefill of 8,192 tokens.
void add_layer_targets(const TargetOptions& options, const TakeTargetRow& take);

}  // namespace tessera::bench
