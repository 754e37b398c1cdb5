// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes of one rank's memory under a plan: the same sums as the fit check of one GPU (memory_fit.h, Model::step_bytes),
// of the rank's slices.
#include <cstdint>
#include <string>
#include <vector>

#include "model/parallel_plan.h"
#include "ops/precision.h"

namespace tessera::model {

// A backend keeps NVFP4 matrices in whole units of so many rows and columns, the rest of which is padding; scales lie
// in units of their own width.
struct PackedUnitShape {
  int64_t rows = 1, cols = 1, scale_cols = 1;
};

// Of a row's slice: [row_end - row_begin, col_end - col_begin] with its scales.
uint64_t slice_bytes(const WeightRow& row, ops::WeightFormat format, const WeightSlice& slice,
                     const PackedUnitShape& unit = {});

struct HeldWeights {
  std::string kind;      // "routed experts"
  uint64_t bytes = 0;    // that the rank holds, padding included
  uint64_t of = 0;       // of the whole model
  uint64_t padding = 0;  // that units bring
};

struct RankMemory {
  std::vector<HeldWeights> weights;  // every kind once, those that the model has
  uint64_t step = 0;                 // activations, streams, logits, index scores
  uint64_t runtime = 0;              // the driver's context, modules, graphs, NCCL, ops' workspace: estimated
  uint64_t sequence = 0;             // of caches, whatever a sequence's length: rings and compressors' states
  double token = 0;                  // of caches, for each of its tokens (paid by kPageTokens)
  uint64_t weight_bytes() const;
  uint64_t fixed() const { return weight_bytes() + step + runtime; }
};

// Of rank 0: all ranks hold as much. `step_tokens`: most of a step.
RankMemory rank_memory(const StoredModel& model, const ParallelPlan& plan, const ops::Precision& precision,
                       int64_t step_tokens, const PackedUnitShape& unit = {});

// Caches of a sequence of `tokens` on a rank, upper estimate as sequence_bytes().
uint64_t rank_sequence_bytes(const Config& config, const ParallelPlan& plan, const ops::Precision& precision,
                             int64_t tokens, int64_t step_tokens);

}  // namespace tessera::model
